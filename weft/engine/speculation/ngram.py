"""Prompt look-up: drafts of what followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.ops.vocab.ngram_drafts import look_up
from weft.runtime.copying import move_rows, to_device

if TYPE_CHECKING:
    from weft.engine.prefill import PrefillChunk
    from weft.engine.slots import Slots


class History:
    """Tokens of the sequences in batch slots, on the device: [max_batch, length] int32.

    Tokens 0 .. position of a slot are valid. The last column takes what is not to be written.
    """

    def __init__(self, slots: Slots, newest: Tensor, length: int) -> None:
        """`newest`: token at each slot's position, [max_batch] int64; `length`: of the longest sequence."""
        self.slots, self.newest = slots, newest
        self.tokens = torch.zeros(len(newest), length + 1, dtype=torch.int32, device=newest.device)

    def note_newest(self, batch: int) -> None:
        """Write the newest tokens of slots 0 .. batch - 1 at their positions."""
        self._write(self.slots.positions[:batch, None], self.newest[:batch, None])

    def accept(self, batch: int, tokens: Tensor, counts: Tensor) -> None:
        """Write the first counts[b] of `tokens` after slot b's position."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        at = self.slots.positions[:batch, None] + 1 + place
        self._write(torch.where(place < counts[:, None], at, -1), tokens)

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        """Write a sequence's first tokens."""
        self.tokens[slot, : len(tokens)] = to_device(tokens, self.tokens.device, torch.int32)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move the tokens of slots, (from, to)."""
        move_rows(moves, self.tokens)

    def _write(self, at: Tensor, tokens: Tensor) -> None:
        """Write `tokens` [batch, n] at places `at`; -1: nowhere."""
        dump = self.tokens.shape[1] - 1
        at = torch.where(at < 0, dump, at).clamp(max=dump)
        self.tokens[: len(at)].scatter_(1, at, tokens.to(torch.int32))


class NgramDrafter:
    """Drafter by prompt look-up (weft.engine.speculation.drafting.Drafter).

    Of the n-grams of `least` to `most` tokens that end with the newest token it takes the longest one that stands earlier in
    prompt or answer, at its last place. The tokens after it are drafted; where they are too few, up to the newest one, they
    are repeated.
    """

    def __init__(self, slots: Slots, newest: Tensor, length: int, least: int, most: int, fused: bool) -> None:
        """Arguments as of History; `least`, `most`: tokens of an n-gram; `fused`: looked up by one kernel."""
        self.history, self._least, self._most, self._fused = History(slots, newest, length), least, most, fused
        self.page_bytes = 0
        self.accept, self.enter, self.move = self.history.accept, self.history.enter, self.history.move

    def allocate(self, pages: int) -> None: ...

    def read(self, chunks: Sequence[PrefillChunk], rows: Mapping[int, int]) -> None: ...

    def propose(self, batch: int, drafts: int) -> Tensor:
        history = self.history
        given = history.tokens[:batch], history.newest[:batch], history.slots.positions[:batch]
        look = ops.ngram_drafts if self._fused and drafts > 0 else look_up
        return look(*given, drafts, self._least, self._most)

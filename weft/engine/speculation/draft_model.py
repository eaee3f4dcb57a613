"""Drafts by a smaller model of the same tokenizer, on the same ranks, with a second cache of pages.

    pass 1          the token before the newest one, and the newest one   at positions p - 1, p      → draft 1
    pass i = 2 … k  draft i - 1                                           at position p + i - 1      → draft i

The first pass reads two tokens: where all drafts were accepted, the last one has not been read. Both models have pages of equal
numbers for the same tokens, so prefix caching, windows and preemption hold for both. A draft is drawn with the noise of its
place, so that similar models choose alike at any temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.engine.params import Kind
from weft.engine.pipeline import Pass, Pipeline
from weft.engine.prefill import PrefillChunk, padded_pages
from weft.engine.sampling import Choice
from weft.engine.speculation.ngram import History
from weft.models import Decoder
from weft.runtime.copying import to_device

if TYPE_CHECKING:
    from weft.engine.slots import Slots


class ModelDrafter:
    """Drafter by a model (weft.engine.speculation.drafting.Drafter)."""

    def __init__(self, model: Decoder, slots: Slots, newest: Tensor, length: int, page_size: int) -> None:
        """`slots`, `newest` and `length` as of History."""
        self.pipeline, self.slots, self.page_size = Pipeline.whole(model), slots, page_size
        self.history = History(slots, newest, length)
        self.accept, self.enter, self.move = self.history.accept, self.history.enter, self.history.move
        self.page_bytes = model.new_cache(1, page_size).data.nbytes

    def allocate(self, pages: int) -> None:
        self._cache = self.pipeline.model.new_cache(pages, self.page_size)

    def read(self, chunks: Sequence[PrefillChunk], rows: Mapping[int, int]) -> None:
        device = self.pipeline.team.device
        tokens = to_device((token for chunk in chunks for token in chunk.tokens), device)
        self.pipeline.prefill(tokens, [chunk.span for chunk in chunks], padded_pages(chunks, device), self._cache, [])

    def propose(self, batch: int, drafts: int) -> Tensor:
        self.history.note_newest(batch)
        first = self.slots.positions[:batch]
        last = self.slots.last[:batch]
        before = (first - 1).clamp(min=0)
        tokens = torch.stack(
            (self.history.tokens[:batch].gather(1, before[:, None])[:, 0].long(), self.history.newest[:batch]), 1
        )
        at = torch.stack((first - 1, first), 1)
        at = torch.where((first > 0)[:, None] & (first <= last)[:, None], at, -1)
        at[:, 1] = torch.where(first <= last, first, -1)
        step = self.pipeline.model.verify_step(at, self.slots.table[:batch], self.page_size)
        if drafts == 0:  # only its cache goes on
            self.pipeline.run([Pass(tokens.flatten(), step, chooses=False)], self._cache)
            return tokens[:, :0]
        rows = torch.arange(1, 2 * batch, 2, device=tokens.device)
        logits = self.pipeline.run([Pass(tokens.flatten(), step, rows)], self._cache)
        proposed = [choose_drafts(self.pipeline, self.slots, logits, first + 1)]
        for place in range(1, drafts):
            position = first + place
            at = torch.where((first >= 0) & (position <= last), position, -1)
            step = self.pipeline.model.decode_step(at, self.slots.table[:batch], self.page_size)
            logits = self.pipeline.run([Pass(proposed[-1].clamp(min=0), step)], self._cache)
            proposed.append(choose_drafts(self.pipeline, self.slots, logits, position + 1))
        return torch.stack(proposed, 1)


def choose_drafts(pipeline: Pipeline, slots: Slots, logits: Tensor, position: Tensor) -> Tensor:
    """Tokens for `position` of slots 0 .. len(position) - 1; at temperature 0 the likeliest ones.

    top_k, top_p and min_p are left to the verification.
    """
    choice = Choice.of(slots, position, lambda x: x[: len(position)])
    return pipeline.choose(logits, choice, Kind.SAMPLED)[0]

"""Drafts by a head over hidden states of the model: EAGLE-3 and MTP.

    row p        h_p and token p + 1, at position p of the head's cache                          gives draft of token p + 2
    prompt       rows of a chunk, of which the last has the token that follows the chunk
    end of step  rows p .. p + a of the verified tokens, with the model's hidden states          → draft 1 of the next step
    pass 2 … k   row of the draft before, with the hidden states that the head gave for it       → draft 2 … k

So rows of accepted tokens are the model's: what passes 2 … k and rejected drafts left is written again before a row attends
to it. The head's cache has a page for each page of the model's, with rows of the same tokens. Of a page that several prompts
share, the last row has the token that followed it first: it may cost a draft, and no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.engine.params import Kind
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PrefillChunk, padded_pages
from weft.engine.sampling import Choice
from weft.engine.slots import Slots
from weft.engine.speculation.draft_model import choose_drafts
from weft.models import Decoder
from weft.models.decoder import Tap
from weft.models.eagle3 import Eagle3
from weft.models.mtp import Mtp
from weft.parallel.step import Step
from weft.runtime.copying import move_rows, to_device


class HiddenDrafter:
    """Drafter by a head over hidden states (weft.engine.speculation.drafting.Drafter).

    hidden  [rows, hidden_size]: what the last pass of the model has given the head, by the pass's rows
    first   [max_batch] int64, of each slot the first draft that follows its newest token; -1: none
    states  [max_batch, hidden_size], what the head gave with it
    """

    def __init__(
        self, head: Eagle3 | Mtp, model: Decoder, slots: Slots, newest: Tensor, page_size: int, rows: int
    ) -> None:
        """`newest`: newest token of each slot, [max_batch] int64; `rows`: of the model's longest pass."""
        self.head, self.slots, self.newest, self.page_size = head, slots, newest, page_size
        self.pipeline = Pipeline.whole(model)
        width, device = model.config.hidden_size, model.team.device
        self.hidden = torch.zeros(rows, width, dtype=model.dtype, device=device)
        self.first = torch.full((len(newest),), -1, dtype=torch.int64, device=device)
        self.states = torch.zeros(len(newest), width, dtype=model.dtype, device=device)
        self.page_bytes = head.body.new_cache(1, page_size).data.nbytes
        model.tap = Tap(head.layers, self._take)

    def _take(self, states: list[Tensor], step: Step) -> None:
        if step.tokens <= len(self.hidden):  # longer passes are of padding
            self.hidden[: step.tokens].copy_(self.head.given(states, step))

    def allocate(self, pages: int) -> None:
        self._cache = self.head.body.new_cache(pages, self.page_size)

    def read(self, chunks: Sequence[PrefillChunk], rows: Mapping[int, int]) -> None:
        device = self.newest.device
        # Sequences of equal length share an attention call.
        chunks = sorted(chunks, key=lambda chunk: chunk.span)
        tokens, places, ends = [], [], []
        for chunk in chunks:
            tokens += [*chunk.tokens[1:], chunk.following or 0]
            places += range(rows[chunk.slot], rows[chunk.slot] + len(chunk.tokens))
            ends += [len(tokens) - 1] if chunk.choose else []
        having = [chunk for chunk in chunks if chunk.choose]
        slots = [chunk.slot for chunk in having]
        tokens, places, slots, ends = (to_device(values, device) for values in (tokens, places, slots, ends))
        if having:
            tokens.index_copy_(0, ends, self.newest[slots].clamp(min=0))
        step = self.head.body.prefill_step(
            [chunk.span for chunk in chunks], padded_pages(chunks, device), self.page_size
        )
        normed, states = self.head(tokens, self.hidden[places], step, self._cache, ends if having else None)
        if having:
            position = to_device((chunk.end + 1 for chunk in having), device)
            choice = Choice.of_requests([chunk.params for chunk in having], position)
            chosen, _ = self.pipeline.choose(self.head.logits(normed), choice, Kind.SAMPLED)
            self.first.index_copy_(0, slots, chosen)
            self.states.index_copy_(0, slots, states)

    def propose(self, batch: int, drafts: int) -> Tensor:
        proposed, states = [self.first[:batch]], self.states[:batch]
        newest, last = self.slots.positions[:batch], self.slots.last[:batch]
        positions = newest + torch.arange(max(0, drafts - 1), device=newest.device)[:, None]
        rows = torch.where((newest >= 0) & (positions <= last), positions, -1)
        for at, position in zip(rows, positions + 2, strict=True):
            step = self.head.body.decode_step(at, self.slots.table[:batch], self.page_size)
            normed, states = self.head(proposed[-1].clamp(min=0), states, step, self._cache)
            proposed.append(choose_drafts(self.pipeline, self.slots, self.head.logits(normed), position))
        return torch.stack(proposed, 1)[:, :drafts]

    def accept(self, batch: int, tokens: Tensor, counts: Tensor) -> None:
        rows = tokens.shape[1]
        place = torch.arange(rows, device=tokens.device)
        newest = self.slots.positions[:batch]
        at = torch.where(place < counts[:, None], newest[:, None] + place, -1)
        step = self.head.body.verify_step(at, self.slots.table[:batch], self.page_size)
        last = torch.arange(batch, device=tokens.device) * rows + (counts - 1).clamp(min=0)
        given = tokens.flatten().clamp(min=0), self.hidden[: batch * rows]
        normed, states = self.head(*given, step, self._cache, last)
        chosen = choose_drafts(self.pipeline, self.slots, self.head.logits(normed), newest + counts + 1)
        goes_on = counts > 0
        self.first[:batch].copy_(torch.where(goes_on, chosen, self.first[:batch]))
        self.states[:batch].copy_(torch.where(goes_on[:, None], states, self.states[:batch]))

    def enter(self, slot: int, tokens: Sequence[int]) -> None: ...

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        move_rows(moves, self.first, self.states)

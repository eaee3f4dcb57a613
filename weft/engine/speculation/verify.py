"""Decode steps that verify drafts: several tokens of each batch slot in one pass.

    rows of slot b   newest token, draft 1, …, draft k     at positions p, p + 1, …, p + k
    chosen           c_0, c_1, …, c_k                      the tokens of positions p + 1, …, p + k + 1
    accepted         the first drafts that equal the token chosen before: draft j = c_(j - 1)
    tokens           c_0 .. c_a, where a drafts are accepted; the slot goes on at p + a + 1 with c_a

A row's token is chosen as without drafts, and it counts only where all tokens before it are the chosen ones. Keys and values of
rejected drafts stay in the cache after the slot's position: they are written again before a row attends to them. States of
gated delta nets take the first row, and accepted drafts in the next step (weft.parallel.delta_states).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft import ops
from weft.engine.graphs import DecodeGraph
from weft.engine.params import Kind
from weft.engine.pipeline import Pass
from weft.engine.sampling import WIDTH, Choice
from weft.engine.speculation.drafting import Drafter
from weft.engine.speculation.options import SpeculativeConfig
from weft.ops.vocab.accept_drafts import accept
from weft.ops.vocab.draft_rows import rows_of_drafts


class Verify(NamedTuple):
    """Size of a decode step with drafts: batch slots, and drafts of each."""

    batch: int
    drafts: int


class VerifyGraph:
    """Decode step of batch slots with drafts: of each slot 1 to drafts + 1 next tokens, in place.

    graph     the slots' tensors, and the cache
    results   [max_batch, most drafts + 3] int64: the tokens that a step has chosen for each slot, their number in the last
              column but one, the number of drafts in the last one
    drafts    [max_batch, most drafts] int64, of the step that runs; -1: none
    logprobs  [max_batch, most drafts + 1, WIDTH] fp32: rows of weft.engine.sampling, of slots that ask for them
    lengths   numbers of drafts of a slot that a step may have, of which `most` is the largest

    Collective. It reads and writes tensors at fixed addresses only.
    """

    def __init__(self, graph: DecodeGraph, drafter: Drafter, options: SpeculativeConfig) -> None:
        self.graph, self.drafter, self.lengths = graph, drafter, options.lengths
        self.most = most = options.num_speculative_tokens
        self._synthetic = options.synthetic_acceptance_length
        max_batch, device = len(graph.tokens), graph.tokens.device
        self.results = torch.zeros(max_batch, most + 3, dtype=torch.int64, device=device)
        self.drafts = torch.full((max_batch, most), -1, dtype=torch.int64, device=device)
        self._masks: Tensor | None = None  # of grammars after each draft, once a request has one
        self.logprobs = torch.zeros(max_batch, most + 1, WIDTH, dtype=torch.float32, device=device)
        self._kept: dict[Verify, tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, size: Verify, kind: Kind, between: Callable[[], None] | None = None) -> None:
        """Draft, verify and accept; `between`: called between the forward pass and the choice of tokens."""
        forwarded = self._forward(size)
        if between is not None:
            between()
        self._choose(size, kind, *forwarded)

    def forward_and_keep(self, size: Verify) -> None:
        """Draft, and the forward pass whose logits `choose_kept` reads."""
        kept = self._forward(size)
        if size not in self._kept:
            self._kept[size] = tuple(map(torch.empty_like, kept))
        for place, x in zip(self._kept[size], kept, strict=True):
            place.copy_(x)

    def choose_kept(self, size: Verify, kind: Kind) -> None:
        """Choose tokens by the logits of `forward_and_keep`."""
        self._choose(size, kind, *self._kept[size])

    def _forward(self, size: Verify) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's logits [batch * (drafts + 1), V'/W], and of the rows what `_choose` takes."""
        batch, drafts = size
        graph, slots = self.graph, self.graph.slots
        proposed = self.drafter.propose(batch, drafts)
        if self._synthetic is not None:
            proposed = proposed.clamp(min=0)
        making = ops.draft_rows if graph.pipeline.model.runs_kernels else rows_of_drafts
        rows = making(slots.positions[:batch], slots.last[:batch], graph.tokens[:batch], proposed)
        self.drafts[:batch, :drafts].copy_(rows.drafts)
        step = graph.pipeline.model.verify_step(
            rows.positions, slots.table[:batch], graph.page_size, graph.cache.states
        )
        if graph.pipeline.model.adapters:
            step = replace(step, adapters=slots.adapter[:batch].repeat_interleave(drafts + 1))
        logits = graph.pipeline.run([Pass(rows.tokens.flatten(), step)], graph.cache)
        return logits, rows.known, rows.next

    def _choose(self, size: Verify, kind: Kind, logits: Tensor, rows: Tensor, position: Tensor) -> None:
        """Choose the tokens of all rows, and advance the slots by the accepted ones.

        rows, position  `known` and `next` of ops.DraftRows
        """
        batch, drafts = size
        graph, wide = self.graph, logits.view(batch, drafts + 1, -1)
        if Kind.ADJUSTED in kind:
            chosen = self._choose_in_turn(wide, kind, rows, position)
        else:
            choice = self._choice(batch, position.flatten(), drafts + 1)
            chosen = graph.pipeline.choose(logits, choice, kind & ~Kind.LOGPROBS)[0].view(batch, drafts + 1)
        if self._synthetic is not None:
            rows = self._synthetic_rows(rows, chosen)
        accepting = ops.accept_drafts if graph.pipeline.model.runs_kernels else accept
        counts = accepting(chosen, rows, graph.tokens[:batch], self.results[:batch])
        if graph.cache.states is not None:
            graph.cache.states.accept(counts)
        if Kind.LOGPROBS in kind:
            self.logprobs[:batch, : drafts + 1].copy_(
                graph.pipeline.logprobs(logits, chosen.flatten()).view(batch, drafts + 1, WIDTH)
            )
        self.drafter.accept(batch, chosen, counts)
        graph.slots.positions[:batch].add_(counts)

    def _synthetic_rows(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """`rows`, in which the drafts that are to be accepted equal the chosen tokens, and the rest do not.

        By a rule of the position, equal on all ranks: the golden ratio's multiples fill 0 .. 1 evenly.
        """
        share = self.graph.slots.positions[: len(rows)].double() * 0.6180339887498949 % 1
        wanted = (self._synthetic - 1 + share).floor()[:, None]
        place = torch.arange(rows.shape[1] - 1, device=rows.device)
        drafted = chosen[:, :-1] + (place >= wanted)
        return torch.cat((rows[:, :1], torch.where(rows[:, 1:] >= 0, drafted, -1)), 1)

    def _choose_in_turn(self, logits: Tensor, kind: Kind, rows: Tensor, position: Tensor) -> Tensor:
        """Tokens [batch, drafts + 1], chosen one after the other.

        Each is noted among the changes of logits before the next one is chosen, if all before it were accepted: nothing is
        taken back.
        """
        graph, batch, chosen = self.graph, len(rows), []
        going_on = rows[:, 0] >= 0
        for place in range(rows.shape[1]):
            if place > 0:
                going_on = going_on & (chosen[-1] == rows[:, place]) & (rows[:, place] >= 0)
                if Kind.GUIDED in kind:
                    graph.adjustments.state.allowed[:batch].copy_(self._masks_after_drafts[place - 1, :batch])
            choice = self._choice(batch, torch.where(going_on, position[:, place], 0), 1)
            tokens, _ = graph.pipeline.choose(logits[:, place].contiguous(), choice, kind & ~Kind.LOGPROBS)
            graph.note(slice(batch), tokens, choice.position)
            chosen.append(tokens)
        return torch.stack(chosen, 1)

    def allow(self, masks: Mapping[int, Sequence[Tensor]]) -> None:
        """Set what a step may give slots with grammars: a mask for the next token, and one after each draft."""
        adjustments, after = self.graph.adjustments, self._masks_after_drafts
        adjustments.allow({slot: first for slot, (first, *_) in masks.items()})
        after.fill_(-1)
        for place, state in enumerate(after, 1):
            at_place = {slot: of_slot[place] for slot, of_slot in masks.items() if len(of_slot) > place}
            if at_place:
                adjustments.allow(at_place, state)

    @property
    def _masks_after_drafts(self) -> Tensor:
        """Masks after each draft, [most drafts, max_batch + 1, words] as of Adjustments.state."""
        if self._masks is None:
            self._masks = torch.stack([self.graph.adjustments.state.allowed] * self.most)
        return self._masks

    def _choice(self, batch: int, position: Tensor, rows: int) -> Choice:
        """Sampling parameters of `rows` rows of each slot, for tokens at `position`."""

        def of_rows(x: Tensor) -> Tensor:
            return x[:batch] if rows == 1 else x[:batch].repeat_interleave(rows)

        return Choice.of(self.graph.slots, position, of_rows, adjustments=self.graph.adjustments, rows=slice(batch))

"""draft_rows: rows of a step that verifies drafts, from newest tokens and what was drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like
from weft.ops.op import UNCHANGED, Op, register
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team


class DraftRows(NamedTuple):
    """Rows of B sequences, their newest token and k drafts. All int64 [B, k + 1] but drafts.

    positions  of the rows; -1: not used
    tokens     of the rows; of an unused draft 0
    known      tokens of the rows that are used, and 0 for the newest one, which may be none; -1: not used
    next       positions of the tokens that rows choose; 0: not used
    drafts     [B, k]: what was drafted, where its row is used; -1: not used
    """

    positions: torch.Tensor
    tokens: torch.Tensor
    known: torch.Tensor
    next: torch.Tensor
    drafts: torch.Tensor


@triton.jit(do_not_specialize=["stride"])
def draft_rows_kernel(first, last, newest, proposed, stride, rows, ROWS: tl.constexpr, PLACES: tl.constexpr):
    """``DraftRows`` of one sequence.

    grid: (B,). Row i is used if its position first[b] + i is at most last[b], and all drafts up to it exist. proposed
    [B, ROWS - 1] with rows ``stride`` apart, -1: no draft. A sequence at -1 has no row.
    """
    sequence, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    wl.follow_previous_kernel()
    begin, end = tl.load(first + sequence), tl.load(last + sequence)
    token = tl.load(newest + sequence)
    draft = tl.load(proposed + sequence * stride + place - 1, mask=(place > 0) & (place < ROWS), other=0)
    missing = tl.min(tl.where(draft < 0, place, PLACES), axis=0)
    used = (begin >= 0) & (begin + place <= end) & (place < missing)
    at = sequence * ROWS + place
    tokens = tl.where(place == 0, token, tl.where(used, draft, 0))
    tl.store(rows.positions + at, tl.where(used, begin + place, -1), mask=place < ROWS)
    tl.store(rows.tokens + at, tokens, mask=place < ROWS)
    tl.store(rows.known + at, tl.where(used, tl.where(place == 0, 0, tokens), -1), mask=place < ROWS)
    tl.store(rows.next + at, tl.where(used, begin + place + 1, 0), mask=place < ROWS)
    drafted = rows.drafts + sequence * (ROWS - 1) + place - 1
    tl.store(drafted, tl.where(used, draft, -1), mask=(place > 0) & (place < ROWS))


def draft_rows(first: torch.Tensor, last: torch.Tensor, newest: torch.Tensor, proposed: torch.Tensor) -> DraftRows:
    """Rows of a step that verifies drafts of B sequences.

    first     [B] int64: position of the newest token; -1: no sequence
    last      [B] int64: the last position that a row may have
    newest    [B] int64: the newest token
    proposed  [B, k] int64: what was drafted; -1: nothing, and then nothing after it. It may be columns of a wider tensor
    """
    check_like("draft_rows", "first", first, None, (torch.int64,), ("B",))
    for name, x in (("first", first), ("last", last), ("newest", newest)):
        check_like("draft_rows", name, x, first.device, (torch.int64,), first.shape)
        check_contiguous("draft_rows", name, x)
    check_like("draft_rows", "proposed", proposed, first.device, (torch.int64,), (len(first), "k"))
    return DraftRows(*DRAFT_ROWS.dispatch(first, last, newest, proposed))


def rows_of_drafts(first: torch.Tensor, last: torch.Tensor, newest: torch.Tensor, proposed: torch.Tensor) -> DraftRows:
    """`draft_rows` in plain torch."""
    at = first[:, None] + torch.arange(proposed.shape[1] + 1, device=first.device)
    used = (first[:, None] >= 0) & (at <= last[:, None])
    used[:, 1:] &= (proposed >= 0).long().cumprod(1) > 0
    tokens = torch.cat((newest[:, None], proposed), 1)
    tokens[:, 1:].masked_fill_(~used[:, 1:], 0)
    known = torch.where(used, tokens, -1)
    known[:, 0].masked_fill_(used[:, 0], 0)
    drafts = torch.where(used[:, 1:], proposed, -1)
    return DraftRows(torch.where(used, at, -1), tokens, known, torch.where(used, at + 1, 0), drafts)


class DraftRowsOp(Op):
    name, alias = "draft_rows", "draft-rows"
    bits = UNCHANGED
    no_plan = "one kernel; a program takes one sequence"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Positions, last positions, newest tokens, drafts. sizes: sequences, and drafts of each."""
        batch, drafts = case.sizes
        first, more, newest = (draw.own(name, (batch,), dtype=torch.int64) for name in ("first", "more", "newest"))
        row = torch.arange(batch, device=draw.device)
        first = torch.where(row % 5 == 4, -1, first.abs() % 1000)
        proposed = draw.own("proposed", (batch, drafts), dtype=torch.int64).abs() % 8 - 1
        return first, torch.where(first < 0, 5, first + more % (drafts + 2) - 1), newest, proposed

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        return tuple(rows_of_drafts(*by_rank[rank]))

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *places, proposed = tensors
        wide = torch.cat((proposed, proposed), 1)[:, : proposed.shape[1]]
        return tuple(draft_rows(*(x.contiguous() for x in places), wide))

    def cases(self) -> Iterator[Case]:
        for sizes in ((1, 1), (9, 3), (33, 4), (12, 8), (7, 0)):
            yield self.case(1, FP32, sizes)

    def forward(
        self, first: torch.Tensor, last: torch.Tensor, newest: torch.Tensor, proposed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, places = DraftRows(*self.fake(first, last, newest, proposed)), proposed.shape[1] + 1
        if len(first) > 0:
            constants = {"ROWS": places, "PLACES": triton.next_power_of_2(places), "num_warps": 1}
            proposed = proposed if proposed.stride(1) == 1 else proposed.contiguous()
            arguments = first, last, newest, proposed, proposed.stride(0), rows
            options = launch_options(capabilities_of(first.device))
            draft_rows_kernel[len(first),](*arguments, **constants, **options)
        return tuple(rows)

    def fake(self, first, last, newest, proposed):
        batch, drafts = proposed.shape
        return *(proposed.new_empty((batch, drafts + 1)) for _ in range(4)), proposed.new_empty((batch, drafts))


DRAFT_ROWS = register(DraftRowsOp())

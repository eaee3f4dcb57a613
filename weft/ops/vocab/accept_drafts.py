"""accept_drafts: drafts that equal the tokens chosen at their places, and the result of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like
from weft.ops.op import UNCHANGED, Op, register
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team


@triton.jit(do_not_specialize=["width"])
def accept_drafts_kernel(chosen, rows, newest, results, counts, width, ROWS: tl.constexpr, PLACES: tl.constexpr):
    """counts[b] = 1 + (number of leading i with rows[b, i + 1] = chosen[b, i])

    newest[b] = chosen[b, counts[b] - 1]

    grid: (B,). rows[b, i] is -1 where there is no token: it equals no chosen one. Where rows[b, 0] is -1, counts[b] = 0 and
    newest stays. results[b] = [*chosen[b], …, counts[b], number of drafts], of `width` columns: the ones between stay.
    """
    sequence = tl.program_id(0)
    place = tl.arange(0, PLACES)
    wl.follow_previous_kernel()
    row = tl.load(rows + sequence * ROWS + place, mask=place < ROWS, other=-1)
    # The token that a row before chose for this row's place.
    expected = tl.load(chosen + sequence * ROWS + place - 1, mask=(place > 0) & (place < ROWS), other=-1)
    token = tl.load(chosen + sequence * ROWS + place, mask=place < ROWS, other=0)
    drafted = (place > 0) & (row >= 0)
    # The first row that is no accepted draft: all before it count.
    rejected = (place > 0) & ((row < 0) | (row != expected))
    count = tl.min(tl.where(rejected, place, ROWS), axis=0)
    first = tl.max(tl.where(place == 0, row, -1), axis=0)
    count = tl.where(first >= 0, count, 0).to(tl.int64)
    out = results + sequence * width
    tl.store(out + place, token, mask=place < ROWS)
    tl.store(out + width - 2, count)
    tl.store(out + width - 1, tl.sum(drafted.to(tl.int64), axis=0))
    tl.store(counts + sequence, count)
    last = tl.sum(tl.where(place == count - 1, token, 0), axis=0)
    tl.store(newest + sequence, last, mask=count > 0)


def accept_drafts(
    chosen: torch.Tensor, rows: torch.Tensor, newest: torch.Tensor, results: torch.Tensor
) -> torch.Tensor:
    """Tokens that a step gives each sequence, [B] int64: accepted drafts and one more; 0: no sequence.

    chosen   [B, n] int64: the token chosen after each row
    rows     [B, n] int64: tokens of the rows, a sequence's newest one and its drafts; -1: a row that is not used
    newest   [B] int64: the last accepted token is written there
    results  [B, n + 2 or more] int64, contiguous: chosen in the first columns, the result and the number of drafts in the
             last two
    """
    check_like("accept_drafts", "chosen", chosen, None, (torch.int64,), ("B", "n"))
    batch, places = chosen.shape
    if places == 0:
        raise ValueError(f"accept_drafts: chosen has shape {tuple(chosen.shape)}; pass 1 or more rows of each sequence")
    for name, x, shape in (
        ("rows", rows, (batch, places)),
        ("newest", newest, (batch,)),
        ("results", results, (batch, "w")),
    ):
        check_like("accept_drafts", name, x, chosen.device, (torch.int64,), shape)
        if name != "rows":
            check_contiguous("accept_drafts", name, x)
    if results.shape[1] < places + 2:
        raise ValueError(f"accept_drafts: results has {results.shape[1]} columns; it needs {places + 2}")
    return ACCEPT_DRAFTS.dispatch(chosen, rows, newest, results)


def accept(chosen: torch.Tensor, rows: torch.Tensor, newest: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
    """`accept_drafts` in plain torch."""
    used = rows >= 0
    accepted = (chosen[:, :-1] == rows[:, 1:]) & used[:, 1:]
    counts = torch.where(used[:, 0], 1 + accepted.long().cumprod(1).sum(1), 0)
    results[:, : chosen.shape[1]].copy_(chosen)
    results[:, -2].copy_(counts)
    results[:, -1].copy_(used[:, 1:].sum(1))
    last = chosen.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    newest.copy_(torch.where(counts > 0, last, newest))
    return counts


class AcceptDrafts(Op):
    name, alias = "accept_drafts", "accept-drafts"
    bits = UNCHANGED
    no_plan = "one kernel; a program takes one sequence"
    mutates = ("newest", "results")

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Chosen tokens, rows, newest tokens, results. sizes: sequences, and rows of each; two tokens in all."""
        batch, places = case.sizes
        chosen, rows = (draw.own(name, (batch, places), dtype=torch.int64) % 2 for name in ("chosen", "rows"))
        row, place = torch.arange(batch, device=draw.device)[:, None], torch.arange(places, device=draw.device)
        # All drafts of the first sequence are accepted; the next ones have 0, 1, … drafts, and every fifth has no row.
        rows[0, 1:] = chosen[0, :-1]
        rows = torch.where((row > 0) & ((place > row % (places + 1)) | (row % 5 == 4)), -1, rows)
        newest, results = (
            draw.own(name, shape, dtype=torch.int64)
            for name, shape in (("newest", (batch,)), ("results", (batch, places + 4)))
        )
        return chosen, rows, newest, results

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        chosen, rows, newest, results = (x.clone() for x in by_rank[rank])
        return accept(chosen, rows, newest, results), newest, results

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen, rows, newest, results = tensors
        return accept_drafts(chosen, rows, newest, results), newest, results

    def cases(self) -> Iterator[Case]:
        for sizes in ((1, 1), (9, 2), (33, 5), (12, 9)):
            yield self.case(1, FP32, sizes)

    def forward(
        self, chosen: torch.Tensor, rows: torch.Tensor, newest: torch.Tensor, results: torch.Tensor
    ) -> torch.Tensor:
        batch, places = chosen.shape
        counts = torch.empty(batch, dtype=torch.int64, device=chosen.device)
        if batch > 0:
            arguments = chosen.contiguous(), rows.contiguous(), newest, results, counts, results.shape[1]
            constants = {"ROWS": places, "PLACES": triton.next_power_of_2(places)}
            options = launch_options(capabilities_of(chosen.device))
            accept_drafts_kernel[(batch,)](*arguments, **constants, num_warps=1, **options)
        return counts

    def fake(self, chosen, rows, newest, results):
        return chosen.new_empty(len(chosen))


ACCEPT_DRAFTS = register(AcceptDrafts())

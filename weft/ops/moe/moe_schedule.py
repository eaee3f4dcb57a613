"""moe_schedule: the pairs of each expert, in the order of the tokens, from the chosen ids.

Every program reads all ids and keeps its expert's, so programs do not wait for each other, and the order depends on the
ids alone. The last one to end knows all counts, and writes the table of tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int, quoted
from weft.costs.grouped import BLOCKS, block_for
from weft.ops.case import Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like
from weft.ops.moe.check import check_choices, check_experts
from weft.ops.moe.choices import common, draw_ids, experts_of, schedule_by_torch
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.routing import Experts, Schedule, check_distinct
from weft.ops.op import UNCHANGED, register
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Ids that a program holds at a time: 128 a thread of 8 warps.
IDS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """A program for each expert. block: pairs of a tile of the GEMMs that follow, one of BLOCKS."""

    block: int = 128
    num_warps: int = 8

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block} is not one of {', '.join(map(str, BLOCKS))}")


class ScheduleCall(NamedTuple):
    """Sizes that the plan depends on: pairs of all tokens, and experts to choose from."""

    pairs: int
    experts: int
    design: str = AUTO


@triton.jit
def write_tiles(count, pairs_before, tiles, T, BLOCK: tl.constexpr, least=0):
    """Write the table of tiles of experts with ``count`` [experts] pairs; their number.

    least  number of the first of these experts; experts below 0 have no pairs
    """
    expert = least + tl.arange(0, count.shape[0])
    needed = (count + BLOCK - 1) // BLOCK
    first = tl.cumsum(needed, 0) - needed
    for tile in range(0, tl.max(needed, 0)):
        entry = tiles + (first + tile) * 4
        there = tile < needed
        tl.store(entry, expert, mask=there)
        tl.store(entry + 1, expert * T + tile * BLOCK, mask=there)
        tl.store(entry + 2, pairs_before + tile * BLOCK, mask=there)
        tl.store(entry + 3, tl.minimum(count - tile * BLOCK, BLOCK), mask=there)
    return tl.sum(needed, 0)


@triton.jit(do_not_specialize=["T", "start", "first"])
def moe_schedule_kernel(
    ids,
    pairs,
    counts,
    tiles,
    tile_count,
    arrivals,
    T,
    start,
    first,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``Schedule`` of the pairs of experts first .. first + EXPERTS - 1    grid: (EXPERTS,), one for each

    ids       int32 [T, K]; a token has an expert once at most. Tokens start, start + 1, … (mod T) come in this order
    tiles     of BLOCK pairs; TOKENS tokens at a time, CHOICES: K or the next power of two
    arrivals  int32 [1], 0 before and after

    signals   arrivals: each program adds 1 when its count is stored (release)
    waits     none: the program that finds EXPERTS - 1 is the last one, sees all counts (acquire), and writes tiles and their
              number
    """
    expert = tl.program_id(0)
    pairs_of_expert = pairs + expert.to(tl.int64) * T
    choice = tl.arange(0, CHOICES)[None, :]
    count = 0
    wl.follow_previous_kernel()
    for begin in range(0, T, TOKENS):
        place = begin + tl.arange(0, TOKENS)
        token = (place + start) % T
        asked = ids + token.to(tl.int64)[:, None] * K + choice
        chosen = tl.load(asked, mask=(place < T)[:, None] & (choice < K), other=-1) == first + expert
        chosen_by = tl.max(tl.where(chosen, choice + 1, 0), axis=1)
        one = (chosen_by > 0).to(tl.int32)
        tl.store(pairs_of_expert + count + tl.cumsum(one, 0) - 1, token * K + chosen_by - 1, mask=chosen_by > 0)
        count += tl.sum(one, 0)
    tl.store(counts + expert, count)
    wl.gather_stores()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == EXPERTS - 1:
        tl.store(arrivals, 0)
        every = tl.arange(0, triton.next_power_of_2(EXPERTS))
        all_counts = tl.load(counts + every, mask=every < EXPERTS, other=0)
        tl.store(tile_count, write_tiles(all_counts, tl.cumsum(all_counts, 0) - all_counts, tiles, T, BLOCK))


def moe_schedule(
    ids: torch.Tensor,
    experts: Experts,
    *,
    block: int | None = None,
    start: int = 0,
    tickets: torch.Tensor | None = None,
) -> Schedule:
    """The pairs of this rank's experts, expert by expert, tokens ascending from ``start`` on (mod T).

    ids      int32 [T, k], k from 1 to 16: a token's choices, no expert twice; -1 for none. Those of other experts are left out
    experts  the ones to schedule
    block    pairs of a tile of the grouped GEMMs: 16, 32, 64 or 128; None: by the mean number of pairs of an expert
    tickets  an arrival counter: int32 zeros, one or more, left as zeros, so calls of one stream may share it. None: each call
             makes one, which takes one more small kernel

    Sizes depend on the shape of ``ids`` alone, and the host reads nothing: it can be captured in a CUDA graph. The same in
    every run. No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "moe_schedule"
    check_like(op, "ids", ids, None, (torch.int32,))
    check_choices(op, ids)
    T, k = ids.shape
    check_schedule(op, experts, block, tickets, ids.device)
    check_int(f"{op}: start", start, 0, max(T - 1, 0))
    block = block or block_for(T * k, experts.total)
    lists = MOE_SCHEDULE.dispatch(ids, experts.first, experts.count, block, start, tickets)
    return Schedule(*lists, choices=k, block=block)


def check_schedule(
    op: str, experts: Experts, block: int | None, tickets: torch.Tensor | None, device: torch.device
) -> None:
    """ValueError unless a schedule can be made of these arguments of ``moe_schedule``."""
    check_experts(op, experts)
    if block is not None and block not in BLOCKS:
        raise ValueError(f"{op}: block={quoted(block)} is not one of {', '.join(map(str, BLOCKS))}")
    if tickets is not None:
        check_like(op, "tickets", tickets, device, (torch.int32,))
        if tickets.dim() != 1 or not tickets.is_contiguous() or tickets.shape[0] < 1:
            raise ValueError(
                f"{op}: tickets has shape {tuple(tickets.shape)}; it must be a contiguous row of 1 or more"
            )


class MoeSchedule(MoeOp):
    """sizes of a case: T, k, experts in all."""

    name, alias = "moe_schedule", "moe-schedule"
    bits = UNCHANGED
    designs = {"lists": Lists}
    sizes = ("T", "k", "experts")
    mutates = ("tickets",)
    collective = False

    def call_of(self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO) -> ScheduleCall:
        T, k, experts = self.checked_sizes(sizes)
        return ScheduleCall(T * k, experts, design)

    def choose(self, call: ScheduleCall, machine: Machine) -> Planned:
        reason = f"{call.pairs} pairs of {call.experts} experts: {call.pairs / call.experts:.3g} each"
        return Planned("lists", Lists(block=block_for(call.pairs, call.experts)), reason)

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        return (draw_ids(common(draw), *case.sizes),)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(pairs, counts, tiles, tile_count); -1 where they are undefined."""
        T, k, total = case.sizes
        block = case.field("block") or block_for(T * k, total)
        if not isinstance(case.design, str):
            block = case.design.block
        experts = experts_of(case, total, rank)
        most = most_tiles(T * k, experts.count, block)
        return schedule_by_torch(*by_rank[rank], experts, block, most, case.field("start") or 0)

    def arguments(self, case: Case, team: Team | None, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # An arrival counter that calls share, as layers may: in benchmarks, whose cases name ``held``.
        shared = case.field("tickets") or case.field("held")
        return ids, torch.zeros(1, dtype=torch.int32, device=ids.device) if shared else None

    def results(
        self, case: Case, team: Team | None, ids: torch.Tensor, tickets: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        experts = experts_of(case, case.sizes[2], 0 if team is None else team.rank)
        start = case.field("start") or 0
        if isinstance(case.design, str):
            return moe_schedule(ids, experts, block=case.field("block"), start=start, tickets=tickets)[:4]
        return self.run(case.design, None, ids, experts.first, experts.count, start, tickets)

    def defined(
        self, case: Case, team: Team | None, out: tuple[torch.Tensor, ...], ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """(pairs, counts, tiles, tile_count); -1 where they are undefined."""
        pairs, counts, tiles, tile_count = out
        of_expert, of_tile = (torch.arange(size, device=ids.device) for size in (len(ids), len(tiles)))
        return (
            pairs.masked_fill(of_expert >= counts[:, None], -1),
            counts,
            tiles.masked_fill((of_tile >= tile_count)[:, None], -1),
            tile_count,
        )

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        shape = MoeShape(*sizes)
        return 4 * int(shape.tokens * shape.k + shape.pairs)

    def cases(self) -> Iterator[Case]:
        case = functools.partial(self.case, 1, torch.int32)
        for sizes in ((1, 8, 128), (5, 4, 60), (33, 2, 8), (130, 1, 4), (7, 16, 16), (300, 3, 12)):
            yield case(*sizes)
            yield case(*sizes, block=16, start=sizes[0] // 2, local=(sizes[2] // 2, sizes[2] // 4), tickets=True)
        for skew in ("one expert", "last expert", "none", "some", "recorded"):
            yield case(40, 2, 8, skew=skew, block=32)
        yield case(0, 2, 8)
        yield case(129, 2, 8, design=Lists(block=128, num_warps=4))
        yield case(20, 2, 8, design=Lists(block=64))

    def large_cases(self) -> Iterator[Case]:
        for sizes in ((4096, 8, 128), (8192, 8, 256), (10000, 2, 8), (300, 8, 128)):
            yield self.case(1, torch.int32, *sizes, start=sizes[0] // 2)

    def run(
        self,
        design: Lists,
        team: None,
        ids: torch.Tensor,
        first: int,
        count: int,
        start: int,
        tickets: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """(pairs, counts, tiles, tile_count) of checked arguments."""
        self.check_design(design)
        lists = pairs, counts, tiles, tile_count = self.fake(ids, first, count, design.block, start, tickets)
        T, k = ids.shape
        if T == 0:
            return pairs, counts.zero_(), tiles, tile_count.zero_()
        caps, choices = capabilities_of(ids.device), next_power_of_2(k)
        tokens = max(16, min(next_power_of_2(T), IDS // choices))
        launch = launch_on(
            ids.device,
            moe_schedule_kernel,
            (k, count, tokens, design),
            lambda: {
                "K": k,
                "EXPERTS": count,
                "CHOICES": choices,
                "TOKENS": tokens,
                "BLOCK": design.block,
                "num_warps": design.num_warps,
                **launch_options(caps),
            },
        )
        arrivals = torch.zeros(1, dtype=torch.int32, device=ids.device) if tickets is None else tickets
        launch(count, ids.contiguous(), *lists, arrivals, T, start, first)
        return lists

    def forward(
        self, ids: torch.Tensor, first: int, count: int, block: int, start: int, tickets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.run(Lists(block=block), None, ids, first, count, start, tickets)

    def examine(self, given: Mapping[str, Any]) -> None:
        check_distinct(self.name, given["ids"])

    def fake(self, ids, first, count, block, start, tickets):
        T, k = ids.shape
        shapes = (count, T), (count,), (most_tiles(T * k, count, block), 4), (1,)
        return tuple(ids.new_empty(shape) for shape in shapes)


def most_tiles(pairs: int, experts: int, block: int) -> int:
    """Tiles that ``pairs`` pairs of ``experts`` experts need at most, each with a ragged one."""
    return cdiv(pairs, block) + min(experts, pairs)


MOE_SCHEDULE = register(MoeSchedule())

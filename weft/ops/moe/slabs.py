"""Design "slabs" of grouped_matmul_reduce_scatter: sums of a slab travel while the next is multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.knobs import around, check_knobs, counts, halved, knob
from weft.ops.moe import grouped
from weft.ops.moe.arrival import channel_of
from weft.ops.moe.grouped import GroupedTiles
from weft.ops.moe.moe_sum import Shared, add_up
from weft.ops.moe.overlapped_op import ScatterArguments
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.transport.copy_channel import MAX_CHUNKS

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Columns of a slab at least: of 512 on they cost a grouped GEMM up to 3 % on an H200, of 256 up to 11 %.
LEAST_COLUMNS, MOST_SLABS = 512, 4
# Elements that a program of sum_slabs_kernel adds up at a time, in rows of at most BLOCK columns; its warps.
ROWS, BLOCK, WARPS = 4, 512, 4


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Slabs:
    """GEMM by slabs of columns; copy engines carry the sums of one while the next is multiplied.

    slabs  at most this many, of whole tiles, and at most MAX_CHUNKS
    """

    tiles: GroupedTiles = knob(near=around)
    slabs: int = knob(MOST_SLABS, counts(MAX_CHUNKS), halved())
    __post_init__ = check_knobs

    def width(self, H: int) -> int:
        """Columns of a slab of [T, H], but of the last one, which may have fewer."""
        return min(cdiv(H, self.slabs * self.tiles.block_n) * self.tiles.block_n, H)


@triton.jit(do_not_specialize=["T", "tokens"])
def sum_slabs_kernel(out, own, received, landed, T, tokens, H, width, team, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over ranks, ascending, of what each has for token t    grid: (cdiv(T, ROWS), slabs)

    own       what this rank has for the ``tokens`` tokens of each rank: slab by slab, [W * tokens, columns of the slab]
    received  [W, tokens * H], symmetric: [s] what rank s has for this rank's tokens: slab by slab, [tokens, columns]
    landed    channel: signals the arrival of slab i of rank s; begin_kernel has begun the call
    width     columns of a slab but the last; out [T, H]

    signals   copy engine of rank s, behind each slab i
    waits     before a program's first load of ``received``: slab i of all other ranks. ``own`` is of this stream
    order     ranks ascending, in fp32, rounded once
    reuse     of a half of ``received``: CopyChannel
    progress  programs wait for copy engines only, so they need not all be resident
    """
    world: tl.constexpr = wl.num_ranks(team)
    me, slab = wl.rank(team), tl.program_id(1)
    wl.follow_previous_kernel()
    call = wl.current_call(landed)
    first = slab * width
    columns = tl.minimum(width, H - first)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    own += world * tokens.to(tl.int64) * first
    received += tokens.to(tl.int64) * first
    for step in range(1, world):
        wl.chunk_wait(call, (me + step) % world, slab, team)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        there = (token < T) & (column < columns)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for source in range(world):
            if source == me:
                row = tl.load(own + (me * tokens + token).to(tl.int64) * columns + column, mask=there, other=0.0)
            else:
                of_rank = received + source * tokens.to(tl.int64) * H
                row = tl.load(of_rank + token.to(tl.int64) * columns + column, mask=there, other=0.0)
            total += row.to(tl.float32)
        tl.store(out + token.to(tl.int64) * H + first + column, total.to(out.dtype.element_ty), mask=there)


def run_slabs(design: Slabs, team: Team, given: ScatterArguments) -> torch.Tensor:
    """The GEMM slab by slab, the sums of each sent to their tokens' ranks, and the ranks' sums added up.

    y holds one slab of the GEMM's result at a time: the stream's order keeps the slabs apart. The sums of all slabs stay until
    the copy engine has been joined.

    signals  copy engine of rank r, behind each slab: flags[r, slab] = epoch at the tokens' rank
    waits    the copy engine, before a slab's first copy: fork, so all work before it, the slab's moe_sum the last, has ended
             sum_slabs_kernel, before it loads a slab of a rank: that flag
    reuse    of a half of the received sums: CopyChannel

    kernels  | begin | GEMM 0 | sum 0 | GEMM 1 | sum 1 | GEMM 2 | sum 2 |          | sum of ranks |
    copy                              | slab 0 |       | slab 1 |       | slab 2 |                       three slabs
    """
    h, down, tokens, shared = given.h, given.down, given.tokens, Shared.of(given.shared, given.gate)
    (rows, k), (held, H, _), world, me = given.routing.ids.shape, down.shape, team.size, team.rank
    most, width = rows // world, design.width(H)
    channel = channel_of(team, "grouped_matmul_reduce_scatter", h.dtype, rows * H)
    received = channel.begin(team)[: rows * H].view(world, most * H)
    out, own = h.new_empty((tokens, H)), h.new_empty(rows * H)
    y = h.new_empty(rows * k * width)
    for number, first in enumerate(range(0, H, width)):
        columns = min(width, H - first)
        of_slab = y[: rows * k * columns].view(rows * k, columns)
        grouped.run(design.tiles, h, down[:, first : first + columns], given.schedule, gather=0, out=of_slab)
        sums = own[rows * first : rows * (first + columns)]
        beside = shared
        if shared.rows is not None:
            beside = shared._replace(rows=shared.rows[:, first : first + columns])
        add_up(of_slab, *given.routing, (given.first, held), beside, sums.view(rows, columns))
        team.copy_engine.fork()
        part = most * columns
        for step in range(1, world):
            owner = (me + step) % world
            target = received[me, most * first : most * first + part]
            channel.send(team, target, sums[owner * part : (owner + 1) * part], me, number, owner)
    if tokens > 0:
        block = min(BLOCK, next_power_of_2(width))
        launch = launch_of(
            team,
            sum_slabs_kernel,
            block,
            lambda: {"ROWS": ROWS, "BLOCK": block, "num_warps": WARPS, **launch_options(team.caps)},
        )
        grid = cdiv(tokens, ROWS), cdiv(H, width)
        launch(grid, out, own, received, channel.landed.view, tokens, most, H, width, team.view)
    team.copy_engine.join()
    return out

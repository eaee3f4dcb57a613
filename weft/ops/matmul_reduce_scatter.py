"""matmul_reduce_scatter: a GEMM over each rank's share of K, whose sum over the ranks stays scattered by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops import gemm
from weft.ops.gemm import GemmConfig, gemm_tile, join_parts, leave_part, packed, store_tile
from weft.ops.matmul import run as run_matmul
from weft.ops.segments import begin_kernel, finish_last_segment, library_matmul
from weft.ops.tiles import at_place, first_tile, locate, make_tiles, owner_of, slot_of, work_at, work_steps
from weft.runtime.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit(do_not_specialize=["M", "rows", "tiles", "start", "whole"])
def matmul_reduce_scatter_kernel(
    a, a_stride, b, b_stride, out, outbox, slots, arrived, epoch, slot_size, flags, scratch, tickets,
    M, rows, N, K, tiles, start, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = sum over ranks of a[M, K] @ b[N, K].T, rows me * rows ..      grid: (programs,), own rows last

    slots    [2, W - 1, slot_size]  symmetric: whole tiles; slot d holds what rank me + 1 + d computed of my rows
    arrived  [W - 1, flags]         symmetric: arrived[d, t] = epoch, once tile t of my rows lies in slot d
    epoch    [2]                    this rank's
    outbox   [programs, tile]       this rank's: a program's finished tile, while it goes to its owner
    scratch, tickets                of split tiles (join_parts)

    signals  every rank s, per tile of owner o: stores the tile at o, then arrived[slot of s, tile] = epoch at o
    waits    own tiles, after their GEMM: arrived[d, tile] >= epoch, d = 0 .. W - 2
    order    own partial (fp32) + those of ranks me + 1, me + 2, … (in out's dtype), summed in fp32: the same every run
    reuse    slots are double-buffered by epoch. A rank writes half h again two calls later. It has then left the call
             between, in which it waited for every rank, which sent after it had ended the call before, the reader of h.
             outbox: a tile has left it when the next tile's GEMM ends, and only then is it filled again.
    progress before a program waits it has sent and announced all its earlier tiles

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: panels of the owners
    link       | o1 | o2 | o3 |                                         each tile along the next one's GEMM
    sum                    | +1 +2 +3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    half = slots + (now & 1).to(tl.int64) * (world - 1) * slot_size
    outbox += tl.program_id(0) * TILE
    sending = -1  # the number of the tile in the outbox
    depth = tl.cdiv(K, BLOCK_K)
    steps = work_steps(tiles, whole, depth)
    for step in range(0, steps):
        place, first, last = work_at(step, tiles, whole, depth)
        number = at_place(place, start, tiles)
        owner, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        receiver = owner_of(tl.maximum(sending, 0), tiles, world)
        sent = tl.maximum(sending, 0) - first_tile(receiver, tiles, world)
        slot = slot_of(me, receiver, world)
        there = wl.symm_at(half + slot * slot_size + sent.to(tl.int64) * TILE, receiver, team)
        left = tl.where(sending < 0, 0, TILE)
        acc = gemm_tile(
            a, a_stride, M, b, b_stride, N, owner * rows + row, column, K, first, last, outbox, there, left,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, PIECE,
        )  # fmt: skip
        if sending >= 0:
            wl.notify(arrived + slot * flags + sent, receiver, now, team)
            sending = -1
        if last - first == depth:
            complete = True
        else:
            complete = leave_part(acc, scratch, tickets, place, tiles, whole, depth, BLOCK_M, BLOCK_N)
        if complete:
            tile = number - first_tile(owner, tiles, world)
            here = half + tile.to(tl.int64) * TILE
            # Where the finished tile goes: my rows' to out, others' along the next tile's GEMM, the last one's at once.
            last_step = step + 1 == steps
            slot = slot_of(me, owner, world)
            if owner == me:
                for peer in tl.range(0, world - 1):
                    wl.wait(arrived + peer * flags + tile, now, team)
            else:
                there = wl.symm_at(here + slot * slot_size, owner, team)
                tl.debug_barrier()  # all threads have sent what the outbox held
            if last - first == depth:
                deliver(
                    acc, 0, owner == me, last_step, out, here, slot_size, there, outbox, row, column, rows, N, team,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
            else:
                for at in range(0, BLOCK_M, ROWS):
                    x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                    deliver(
                        x, at, owner == me, last_step, out, here, slot_size, there, outbox, row, column, rows, N, team,
                        ROWS, BLOCK_N,
                    )  # fmt: skip
            if owner != me:
                if last_step:
                    wl.notify(arrived + slot * flags + tile, owner, now, team)
                else:
                    tl.debug_barrier()
                    sending = number
    wl.advance_epoch(epoch, now)


@triton.jit
def deliver(
    x, at, is_own, is_last, out, here, slot_size, there, outbox, row, column, rows, N, team,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows ``at`` .. at + ROWS - 1 of a finished tile, ``x``: with the slots' (``here``) to ``out``, or to the outbox, or
    to the owner (``there``)."""
    offsets = at * BLOCK_N + packed(ROWS, BLOCK_N)
    if is_own:
        for slot in tl.range(0, wl.num_ranks(team) - 1, num_stages=1):
            x += tl.load(here + slot * slot_size + offsets).to(tl.float32)
        store_tile(out, x, row + at, column, 0, rows, N, ROWS, BLOCK_N)
    elif is_last:
        tl.store(there + offsets, x.to(out.dtype.element_ty))
    else:
        tl.store(outbox + offsets, x.to(out.dtype.element_ty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    slots: torch.Tensor
    arrived: torch.Tensor
    epoch: torch.Tensor


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, team: Team) -> torch.Tensor:
    """Rows rank * M/W .. of the sum over ranks of a[M, K] @ b[N, K].T -> [M/W, N].

    a and b hold this rank's share of K; M and N are the same on all ranks. Partial results travel in the dtype of a and
    b (fp16, bf16, fp32) and are summed in fp32, in an order that depends on the row only. Collective: all ranks call
    it, in the same order, on one stream. ValueError for shapes, dtypes or devices that do not fit; HeapExhausted.
    """
    gemm.check_operands("matmul_reduce_scatter", a, b, team.device)
    M, world = a.shape[0], team.size
    if M % world:
        raise ValueError(
            f"matmul_reduce_scatter: M={M} is not divisible by world_size={world}; pad M to {-(-M // world) * world}"
        )
    return torch.ops.weft.matmul_reduce_scatter(a, b, team.name)


def run(a: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig | None = None) -> torch.Tensor:
    """``matmul_reduce_scatter`` of checked arguments, with a chosen config, the same on all ranks."""
    if team.size == 1:
        return run_matmul(a, b, config)
    a, b = gemm.rows_contiguous(a), gemm.rows_contiguous(b)
    world, (M, K), N = team.size, a.shape, b.shape[0]
    rows = M // world
    config = config or gemm.configured("matmul_reduce_scatter", M, N, K, a.dtype, world, team.caps)
    gemm.check_design("matmul_reduce_scatter", config, "fused", "segments", "library")
    if config.design == "library":
        partial = torch.empty((M, N), dtype=a.dtype, device=a.device)
        library_matmul(a, b, partial)
        return torch.ops.weft.reduce_scatter(partial, team.name)
    if config.design == "segments":
        return _run_segments(a, b, team, config)
    tiles = make_tiles(rows, N, panels=world, block_m=config.block_m, block_n=config.block_n, group=config.group)
    space = _workspace(team, a.dtype, tiles.count // world * config.block_m * config.block_n)
    parts, programs = gemm.parts_for(team, config, a.dtype), gemm.programs(team, tiles, config)
    out = torch.empty((rows, N), dtype=a.dtype, device=a.device)
    descriptors = gemm.can_describe(a, b)
    matmul_reduce_scatter_kernel[(programs,)](
        gemm.operand(a, config.block_m, config.block_k, descriptors), gemm.row_stride(a),
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, parts.outbox, space.slots, space.arrived, space.epoch, space.slots.shape[2], space.arrived.shape[1],
        parts.scratch, parts.tickets, M, rows, N, K, tiles,
        first_tile.fn((team.rank + 1) % world, tiles, world), gemm.whole_for(tiles, programs, config), team.view,
        launch_cooperative_grid=True, **gemm.constants(config, descriptors),
    )  # fmt: skip
    return out


def _run_segments(a: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig) -> torch.Tensor:
    """A library GEMM for each peer's rows, which the copy engine carries to their owner; then the own rows.

    signals  copy engine of rank s: arrived[slot of s] = epoch at the owner, behind the segment
    waits    last_segment_kernel, before it adds a slot to a tile
    reuse    a half of the slots is written again only after every rank has ended the call that read it (begin_kernel).
             Halves alternate from call to call, so that wait is over before it begins; in a CUDA graph with an odd
             number of calls, whose replays use the same half twice running, it is for the peer to end its last call.

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: segments by owner
    copy       | o1 | o2 | o3 |
    sum                    | +1 +2 +3 |
    """
    world, rows, N = team.size, a.shape[0] // team.size, b.shape[0]
    space, engine = _segments(team, a.dtype, rows * N), team.copy_engine
    half = space.calls % 2
    space.calls += 1
    slots = space.slots[half]
    panels = a.view(world, rows, -1) if a.is_contiguous() else a.unflatten(0, (world, rows))
    for step in range(1, world):
        owner = (team.rank + step) % world
        partial = torch.empty((rows, N), dtype=a.dtype, device=a.device)
        library_matmul(panels[owner], b, partial)
        if step == 1:
            # Behind the first GEMM, under which the peers' announcements arrive.
            begin_kernel[(1,)](space.epoch, space.filled[half], space.entered, team.view, num_warps=1)
        engine.fork()
        slot = slot_of.fn(team.rank, owner, world)
        engine.put(slots[slot, : rows * N], partial.view(-1), owner)
        engine.signal(space.arrived[slot : slot + 1], space.epoch, owner)
    out = torch.empty((rows, N), dtype=a.dtype, device=a.device)
    finish_last_segment(panels[team.rank], b, out, slots, space.arrived, space.epoch, team, config)
    engine.join()
    return out


@dataclass(slots=True, kw_only=True)
class Segments:
    slots: torch.Tensor
    arrived: torch.Tensor
    entered: torch.Tensor
    filled: torch.Tensor
    epoch: torch.Tensor
    calls: int = 0
    """Made by the host. All ranks make the same ones, so they agree on the half; that it is free, the device proves."""


def _segments(team: Team, dtype: torch.dtype, size: int) -> Segments:
    def make(capacity: int) -> Segments:
        return Segments(
            slots=team.empty((2, team.size - 1, capacity), dtype=dtype),
            arrived=team.signals((team.size - 1,)),
            entered=team.signals((team.size,)),
            # A row each, so that the word of either half is aligned alike.
            filled=team.local((2, 4), torch.int32),
            epoch=team.local((1,), torch.int32),
        )

    return gemm.grown_workspace(team, ("matmul_reduce_scatter segments", dtype), size, make)


def _workspace(team: Team, dtype: torch.dtype, slot_size: int) -> Workspace:
    def make(capacity: int) -> Workspace:
        return Workspace(
            slots=team.empty((2, team.size - 1, capacity), dtype=dtype),
            arrived=team.signals((team.size - 1, capacity // gemm.SMALLEST_TILE)),
            epoch=team.local((2,), torch.int32),
        )

    return gemm.grown_workspace(team, ("matmul_reduce_scatter", dtype), slot_size, make)


@torch.library.custom_op("weft::matmul_reduce_scatter", mutates_args=())
def _matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, team: str) -> torch.Tensor:
    return run(a, b, find_team(team))


@_matmul_reduce_scatter.register_fake
def _(a: torch.Tensor, b: torch.Tensor, team: str) -> torch.Tensor:
    return a.new_empty((a.shape[0] // find_team(team).size, b.shape[0]))


def _remember(ctx, inputs, output):
    a, b, ctx.team = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, grad):
    # Every rank used my rows of the output once, and all of the output came from my share of K.
    a, b = ctx.saved_tensors
    everywhere = torch.ops.weft.all_gather(grad, ctx.team)
    return torch.ops.weft.all_gather_matmul(grad, b.t(), ctx.team), torch.ops.weft.matmul(everywhere.t(), a.t()), None


_matmul_reduce_scatter.register_autograd(_backward, setup_context=_remember)

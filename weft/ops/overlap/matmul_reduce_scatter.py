"""matmul_reduce_scatter: a GEMM over each rank's share of K, whose sum over the ranks stays scattered by rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.gemm_tile import gemm_tile, halves, join_parts, leave_part, packed, store_tile
from weft.kernels.operands import rows_contiguous
from weft.kernels.tile_schedule import (
    as_argument,
    at_place,
    first_tile,
    from_argument,
    locate,
    make_tiles,
    owner_of,
    place_of,
    slot_of,
    work_at,
    work_steps,
)
from weft.ops.custom_op import custom_op
from weft.ops.gemm import cublas, persistent, small_m
from weft.ops.gemm.config import GemmConfig, configured
from weft.ops.gemm.matmul import run as run_matmul
from weft.ops.overlap.pipelined import add_up, pieces_of, rows_of, send_partials
from weft.ops.registration import check_flag, check_team
from weft.runtime.side_streams import side_streams
from weft.runtime.team import find_team
from weft.runtime.workspace import grown_workspace
from weft.transport.copy_channel import Segments, await_flags

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit(do_not_specialize=["M", "rows", "start", "whole"])
def matmul_reduce_scatter_kernel(
    a, a_stride, b, b_stride, out, outbox, slots, arrived, epoch, slot_size, flags, scratch, tickets,
    M, rows, N, K, tiles, start, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, PIECE: tl.constexpr, OWN_FIRST: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = sum over ranks of a[M, K] @ b[N, K].T, rows me * rows ..      grid: (programs,), own rows last

    OWN_FIRST: a has the rows of ranks me, me + 1, … (mod W) in this order, and else as the ranks come.

    slots    [2, W - 1, slot_size]  symmetric: whole tiles; slot d holds what rank me + 1 + d computed of my rows
    arrived  [W - 1, flags]         symmetric: arrived[d, t] = epoch, once tile t of my rows lies in slot d
    epoch    [2]                    this rank's
    outbox   [programs, tile]       this rank's: a program's finished tile, while it goes to its owner
    scratch, tickets                of split tiles (join_parts)

    signals  every rank s, per tile of owner o: stores the tile at o, then arrived[slot of s, tile] = epoch at o
    waits    own tiles, after their GEMM: arrived[d, tile] >= epoch, d = 0 .. W - 2
    order    own partial (fp32) + those of ranks me + 1, me + 2, … (in out's dtype), summed in fp32: the same every run
    reuse    slots are double-buffered by epoch. Rank s writes half h for owner o in call e and again in call e + 2. In
             between, s finished call e + 1, in which it waited for a tile from o. o sent that tile after it finished call e,
             and so after it read half h.
             outbox: a tile has left it when the next tile's GEMM ends, and only then is it filled again.
    progress before a program waits it has sent and announced all its earlier tiles

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: panels of the owners
    link       | o1 | o2 | o3 |                                         each tile along the next one's GEMM
    sum                    | +1 +2 +3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    # In pieces, so that a slot's elements fit beside the accumulator: whole tiles spill up to 168 bytes a thread.
    HALVES: tl.constexpr = 2 if TILE > 8192 else 1
    COLUMNS: tl.constexpr = BLOCK_N // HALVES
    me = wl.rank(team)
    tiles = from_argument(tiles)
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
        first_row = place_of(owner, me, world, OWN_FIRST) * rows
        receiver = owner_of(tl.maximum(sending, 0), tiles, world)
        sent = tl.maximum(sending, 0) - first_tile(receiver, tiles, world)
        slot = slot_of(me, receiver, world)
        there = wl.symm_at(half + tl.cast(slot, tl.int64) * slot_size + sent.to(tl.int64) * TILE, receiver, team)
        left = tl.where(sending < 0, 0, TILE)
        acc = gemm_tile(
            a, a_stride, M, b, b_stride, N, first_row + row, column, K, first, last, outbox, there, left,
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
                there = wl.symm_at(here + tl.cast(slot, tl.int64) * slot_size, owner, team)
                tl.debug_barrier()  # all threads have sent what the outbox held
            if last - first == depth:
                pieces = halves(acc) if HALVES > 1 else (acc,)
                for part in tl.static_range(HALVES):
                    deliver(
                        pieces[part], 0, part * COLUMNS, owner == me, last_step, out, here, slot_size, there, outbox,
                        row, column, rows, N, team, BLOCK_M, COLUMNS, BLOCK_N,
                    )  # fmt: skip
            else:
                for at in range(0, BLOCK_M, ROWS):
                    x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                    deliver(
                        x, at, 0, owner == me, last_step, out, here, slot_size, there, outbox,
                        row, column, rows, N, team, ROWS, BLOCK_N, BLOCK_N,
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
    x, at, skip, is_own, is_last, out, here, slot_size, there, outbox, row, column, rows, N, team,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The piece of a finished tile from row ``at`` and column ``skip`` on, ``x``: with the slots' (``here``) to
    ``out``, or to the outbox, or to the owner (``there``)."""
    offsets = at * BLOCK_N + skip + packed(ROWS, COLUMNS, BLOCK_N)
    if is_own:
        for slot in tl.range(0, wl.num_ranks(team) - 1, num_stages=1):
            x += tl.load(here + tl.cast(slot, tl.int64) * slot_size + offsets).to(tl.float32)
        store_tile(out, x, row + at, column + skip, 0, rows, N, ROWS, COLUMNS)
    elif is_last:
        tl.store(there + offsets, x.to(out.dtype.element_ty))
    else:
        outbox += 16 * wl.zero_here()
        tl.store(outbox + offsets, x.to(out.dtype.element_ty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    slots: torch.Tensor
    arrived: torch.Tensor
    epoch: torch.Tensor


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, team: Team, *, own_first: bool = False) -> torch.Tensor:
    """Rows rank * M/W .. of the sum over ranks of a[M, K] @ b[N, K].T -> [M/W, N].

    own_first  rank r's a has the rows of ranks r, r + 1, … (mod W) in this order, that of ``all_gather_matmul`` with own_first

    a and b hold this rank's share of K, of any size; M, N, dtype and own_first are the same on all ranks, which meet on the
    host at the first call with them. Partial results travel in the dtype of a and b (fp16, bf16, fp32) and are summed in fp32,
    in an order that depends on the row only. Collective: all ranks call it, in the same order, on one stream. ValueError for
    shapes, dtypes or devices that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    persistent.check_operands("matmul_reduce_scatter", a, b, check_team("matmul_reduce_scatter", team))
    check_flag("matmul_reduce_scatter", "own_first", own_first)
    M, world = a.shape[0], team.size
    if M % world:
        raise ValueError(
            f"matmul_reduce_scatter: M={M} is not divisible by world_size={world}; pad M to {-(-M // world) * world}"
        )
    return torch.ops.weft.matmul_reduce_scatter.default(a, b, team.name, own_first)


def run(
    a: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig | None = None, own_first: bool = False
) -> torch.Tensor:
    """``matmul_reduce_scatter`` of checked arguments, with a chosen config, the same on all ranks. One rank: ``matmul``, where
    segments, of which there is one, are the library's GEMM."""
    if team.size == 1:
        return run_matmul(a, b, persistent.for_one_rank(config))
    a, b = rows_contiguous(a), rows_contiguous(b)
    world, (M, K), N = team.size, a.shape, b.shape[0]
    rows = M // world
    given = {"a.shape[0]": M, "b.shape[0]": N, "dtype": a.dtype, "own_first": own_first}
    persistent.agree("matmul_reduce_scatter", team, given)
    config = config or configured("matmul_reduce_scatter", M, N, K, a.dtype, world, team.caps)
    persistent.check_design("matmul_reduce_scatter", config, "fused", "segments", "library")
    if config.accumulate and world != 2:
        raise ValueError(
            f"matmul_reduce_scatter: accumulate=True is for two ranks, and world_size={world}; leave it out"
        )
    if config.design == "library":
        partial = small_m.product(a, b, team.caps)
        if own_first:
            partial = partial.roll(team.rank * rows, 0)
        return torch.ops.weft.reduce_scatter.default(partial, team.name)
    out = torch.empty((rows, N), dtype=a.dtype, device=a.device)
    if config.design == "segments":
        _run_segments(a, b, out, team, config, own_first)
    else:
        _run_fused(a, b, out, team, config, own_first)
    return out


def _run_fused(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, team: Team, config: GemmConfig, own_first: bool
) -> None:
    world, (M, K), (rows, N) = team.size, a.shape, out.shape
    tiles = make_tiles(rows, N, panels=world, block_m=config.block_m, block_n=config.block_n, group=config.group)
    space = _workspace(team, a.dtype, tiles.count // world * config.block_m * config.block_n)
    parts, programs = persistent.parts_for(team, config, a.dtype), persistent.programs(team, tiles, config)
    operands, descriptors = persistent.operands(a, b, config)
    matmul_reduce_scatter_kernel[(programs,)](
        *operands,
        out, parts.outbox, space.slots, space.arrived, space.epoch, space.slots.shape[2], space.arrived.shape[1],
        parts.scratch, parts.tickets, M, rows, N, K, as_argument(tiles),
        first_tile.fn((team.rank + 1) % world, tiles, world), persistent.whole_for(tiles, programs, config), team.view,
        launch_cooperative_grid=True, OWN_FIRST=own_first, **persistent.constants(config, descriptors, team.caps.arch),
    )  # fmt: skip


def _run_segments(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, team: Team, config: GemmConfig, own_first: bool
) -> None:
    """A library GEMM for each piece of each peer's rows (or one for several peers'), which the copy engine carries to their
    owner; then the own rows'. They take turns on the lanes.

    signals  copy engine of rank s: flags[slot of s, piece] = epoch at the owner, behind the piece
    waits    wait_kernel, behind the own piece's GEMM: flags[d, piece] >= epoch, all d. GEMMs end whatever the peers do, so
             all ranks send all they have
    reuse    of a half of the slots: Segments

    lane 0  | o1 | o3 | sum |                                           rank 0 of 4: segments by owner
    lane 1    | o2 | own |
    copy         | o1 | o2 | o3 |

    lane 0  | o1 | o2 | o3 | own 0 | own 1 | sum 1 |                    one lane, own_pieces=2
    urgent                         | sum 0 |
    copy         | o1 | o2 | o3 |
    """
    (rows, N), me = out.shape, team.rank
    space, lanes = _segments(team, a.dtype, rows * N), side_streams(team, config.lanes)
    # What a lane computes and another stream sends lives until the lanes join.
    partial = torch.empty((team.size * rows, N), dtype=a.dtype, device=a.device)
    arrived: list[Any] = []
    lanes.fork()
    with lanes.urgent():
        slots, begun = space.begin(team), lanes.mark()
        team.copy_engine.fork()
    turn, computed = 0, begun
    for number, piece, computed in send_partials(a, b, partial, slots, space, team, lanes, config, begun, own_first):
        turn += 1
        if config.accumulate:
            # The peer is about as far: what it sends is awaited under the next GEMM, and not from the beginning on.
            with lanes.urgent():
                lanes.after(computed)
                await_flags(space.flags[:, number:], space.epoch, team)
                out[piece].copy_(slots[0, piece.start * N : piece.stop * N].view(-1, N))
                arrived.append(lanes.mark())
    of_own = rows_of(place_of.fn(me, me, team.size, own_first), team.size * rows, team.size)
    own, mine = a[of_own], partial[of_own]
    for number, piece in pieces_of(rows, config.chunks):
        with lanes.turn(turn):
            if config.accumulate:
                lanes.after(arrived[number])
                cublas.matmul(own[piece], b, out[piece], add=True)
            else:
                for _, part in pieces_of(piece.stop - piece.start, config.own_pieces):
                    part = slice(piece.start + part.start, piece.start + part.stop)
                    is_last = part.stop == piece.stop
                    cublas.matmul(own[part], b, mine[part])
                    done = lanes.mark()
                    # Behind the last part's GEMM, or beside the next one's.
                    with nullcontext() if is_last else lanes.urgent():
                        # Queue the sum behind the GEMMs that peers wait for, or its programs would take the SMs first.
                        for mark in (begun, computed, done):
                            lanes.after(mark)
                        await_flags(space.flags[:, number:], space.epoch, team)
                        add_up(mine[part], slots[:, part.start * N :], out[part], team, early=is_last)
        turn += 1
    lanes.join()
    team.copy_engine.join()


def _segments(team: Team, dtype: torch.dtype, size: int) -> Segments:
    def make(capacity: int) -> Segments:
        return Segments.make(team, team.empty((2, team.size - 1, capacity), dtype=dtype), team.size - 1)

    return grown_workspace(team, ("matmul_reduce_scatter segments", dtype), size, make)


def _workspace(team: Team, dtype: torch.dtype, slot_size: int) -> Workspace:
    def make(capacity: int) -> Workspace:
        return Workspace(
            slots=team.empty((2, team.size - 1, capacity), dtype=dtype),
            arrived=team.signals((team.size - 1, capacity // persistent.SMALLEST_TILE)),
            epoch=team.local((2,), torch.int32),
        )

    return grown_workspace(team, ("matmul_reduce_scatter", dtype), slot_size, make)


@custom_op("matmul_reduce_scatter")
def _matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False) -> torch.Tensor:
    return run(a, b, find_team(team), own_first=own_first)


@_matmul_reduce_scatter.register_fake
def _(a: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False) -> torch.Tensor:
    return a.new_empty((a.shape[0] // find_team(team).size, b.shape[0]))


def _remember(ctx, inputs, output):
    a, b, ctx.team, ctx.own_first = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, grad):
    # Every rank used my rows of the output once, and all of the output came from my share of K.
    a, b = ctx.saved_tensors
    everywhere = torch.ops.weft.all_gather.default(grad, ctx.team)
    if ctx.own_first:
        everywhere = everywhere.roll(-find_team(ctx.team).rank * grad.shape[0], 0)
    return (
        torch.ops.weft.all_gather_matmul.default(grad, b.t(), ctx.team, ctx.own_first),
        torch.ops.weft.matmul.default(everywhere.t(), a.t()),
        None,
        None,
    )


_matmul_reduce_scatter.register_autograd(_backward, setup_context=_remember)

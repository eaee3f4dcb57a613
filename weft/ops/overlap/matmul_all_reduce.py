"""matmul_all_reduce: a GEMM over each rank's share of K, whose sum over the ranks every rank gets, bitwise the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.gemm_tile import gemm_tile, halves, join_parts, leave_part, packed, store_tile
from weft.kernels.operands import rows_contiguous
from weft.kernels.tile_schedule import (
    Tiles,
    as_argument,
    at_place,
    first_tile,
    from_argument,
    locate,
    make_tiles,
    owner_of,
    slot_of,
    work_at,
    work_steps,
)
from weft.ops.collectives.all_reduce import run_of_parts
from weft.ops.custom_op import custom_op
from weft.ops.dispatch import choose
from weft.ops.gemm import cublas, persistent, small_m
from weft.ops.gemm.config import GemmConfig, configured
from weft.ops.gemm.matmul import run as run_matmul
from weft.ops.overlap.pipelined import SUM_WARPS, add_up, pieces_of, rows_of, send_partials, share
from weft.ops.registration import check_team
from weft.runtime.arithmetic import cdiv
from weft.runtime.side_streams import side_streams
from weft.runtime.team import find_team
from weft.runtime.workspace import capacity_for, grown_workspace
from weft.transport.copy_channel import Segments, await_flags

if TYPE_CHECKING:
    from weft.runtime.team import Team

# What all slots together may hold: the kernel's loop over them counts in 32 bits, since with 64 it spills at eight ranks.
MOST_ELEMENTS = 2**31
# Bytes up to which segments have two halves. Above it the next call waits until all peers have ended this one.
MOST_HALVED = 1 << 30


@triton.jit(do_not_specialize=["M", "whole"])
def matmul_all_reduce_kernel(
    a, a_stride, b, b_stride, out, outbox, slots, arrived, results, ready, epoch, slot_size, flags, scratch, tickets,
    M, N, K, tiles, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """out[M, N] = sum over ranks of a[M, K] @ b[N, K].T        grid: (programs,), own tiles last

    The tiles, not the rows, are dealt out to owners, so that all ranks take part whatever M is.

    slots    [W - 1, slot_size]  symmetric: whole tiles; slot d holds what rank me + 1 + d computed of my tiles
    arrived  [W - 1, flags]      symmetric: arrived[d, t] = epoch, once my t-th tile lies in slot d
    results  [all tiles]         symmetric: the summed tiles that peers own
    ready    [all tiles]         symmetric: ready[number] = epoch, once that tile lies in results
    epoch    [2]                 this rank's
    outbox   [programs, tile]    this rank's: a program's finished tile, while it goes to its owner
    scratch, tickets             of split tiles (join_parts)

    signals  every rank s, per tile of owner o: stores the tile at o, then arrived[slot of s, t] = epoch at o
             owner, per own tile: stores the sum at every peer, then ready[number] = epoch there
    waits    own tiles, after their GEMM: arrived[d, t] >= epoch, d = 0 .. W - 2
             peers' tiles, after all own ones: ready[number] >= epoch, then the copy into out
    order    own partial (fp32) + those of ranks me + 1, me + 2, … (in out's dtype), summed in fp32 and rounded once, by
             the owner: the same every run, and bitwise the same on all ranks
    reuse    slots: their owner reads a tile before it says ready, and nobody leaves a call before all tiles are ready.
             results: an owner writes a tile only after this rank's share of it in the same call, sent after this rank's
             last call ended. Both hold whatever the shapes of the two calls are, so one buffer each is enough.
             outbox: a tile has left it when the next tile's GEMM ends, and only then is it filled again.
    progress before a program waits it has sent and announced all its earlier tiles

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: tiles of the owners
    link       | o1 | o2 | o3 | | own to all |                          each tile along the next one's GEMM
    sum                    | +1 +2 +3 |
    copy                               | o1 | o2 | o3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    # In pieces, so that a slot's elements fit beside the accumulator: whole tiles spill up to 168 bytes a thread.
    HALVES: tl.constexpr = 2 if TILE > 8192 else 1
    COLUMNS: tl.constexpr = BLOCK_N // HALVES
    me = wl.rank(team)
    tiles = from_argument(tiles)
    now = wl.next_epoch(epoch)
    start = first_tile((me + 1) % world, tiles, world)
    outbox += tl.program_id(0) * TILE
    sending = -1  # the number of the tile in the outbox
    depth = tl.cdiv(K, BLOCK_K)
    steps = work_steps(tiles, whole, depth)
    for step in range(0, steps):
        place, first, last = work_at(step, tiles, whole, depth)
        number = at_place(place, start, tiles)
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        receiver = owner_of(tl.maximum(sending, 0), tiles, world)
        sent = tl.maximum(sending, 0) - first_tile(receiver, tiles, world)
        slot = slot_of(me, receiver, world)
        there = wl.symm_at(slots + tl.cast(slot, tl.int64) * slot_size + sent.to(tl.int64) * TILE, receiver, team)
        left = tl.where(sending < 0, 0, TILE)
        acc = gemm_tile(
            a, a_stride, M, b, b_stride, N, row, column, K, first, last, outbox, there, left,
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
            owner = owner_of(number, tiles, world)
            tile = number - first_tile(owner, tiles, world)
            here = slots + tile.to(tl.int64) * TILE
            result = results + number.to(tl.int64) * TILE
            # Where the finished tile goes: an own one to all, others' along the next tile's GEMM, the last one's at once.
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
                        pieces[part], 0, part * COLUMNS, owner == me, last_step, out, here, slot_size, there, result, outbox,
                        row, column, M, N, team, BLOCK_M, COLUMNS, BLOCK_N,
                    )  # fmt: skip
            else:
                for at in range(0, BLOCK_M, ROWS):
                    x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                    deliver(
                        x, at, 0, owner == me, last_step, out, here, slot_size, there, result, outbox,
                        row, column, M, N, team, ROWS, BLOCK_N, BLOCK_N,
                    )  # fmt: skip
            if owner == me:
                for peer in tl.static_range(1, world):
                    wl.notify(ready + number, (me + peer) % world, now, team)
            elif last_step:
                wl.notify(arrived + slot * flags + tile, owner, now, team)
            else:
                tl.debug_barrier()
                sending = number
    # The order begins with all tiles of the peers.
    of_peers = tiles.count + first_tile(me, tiles, world) - first_tile(me + 1, tiles, world)
    for place in range(tl.program_id(0), of_peers, tl.num_programs(0)):
        number = at_place(place, start, tiles)
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        wl.wait(ready + number, now, team)
        total = tl.load(results + number.to(tl.int64) * (BLOCK_M * BLOCK_N) + packed(BLOCK_M, BLOCK_N, BLOCK_N))
        store_tile(out, total, tile_row * BLOCK_M, tile_column * BLOCK_N, 0, M, N, BLOCK_M, BLOCK_N)
    wl.advance_epoch(epoch, now)


@triton.jit
def deliver(
    x, at, skip, is_own, is_last, out, here, slot_size, there, result, outbox, row, column, M, N, team,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The piece of a finished tile from row ``at`` and column ``skip`` on, ``x``: with the slots' (``here``) to
    ``out`` and to ``result`` of every peer, or to the outbox, or to the owner (``there``)."""
    world: tl.constexpr = wl.num_ranks(team)
    offsets = at * BLOCK_N + skip + packed(ROWS, COLUMNS, BLOCK_N)
    if is_own:
        for slot in tl.range(0, world - 1, num_stages=1):
            x += tl.load(here + slot * slot_size + offsets).to(tl.float32)
        total = x.to(out.dtype.element_ty)
        for peer in tl.range(1, world + wl.zero_here(), num_stages=1):
            tl.store(wl.symm_at(result, (wl.rank(team) + peer) % world, team) + offsets, total)
        store_tile(out, total, row + at, column + skip, 0, M, N, ROWS, COLUMNS)
    elif is_last:
        tl.store(there + offsets, x.to(out.dtype.element_ty))
    else:
        outbox += 16 * wl.zero_here()
        tl.store(outbox + offsets, x.to(out.dtype.element_ty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    slots: torch.Tensor
    arrived: torch.Tensor
    results: torch.Tensor
    ready: torch.Tensor
    epoch: torch.Tensor


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, team: Team) -> torch.Tensor:
    """The sum over ranks of a[M, K] @ b[N, K].T -> [M, N], bitwise the same on all ranks.

    a and b hold this rank's share of K, of any size; M, N and dtype are the same on all ranks, which meet on the host at the
    first call with them. Partial results travel in the dtype of a and b (fp16, bf16, fp32) and are summed in fp32, in an order
    that depends on the tile only. Collective: all ranks call it, in the same order, on one stream. ValueError for shapes,
    dtypes or devices that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    persistent.check_operands("matmul_all_reduce", a, b, check_team("matmul_all_reduce", team))
    return torch.ops.weft.matmul_all_reduce.default(a, b, team.name)


def run(a: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig | None = None) -> torch.Tensor:
    """``matmul_all_reduce`` of checked arguments, with a chosen config, the same on all ranks. One rank: ``matmul``, where
    segments, of which there is one, are the library's GEMM. ValueError if a config of design "fused" has sums that the kernel
    cannot count (MOST_ELEMENTS); what is chosen here then has segments."""
    if team.size == 1:
        return run_matmul(a, b, persistent.for_one_rank(config))
    a, b = rows_contiguous(a), rows_contiguous(b)
    (M, K), N = a.shape, b.shape[0]
    persistent.agree("matmul_all_reduce", team, {"a.shape[0]": M, "b.shape[0]": N, "dtype": a.dtype})
    asked, config = config, config or configured("matmul_all_reduce", M, N, K, a.dtype, team.size, team.caps)
    persistent.check_design("matmul_all_reduce", config, "fused", "segments", "library")
    if config.design == "library":
        in_parts = choose("all_reduce", M * N * a.itemsize, a.dtype, team.size, team.caps).algorithm == "one_shot"
        if (few_rows := small_m.chosen_for("matmul", a, b, team.caps, in_parts)) is not None:
            partial = small_m.run(a, b, few_rows, gated=False, summed=not in_parts)
            if partial.dim() == 3:
                return run_of_parts(partial, a.dtype, team)
        else:
            partial = cublas.matmul(a, b)
        return torch.ops.weft.all_reduce.default(partial, team.name, "auto")
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    tiles = make_tiles(M, N, panels=1, block_m=config.block_m, block_n=config.block_n, group=config.group)
    slot_size, elements = slots_for(M, N, team.size, config)
    if config.design == "segments" or (asked is None and elements > MOST_ELEMENTS):
        _run_segments(a, b, out, team, config)
    elif elements > MOST_ELEMENTS:
        raise ValueError(
            f"matmul_all_reduce: design='fused' has slots of {elements} elements for M={M}, N={N}, and can count "
            f"{MOST_ELEMENTS}; pass design='segments'"
        )
    else:
        _run_fused(a, b, out, team, config, tiles, slot_size)
    return out


def slots_for(M: int, N: int, world_size: int, config: GemmConfig) -> tuple[int, int]:
    """Of the one kernel: the elements that one slot must hold, and those of all as they are made, of which it can count
    MOST_ELEMENTS."""
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    slot_size = cdiv(tiles, world_size) * config.block_m * config.block_n
    return slot_size, (world_size - 1) * capacity_for(slot_size)


def _run_fused(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, team: Team, config: GemmConfig, tiles: Tiles, slot_size: int
) -> None:
    (M, K), N = a.shape, b.shape[0]
    parts, programs = persistent.parts_for(team, config, a.dtype), persistent.programs(team, tiles, config)
    space = _workspace(team, a.dtype, slot_size)
    operands, descriptors = persistent.operands(a, b, config)
    matmul_all_reduce_kernel[(programs,)](
        *operands,
        out, parts.outbox, space.slots, space.arrived, space.results, space.ready, space.epoch,
        space.slots.shape[1], space.arrived.shape[1], parts.scratch, parts.tickets,
        M, N, K, as_argument(tiles), persistent.whole_for(tiles, programs, config), team.view,
        launch_cooperative_grid=True, **persistent.constants(config, descriptors, team.caps.arch),
    )  # fmt: skip


def _run_segments(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, team: Team, config: GemmConfig) -> None:
    """An all-reduce for each of at most ``config.chunks`` blocks of rows, which are dealt out to owners: a library GEMM for
    each peer's rows (or one for several peers'), which the copy engine carries to their owner; then the own rows', and the
    sums. They go to all under the next block's GEMMs, by the copy engine; the last block's go by share_kernel.

    signals  copy engine of rank s: flags[slot of s, block] = epoch at the owner, behind a block's rows, and
             flags[W - 1 + slot of s, block] = epoch at all, behind its sums
    waits    wait_kernel, behind a block's own GEMM: flags[d, block] >= epoch, d = 0 .. W - 2; and for the sums, behind the
             next block's GEMMs for peers, to leave them time: flags[W - 1 + d, block]. GEMMs end whatever the peers do, and
             all that a rank sends of a block is before its first wait for it
    reuse    of a half of slots and results: Segments. In a call every block has places and flags of its own

    lane 0  | o1 | o3 | o1' | o3' | sum', to all |                      rank 0 of 4: segments by owner, ' of the second block
    lane 1    | o2 | own  | o2' | own' |
    urgent              | sum |   | copy |
    copy         | o1 | o2 | o3 | sum to all | o1' | o2' | o3' |
    """
    world, me, (M, N) = team.size, team.rank, out.shape
    # Of all blocks but the last every rank has a row.
    blocks = list(pieces_of(M, max(1, min(config.chunks, M // world))))
    most, last = cdiv(blocks[0][1].stop, world) * N, len(blocks) - 1
    space, lanes = _segments(team, a.dtype, len(blocks) * most), side_streams(team, config.lanes)
    # What a lane computes and another stream sends lives until the lanes join.
    partial = torch.empty((M, N), dtype=a.dtype, device=a.device)
    lanes.fork()
    with lanes.urgent():
        half, begun = space.begin(team), lanes.mark()
        team.copy_engine.fork()
    turn, earlier = 0, None
    for number, rows in blocks:
        total, part, mine = out[rows], partial[rows], rows_of(me, rows.stop - rows.start, world)
        slots, results = half[:, number * most : (number + 1) * most].split((world - 1, world))
        sent = list(send_partials(a[rows], b, part, slots, space, team, lanes, config, begun, block=number, turn=turn))
        turn += len(sent)
        if earlier is not None:
            with lanes.urgent():
                for *_, computed in sent[-1:]:  # none, where no peer has a row
                    lanes.after(computed)
                _collect(*earlier, space, number - 1, team)
        with lanes.turn(turn):
            cublas.matmul(a[rows][mine], b, part[mine])
            computed = lanes.mark()
        turn += 1
        if number < last:
            with lanes.urgent():
                lanes.after(computed)
                await_flags(space.flags[: world - 1, number:], space.epoch, team)
                add_up(part[mine], slots, total[mine], team, early=False)
                team.copy_engine.fork()
            _give(total[mine].view(-1), results, space, number, team)
            earlier = total, results
    lanes.join()
    if mine.stop > mine.start:
        await_flags(space.flags[: world - 1, last:], space.epoch, team)
    share(part[mine], slots, results, space.ready, space.epoch, total, team)
    team.copy_engine.join()


def _give(mine: torch.Tensor, results: torch.Tensor, space: Segments, block: int, team: Team) -> None:
    """Have the copy engine write this rank's sums of a block into its place in ``results`` [W, …] at every peer."""
    world, me = team.size, team.rank
    for step in range(1, world):
        peer = (me + step) % world
        space.send(team, results[me, : mine.numel()], mine, world - 1 + slot_of.fn(me, peer, world), block, peer)


def _collect(out: torch.Tensor, results: torch.Tensor, space: Segments, block: int, team: Team) -> None:
    """Peers' rows of a block, ``out`` [rows, N] = their sums, once they are in ``results`` [W, …]. By memory copies:
    a kernel would wait for an SM until the GEMM beside it ends. (That these do not was not profiled.)"""
    await_flags(space.flags[team.size - 1 :, block:], space.epoch, team)
    for peer in range(team.size):
        if peer != team.rank:
            theirs = out[rows_of(peer, len(out), team.size)].view(-1)
            theirs.copy_(results[peer, : theirs.numel()])


def _workspace(team: Team, dtype: torch.dtype, slot_size: int) -> Workspace:
    def make(capacity: int) -> Workspace:
        flags = capacity // persistent.SMALLEST_TILE
        return Workspace(
            slots=team.empty((team.size - 1, capacity), dtype=dtype),
            arrived=team.signals((team.size - 1, flags)),
            results=team.empty((team.size * capacity,), dtype=dtype),
            ready=team.signals((team.size * flags,)),
            epoch=team.local((2,), torch.int32),
        )

    return grown_workspace(team, ("matmul_all_reduce", dtype), slot_size, make)


def _segments(team: Team, dtype: torch.dtype, size: int) -> Segments:
    def make(capacity: int) -> Segments:
        # Slots for what peers compute of my rows, then every rank's sums.
        # Four programs an SM store as fast as the links take it.
        programs = min(4 * team.caps.sms, team.max_programs(SUM_WARPS, registers=64))
        places = 2 * team.size - 1
        halves = 2 if 2 * places * capacity * dtype.itemsize <= MOST_HALVED else 1
        buffers = team.empty((halves, places, capacity), dtype=dtype)
        return Segments.make(team, buffers, 2 * (team.size - 1), programs)

    return grown_workspace(team, ("matmul_all_reduce segments", dtype), size, make)


@custom_op("matmul_all_reduce")
def _matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, team: str) -> torch.Tensor:
    return run(a, b, find_team(team))


@_matmul_all_reduce.register_fake
def _(a: torch.Tensor, b: torch.Tensor, team: str) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _remember(ctx, inputs, output):
    a, b, ctx.team = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, grad):
    # Every rank's output holds my partial result: the sum over the ranks of what they ask of it.
    a, b = ctx.saved_tensors
    grad = torch.ops.weft.all_reduce.default(grad, ctx.team, "auto")
    return torch.ops.weft.matmul.default(grad, b.t()), torch.ops.weft.matmul.default(grad.t(), a.t()), None


_matmul_all_reduce.register_autograd(_backward, setup_context=_remember)

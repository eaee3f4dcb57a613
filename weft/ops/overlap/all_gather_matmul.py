"""all_gather_matmul: every rank's rows of A meet this rank's B. Copy engines carry the rows while the GEMM runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.gemm_tile import gemm_tile, join_parts, leave_part, store_tile
from weft.kernels.operands import can_describe, operand, row_stride, rows_contiguous
from weft.kernels.tile_schedule import (
    as_argument,
    at_place,
    first_tile,
    from_argument,
    locate,
    make_tiles,
    place_of,
    wholes_of,
    work_at,
    work_steps,
)
from weft.ops.custom_op import custom_op
from weft.ops.gemm import cublas, persistent, small_m
from weft.ops.gemm.config import GemmConfig, configured
from weft.ops.gemm.matmul import run as run_matmul
from weft.ops.overlap.pipelined import pieces_of, runs_of
from weft.ops.registration import check_flag, check_team
from weft.runtime.side_streams import side_streams
from weft.runtime.team import find_team
from weft.runtime.workspace import grown_workspace
from weft.transport.copy_channel import MAX_CHUNKS, Segments, await_flags

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit(do_not_specialize=["rows", "whole"])
def all_gather_matmul_kernel(
    shard, shard_stride, gathered, gathered_rows, b, b_stride, out, landed, epoch,
    scratch, tickets, rows, N, K, tiles, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, FLATTEN: tl.constexpr, MAX_CHUNKS: tl.constexpr, OWN_FIRST: tl.constexpr,
):  # fmt: skip
    """out[W * rows, N] = all_gather(shard[rows, K]) @ b[N, K].T        grid: (programs,), own shard first

    OWN_FIRST: the rows of ranks me, me + 1, … (mod W) come in this order in ``out``, and else as the ranks do.

    gathered  [gathered_rows, K]  symmetric, a half of A_full: shard s from row s * gathered_rows / W on, in whole tiles
    landed    [W, MAX_CHUNKS]     symmetric: landed[s, c] = epoch, once chunk c of shard s is here
    epoch     [2]                 this rank's, set by begin_kernel
    scratch, tickets              of split tiles (join_parts), none of them own ones

    signals  copy engine of rank s, behind each chunk: landed[s, c] = epoch
    waits    before the first tile of a chunk: landed[s, c] >= epoch; the own shard is read where it is
    reuse    of a half of A_full: Segments
    progress  programs wait for copy engines only, so they need not all be resident

    copy  | s1 | s2 | s3 |                          what arrives
    gemm  | s0 | s1 | s2 | s3 |                                         rank 0 of 4: shards
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    tiles = from_argument(tiles)
    now = tl.load(epoch)
    start = first_tile(me, tiles, world)
    programs = tl.num_programs(0)
    own = tiles.count // world
    # Loops, and not a choice in one: Triton gives the operands of two GEMMs shared memory each unless one loop follows
    # the other.
    depth = tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0)
    first_row = place_of(me, me, world, OWN_FIRST) * rows
    for place in tl.range(program, own, programs, flatten=FLATTEN):
        panel, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(
            shard, shard_stride, rows, b, b_stride, N, row, column, K, 0, depth, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        store_tile(out, acc, row, column, first_row, rows, N, BLOCK_M, BLOCK_N)
    of_chunk = tiles.chunk * tiles.columns
    chunks = tl.cdiv(tiles.rows, tiles.chunk)
    for part in range(0, (world - 1) * chunks):
        shard_begin = (part // chunks + 1) * own
        begin = shard_begin + part % chunks * of_chunk
        end = tl.minimum(tl.minimum(begin + of_chunk, shard_begin + own), whole)
        # The first of this program's places in the chunk.
        first_place = begin + (program + programs - begin % programs) % programs
        owner = (me + 1 + part // chunks) % world
        first_row = place_of(owner, me, world, OWN_FIRST) * rows
        if first_place < end:
            wl.wait(landed + owner * MAX_CHUNKS + part % chunks, now, team)
        for place in tl.range(first_place, end, programs, flatten=FLATTEN):
            panel, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
            row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
            row_there = owner * (gathered_rows // world) + row
            acc = gemm_tile(
                gathered, K, gathered_rows, b, b_stride, N, row_there, column, K, 0, depth, out, out, 0,
                BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
            )  # fmt: skip
            store_tile(out, acc, row, column, first_row, rows, N, BLOCK_M, BLOCK_N)
    for step in range(wholes_of(whole), work_steps(tiles, whole, depth)):
        place, first, last = work_at(step, tiles, whole, depth)
        owner, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        wl.wait(landed + owner * MAX_CHUNKS + chunk, now, team)
        first_row = place_of(owner, me, world, OWN_FIRST) * rows
        row_there = owner * (gathered_rows // world) + row
        acc = gemm_tile(
            gathered, K, gathered_rows, b, b_stride, N, row_there, column, K, first, last, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        if last - first == depth:
            store_tile(out, acc, row, column, first_row, rows, N, BLOCK_M, BLOCK_N)
        elif leave_part(acc, scratch, tickets, place, tiles, whole, depth, BLOCK_M, BLOCK_N):
            for at in range(0, BLOCK_M, ROWS):
                x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                store_tile(out, x, row + at, column, first_row, rows, N, ROWS, BLOCK_N)


def all_gather_matmul(a_shard: torch.Tensor, b: torch.Tensor, team: Team, *, own_first: bool = False) -> torch.Tensor:
    """all_gather(a_shard[M/W, K]) @ b[N, K].T -> [M, N], fp32 accumulation, in the dtype of both (fp16, bf16, fp32).

    own_first  rank r's result has the rows of ranks r, r + 1, … (mod W) in this order, that of ``matmul_reduce_scatter`` with
               own_first. For what treats every row alike, as an MLP does: rows come in the order in which they arrive, so that
               one GEMM computes all that are not the own ones

    Every rank has its own b (its share of N); M, N, K, dtype and own_first are the same on all ranks, which meet on the host
    at the first call with them. Collective: all ranks call it, in the same order, on one stream. ValueError for shapes, dtypes
    or devices that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    persistent.check_operands("all_gather_matmul", a_shard, b, check_team("all_gather_matmul", team), "a_shard")
    check_flag("all_gather_matmul", "own_first", own_first)
    return torch.ops.weft.all_gather_matmul.default(a_shard, b, team.name, own_first)


def run(
    a_shard: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig | None = None, own_first: bool = False
) -> torch.Tensor:
    """``all_gather_matmul`` of checked arguments, with a chosen config, the same on all ranks. One rank: ``matmul``, where
    segments, of which there is one, are the library's GEMM."""
    if team.size == 1:
        return run_matmul(a_shard, b, persistent.for_one_rank(config))
    shard, b = a_shard.contiguous(), rows_contiguous(b)
    world, (rows, K), N = team.size, shard.shape, b.shape[0]
    given = {"a_shard.shape[0]": rows, "b.shape[0]": N, "b.shape[1]": K, "dtype": b.dtype, "own_first": own_first}
    persistent.agree("all_gather_matmul", team, given)
    config = config or configured("all_gather_matmul", world * rows, N, K, shard.dtype, world, team.caps, own_first)
    persistent.check_design("all_gather_matmul", config, "fused", "segments", "library")
    if config.design == "library":
        gathered = torch.ops.weft.all_gather.default(shard, team.name)
        return small_m.product(gathered.roll(-team.rank * rows, 0) if own_first else gathered, b, team.caps)
    out = torch.empty((world * rows, N), dtype=shard.dtype, device=shard.device)
    if config.design == "segments":
        _run_segments(shard, b, out, team, config, own_first)
    else:
        _run_fused(shard, b, out, team, config, own_first)
    return out


def _run_fused(
    shard: torch.Tensor, b: torch.Tensor, out: torch.Tensor, team: Team, config: GemmConfig, own_first: bool
) -> None:
    world, (rows, K), N = team.size, shard.shape, b.shape[0]
    tiles = make_tiles(
        rows, N, panels=world, block_m=config.block_m, block_n=config.block_n, group=config.group, chunks=config.chunks
    )
    padded = world * tiles.rows * config.block_m
    space = _workspace(team, shard.dtype, padded * K)
    gathered = space.begin(team)[: padded * K].view(padded, K)
    chunk = tiles.chunk * config.block_m
    team.copy_engine.fork()
    _push(team, shard, gathered, [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)], space)
    descriptors = can_describe(shard, gathered, b)
    parts, programs = persistent.parts_for(team, config, shard.dtype), persistent.programs(team, tiles, config)
    options = persistent.constants(config, descriptors, team.caps.arch)
    del options["PIECE"]
    all_gather_matmul_kernel[(programs,)](
        operand(shard, config.block_m, config.block_k, descriptors), row_stride(shard),
        operand(gathered, config.block_m, config.block_k, descriptors), padded,
        operand(b, config.block_n, config.block_k, descriptors), row_stride(b),
        out, space.flags, space.epoch, parts.scratch, parts.tickets, rows, N, K, as_argument(tiles),
        persistent.whole_for(tiles, programs, config, tiles.count // world), team.view,
        MAX_CHUNKS=MAX_CHUNKS, FLATTEN=config.flatten, OWN_FIRST=own_first, **options,
    )  # fmt: skip
    team.copy_engine.join()


def _run_segments(
    shard: torch.Tensor, b: torch.Tensor, out: torch.Tensor, team: Team, config: GemmConfig, own_first: bool
) -> None:
    """A library GEMM for the own shard, then one for each chunk of each peer's (or one for several peers') as it lands; they
    take turns on the lanes.

    signals  copy engine of rank s, behind each chunk: flags[place of s, c] = epoch, with own_first flags[W + place of s, c]: in
             either order a row has one writer, so its epochs grow, whichever order the calls before had
    waits    wait_kernel, in the chunk's lane: the same flag >= epoch. It holds a warp of one SM, no more; GEMMs end
             whatever the peers do, and so begin_kernel runs at last even where GEMMs got all SMs first
    reuse    of a half of A_full: Segments

    copy  | s1 | s2 | s3 |                          what arrives
    lane 0  | s0 | s2 |                                                 rank 0 of 4: shards
    lane 1        | s1 | s3 |
    """
    world, me, (rows, K) = team.size, team.rank, shard.shape
    space, lanes = _workspace(team, shard.dtype, world * rows * K), side_streams(team, config.lanes)
    pieces = list(pieces_of(rows, config.chunks))
    lanes.fork()
    with lanes.urgent():
        gathered = space.begin(team)[: world * rows * K].view(world * rows, K)
        begun = lanes.mark()
        team.copy_engine.fork()
    _push(team, shard, gathered, [piece for _, piece in pieces], space, own_first)
    if config.begin_first:
        lanes.after(begun)
    own, flags = place_of.fn(me, me, world, own_first), space.flags[world:] if own_first else space.flags
    cublas.matmul(shard, b, out[own * rows : (own + 1) * rows])
    turn = 1
    for places in runs_of((own + 1) % world, world, config.span):
        for number, piece in pieces:
            first, last = places.start * rows + piece.start, (places.stop - 1) * rows + piece.stop
            with lanes.turn(turn):
                lanes.after(begun)
                await_flags(flags[places.start : places.stop, number:], space.epoch, team)
                cublas.matmul(gathered[first:last], b, out[first:last])
            turn += 1
    lanes.join()
    team.copy_engine.join()


def _push(
    team: Team, shard: torch.Tensor, gathered: torch.Tensor, chunks: list[slice], space: Segments, own_first: bool = False
) -> None:  # fmt: skip
    """Have the copy engine write ``shard`` into every peer's ``gathered``, one peer after the other.

    Rank r serves r - 1, r - 2, … : who needs this shard next comes first, and every link carries one shard at a time.
    """
    # Detached: copies are made outside the op, where autograd would follow a shard that wants a gradient.
    shard, shards = shard.detach(), gathered.view(team.size, -1, gathered.shape[1])
    for step in range(1, team.size):
        peer = (team.rank - step) % team.size
        place = place_of.fn(team.rank, peer, team.size, own_first)
        for number, chunk in enumerate(chunks):
            row = team.size + place if own_first else place
            space.send(team, shards[place][chunk], shard[chunk], row, number, peer)


def _workspace(team: Team, dtype: torch.dtype, size: int) -> Segments:
    def make(capacity: int) -> Segments:
        # Zeros: the rows that pad a shard to whole tiles are read, though nothing comes of them.
        # Flags of both orders of rows: _run_segments.
        return Segments.make(team, team.zeros((2, capacity), dtype=dtype), 2 * team.size)

    return grown_workspace(team, ("all_gather_matmul", dtype), size, make)


@custom_op("all_gather_matmul")
def _all_gather_matmul(a_shard: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False) -> torch.Tensor:
    return run(a_shard, b, find_team(team), own_first=own_first)


@_all_gather_matmul.register_fake
def _(a_shard: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False) -> torch.Tensor:
    return a_shard.new_empty((a_shard.shape[0] * find_team(team).size, b.shape[0]))


def _remember(ctx, inputs, output):
    a_shard, b, ctx.team, ctx.own_first = inputs
    ctx.save_for_backward(a_shard, b)


def _backward(ctx, grad):
    # Every rank used my shard with its own b: the sum over the ranks, scattered by rows.
    a_shard, b = ctx.saved_tensors
    a = torch.ops.weft.all_gather.default(a_shard, ctx.team)
    if ctx.own_first:
        a = a.roll(-find_team(ctx.team).rank * a_shard.shape[0], 0)
    return (
        torch.ops.weft.matmul_reduce_scatter.default(grad, b.t(), ctx.team, ctx.own_first),
        torch.ops.weft.matmul.default(grad.t(), a.t()),
        None,
        None,
    )


_all_gather_matmul.register_autograd(_backward, setup_context=_remember)

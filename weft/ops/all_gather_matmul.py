"""all_gather_matmul: every rank's rows of A meet this rank's B. Copy engines carry the rows while the GEMM runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops import gemm
from weft.ops.gemm import MAX_CHUNKS, GemmConfig, gemm_tile, join_parts, leave_part, store_tile
from weft.ops.matmul import run as run_matmul
from weft.ops.segments import begin_kernel, library_matmul, wait_kernel
from weft.ops.tiles import at_place, first_tile, locate, make_tiles, wholes_of, work_at, work_steps
from weft.runtime.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit(do_not_specialize=["rows", "tiles", "whole"])
def all_gather_matmul_kernel(
    shard, shard_stride, gathered, gathered_rows, b, b_stride, out, landed, epoch,
    scratch, tickets, rows, N, K, tiles, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, FLATTEN: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """out[W * rows, N] = all_gather(shard[rows, K]) @ b[N, K].T        grid: (programs,), own shard first

    gathered  [gathered_rows, K]  symmetric, a half of A_full: shard s from row s * gathered_rows / W on, in whole tiles
    landed    [W, MAX_CHUNKS]     symmetric: landed[s, c] = epoch, once chunk c of shard s is here
    epoch     [1]                 this rank's, set by begin_kernel
    scratch, tickets              of split tiles (join_parts), none of them own ones

    signals  copy engine of rank s, behind each chunk: landed[s, c] = epoch
    waits    before the first tile of a chunk: landed[s, c] >= epoch; the own shard is read where it is
    reuse    a half of A_full is written again only after every rank has ended the call that read it (begin_kernel).
             Halves alternate from call to call, so that wait is over before it begins; in a CUDA graph with an odd
             number of calls, whose replays use the same half twice running, it is for the peer to end its last call.
    progress  programs wait for copy engines only, so they need not all be resident

    copy  | s1 | s2 | s3 |                          what arrives
    gemm  | s0 | s1 | s2 | s3 |                                         rank 0 of 4: shards
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    now = tl.load(epoch)
    start = first_tile(me, tiles, world)
    programs = tl.num_programs(0)
    own = tiles.count // world
    # Loops, and not a choice in one: Triton gives the operands of two GEMMs shared memory each unless one loop follows
    # the other.
    depth = tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0)
    for place in tl.range(program, own, programs, flatten=FLATTEN):
        panel, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(
            shard, shard_stride, rows, b, b_stride, N, row, column, K, 0, depth, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        store_tile(out, acc, row, column, me * rows, rows, N, BLOCK_M, BLOCK_N)
    of_chunk = tiles.chunk * tiles.columns
    chunks = tl.cdiv(tiles.rows, tiles.chunk)
    for part in range(0, (world - 1) * chunks):
        shard_begin = (part // chunks + 1) * own
        begin = shard_begin + part % chunks * of_chunk
        end = tl.minimum(tl.minimum(begin + of_chunk, shard_begin + own), whole)
        # The first of this program's places in the chunk.
        first_place = begin + (program + programs - begin % programs) % programs
        owner = (me + 1 + part // chunks) % world
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
            store_tile(out, acc, row, column, owner * rows, rows, N, BLOCK_M, BLOCK_N)
    for step in range(wholes_of(whole), work_steps(tiles, whole, depth)):
        place, first, last = work_at(step, tiles, whole, depth)
        owner, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        wl.wait(landed + owner * MAX_CHUNKS + chunk, now, team)
        row_there = owner * (gathered_rows // world) + row
        acc = gemm_tile(
            gathered, K, gathered_rows, b, b_stride, N, row_there, column, K, first, last, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        if last - first == depth:
            store_tile(out, acc, row, column, owner * rows, rows, N, BLOCK_M, BLOCK_N)
        elif leave_part(acc, scratch, tickets, place, tiles, whole, depth, BLOCK_M, BLOCK_N):
            for at in range(0, BLOCK_M, ROWS):
                x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                store_tile(out, x, row + at, column, owner * rows, rows, N, ROWS, BLOCK_N)


@dataclass(slots=True, kw_only=True)
class Workspace:
    halves: torch.Tensor
    landed: torch.Tensor
    entered: torch.Tensor
    filled: torch.Tensor
    epoch: torch.Tensor
    calls: int = 0
    """Made by the host. All ranks make the same ones, so they agree on the half; that it is free, the device proves."""


def all_gather_matmul(a_shard: torch.Tensor, b: torch.Tensor, team: Team) -> torch.Tensor:
    """all_gather(a_shard[M/W, K]) @ b[N, K].T -> [M, N], fp32 accumulation, in the dtype of both (fp16, bf16, fp32).

    Every rank has its own b (its share of N); M, N and K are the same on all ranks. Collective: all ranks call it, in
    the same order, on one stream. ValueError for shapes, dtypes or devices that do not fit; HeapExhausted.
    """
    gemm.check_operands("all_gather_matmul", a_shard, b, team.device, "a_shard")
    return torch.ops.weft.all_gather_matmul(a_shard, b, team.name)


def run(a_shard: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig | None = None) -> torch.Tensor:
    """``all_gather_matmul`` of checked arguments, with a chosen config, the same on all ranks."""
    if team.size == 1:
        return run_matmul(a_shard, b, config)
    shard, b = a_shard.contiguous(), gemm.rows_contiguous(b)
    world, (rows, K), N = team.size, shard.shape, b.shape[0]
    config = config or gemm.configured("all_gather_matmul", world * rows, N, K, shard.dtype, world, team.caps)
    tiles = make_tiles(
        rows, N, panels=world, block_m=config.block_m, block_n=config.block_n, group=config.group, chunks=config.chunks
    )
    gemm.check_design("all_gather_matmul", config, "fused", "segments", "library")
    if config.design == "library":
        out = torch.empty((world * rows, N), dtype=shard.dtype, device=shard.device)
        library_matmul(torch.ops.weft.all_gather(shard, team.name), b, out)
        return out
    segments = config.design == "segments"
    padded = world * (rows if segments else tiles.rows * config.block_m)
    space = _workspace(team, shard.dtype, padded * K)
    half = space.calls % 2
    space.calls += 1
    gathered = space.halves[half, : padded * K].view(padded, K)
    begin_kernel[(1,)](space.epoch, space.filled[half], space.entered, team.view, num_warps=1)
    _push(team, shard, gathered, rows if segments else tiles.chunk * config.block_m, space)
    out = torch.empty((world * rows, N), dtype=shard.dtype, device=shard.device)
    if segments:
        _multiply_segments(team, shard, gathered, b, out, space)
        return out
    descriptors = gemm.can_describe(shard, gathered, b)
    parts, programs = gemm.parts_for(team, config, shard.dtype), gemm.programs(team, tiles, config)
    options = gemm.constants(config, descriptors)
    del options["PIECE"]
    all_gather_matmul_kernel[(programs,)](
        gemm.operand(shard, config.block_m, config.block_k, descriptors), gemm.row_stride(shard),
        gemm.operand(gathered, config.block_m, config.block_k, descriptors), padded,
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, space.landed, space.epoch, parts.scratch, parts.tickets, rows, N, K, tiles,
        gemm.whole_for(tiles, programs, config, tiles.count // world), team.view,
        MAX_CHUNKS=MAX_CHUNKS, FLATTEN=config.flatten, **options,
    )  # fmt: skip
    team.copy_engine.join()
    return out


def _push(team: Team, shard: torch.Tensor, gathered: torch.Tensor, chunk_rows: int, space: Workspace) -> None:
    """Have the copy engine write ``shard`` into every peer's ``gathered``, one peer after the other.

    Rank r serves r - 1, r - 2, … : who needs this shard next comes first, and every link carries one shard at a time.
    """
    # Detached: copies are made outside the op, where autograd would follow a shard that wants a gradient.
    engine, shard, rows = team.copy_engine, shard.detach(), shard.shape[0]
    mine = team.rank * (gathered.shape[0] // team.size)
    engine.fork()
    for step in range(1, team.size):
        peer = (team.rank - step) % team.size
        for chunk, first in enumerate(range(0, rows, chunk_rows)):
            last = min(first + chunk_rows, rows)
            engine.put(gathered[mine + first : mine + last], shard[first:last], peer)
            engine.signal(space.landed[team.rank, chunk : chunk + 1], space.epoch, peer)


def _multiply_segments(
    team: Team, shard: torch.Tensor, gathered: torch.Tensor, b: torch.Tensor, out: torch.Tensor, space: Workspace
) -> None:
    """A library GEMM for each shard, the own one first; a peer's waits for landed[s, 0] = epoch before it begins.

    copy  | s1 | s2 | s3 |                          what arrives
    gemm  | s0 | s1 | s2 | s3 |                                         rank 0 of 4: shards

    Reuse as in all_gather_matmul_kernel.
    """
    landed, into = gathered.view(team.size, *shard.shape), out.view(team.size, shard.shape[0], -1)
    library_matmul(shard, b, into[team.rank])
    for step in range(1, team.size):
        owner = (team.rank + step) % team.size
        wait_kernel[(1,)](space.landed[owner], space.epoch, team.view, num_warps=1)
        library_matmul(landed[owner], b, into[owner])
    team.copy_engine.join()


def _workspace(team: Team, dtype: torch.dtype, size: int) -> Workspace:
    def make(capacity: int) -> Workspace:
        return Workspace(
            # Zeros: the rows that pad a shard to whole tiles are read, though nothing comes of them.
            halves=team.zeros((2, capacity), dtype=dtype),
            landed=team.signals((team.size, MAX_CHUNKS)),
            entered=team.signals((team.size,)),
            # A row each, so that the word of either half is aligned alike.
            filled=team.local((2, 4), torch.int32),
            epoch=team.local((1,), torch.int32),
        )

    return gemm.grown_workspace(team, ("all_gather_matmul", dtype), size, make)


@torch.library.custom_op("weft::all_gather_matmul", mutates_args=())
def _all_gather_matmul(a_shard: torch.Tensor, b: torch.Tensor, team: str) -> torch.Tensor:
    return run(a_shard, b, find_team(team))


@_all_gather_matmul.register_fake
def _(a_shard: torch.Tensor, b: torch.Tensor, team: str) -> torch.Tensor:
    return a_shard.new_empty((a_shard.shape[0] * find_team(team).size, b.shape[0]))


def _remember(ctx, inputs, output):
    a_shard, b, ctx.team = inputs
    ctx.save_for_backward(a_shard, b)


def _backward(ctx, grad):
    # Every rank used my shard with its own b: the sum over the ranks, scattered by rows.
    a_shard, b = ctx.saved_tensors
    a = torch.ops.weft.all_gather(a_shard, ctx.team)
    return torch.ops.weft.matmul_reduce_scatter(grad, b.t(), ctx.team), torch.ops.weft.matmul(grad.t(), a.t()), None


_all_gather_matmul.register_autograd(_backward, setup_context=_remember)

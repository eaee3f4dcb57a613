"""Fused design of all_gather_matmul, and the push of shards by copy engines, for all its designs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.gemm_tile import Operand, Outgoing, gemm_tile, join_partials, leave_partial, store_tile
from weft.kernels.operands import can_describe, descriptor_or_self, rows_contiguous
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
from weft.ops.gemm import persistent
from weft.ops.gemm.tile import Tile
from weft.ops.knobs import around, check_knobs, flipped, halved, knob
from weft.ops.overlap.pipelined import CHUNKS
from weft.runtime.arithmetic import cdiv
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """One kernel that waits for each chunk of the peers' rows before its first tile of it.

    split    tiles that do not fill a round of programs are split along K
    chunks   signals per shard, at most MAX_CHUNKS
    flatten  issue a tile's first loads during the epilogue of the previous tile
    """

    tile: Tile = knob(near=around)
    split: bool = knob(True, near=flipped)
    chunks: int = knob(1, CHUNKS, halved())
    flatten: bool = knob(False, near=flipped)
    __post_init__ = check_knobs


@triton.jit(do_not_specialize=["rows"])
def all_gather_matmul_kernel(
    shard,
    gathered,
    b,
    out,
    landed,
    split,
    rows,
    sizes,
    tiles,
    block,
    team,
    FLATTEN: tl.constexpr,
    LOCAL_FIRST: tl.constexpr,
):
    """out[W * rows, N] = all_gather(shard[rows, K]) @ b[N, K].T        grid: (programs,), own shard first

    LOCAL_FIRST: ``out`` has the rows of ranks me, me + 1, … (mod W) in this order, else in rank order.

    gathered  [W * panel, K]  symmetric, a half of A_full: shard s from row s * panel on; a panel is whole tiles
    landed    channel: signals the arrival of chunk c of rank s; begin_kernel has begun the call
    split     ``SplitK``; no tile of the own shard is split
    sizes     ``Sizes``, where A is the shard; tiles: ``Tiles`` as an argument; block: ``Block``

    signals   copy engine of rank s, after each chunk c of its shard
    waits     before the first tile of a chunk: chunk c of rank s; the own shard is read in place
    reuse     of a half of A_full: CopyChannel
    progress  programs wait for copy engines only, so they need not all be resident

    copy  | s1 | s2 | s3 |                          chunks that arrive
    gemm  | s0 | s1 | s2 | s3 |                                         rank 0 of 4: shards
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    tiles = from_argument(tiles)
    call = wl.current_call(landed)
    start = first_tile(me, tiles, world)
    programs = tl.num_programs(0)
    own = tiles.count // world
    panel_rows = tiles.rows * block.m
    b = Operand(b, sizes.b_stride, sizes.N)
    shard, gathered = Operand(shard, sizes.a_stride, rows), Operand(gathered, sizes.K, world * panel_rows)
    nothing = Outgoing(out, out, 0)
    # Separate loops in place of a branch in one: Triton allocates shared memory for the operands of both GEMMs unless one
    # loop follows the other.
    depth = tl.cdiv(sizes.K, block.k)
    program = tl.program_id(0)
    first_row = place_of(me, me, world, LOCAL_FIRST) * rows
    for place in tl.range(program, own, programs, flatten=FLATTEN):
        began = wl.begin_tile(team)
        panel, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
        row, column = tile_row * block.m, tile_column * block.n
        acc = gemm_tile(shard, b, row, column, sizes.K, 0, depth, nothing, block, False)
        store_tile(out, acc, row, column, first_row, rows, sizes.N)
        wl.end_tile(began, me * tiles.rows + tile_row, tile_column, team)
    of_chunk = tiles.chunk * tiles.columns
    chunks = tl.cdiv(tiles.rows, tiles.chunk)
    for part in range(0, (world - 1) * chunks):
        shard_begin = (part // chunks + 1) * own
        begin = shard_begin + part % chunks * of_chunk
        end = tl.minimum(tl.minimum(begin + of_chunk, shard_begin + own), tiles.whole)
        # The first of this program's places in the chunk.
        first_place = begin + (program + programs - begin % programs) % programs
        owner = (me + 1 + part // chunks) % world
        first_row = place_of(owner, me, world, LOCAL_FIRST) * rows
        if first_place < end:
            wl.chunk_wait(call, owner, part % chunks, team)
        for place in tl.range(first_place, end, programs, flatten=FLATTEN):
            began = wl.begin_tile(team)
            panel, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
            row, column = tile_row * block.m, tile_column * block.n
            acc = gemm_tile(gathered, b, owner * panel_rows + row, column, sizes.K, 0, depth, nothing, block, False)
            store_tile(out, acc, row, column, first_row, rows, sizes.N)
            wl.end_tile(began, owner * tiles.rows + tile_row, tile_column, team)
    for step in range(wholes_of(tiles.whole), work_steps(tiles, depth)):
        place, first, last = work_at(step, tiles, depth)
        owner, chunk, tile_row, tile_column = locate(at_place(place, start, tiles), tiles)
        row, column = tile_row * block.m, tile_column * block.n
        wl.chunk_wait(call, owner, chunk, team)
        began = wl.begin_tile(team)
        first_row = place_of(owner, me, world, LOCAL_FIRST) * rows
        acc = gemm_tile(gathered, b, owner * panel_rows + row, column, sizes.K, first, last, nothing, block, False)
        if last - first == depth:
            store_tile(out, acc, row, column, first_row, rows, sizes.N)
        elif leave_partial(acc, split, place, tiles, depth, block):
            for at in range(0, block.m, block.join_rows):
                x = join_partials(split, place, at, tiles, depth, block)
                store_tile(out, x, row + at, column, first_row, rows, sizes.N)
        wl.end_tile(began, owner * tiles.rows + tile_row, tile_column, team)


def run_fused(
    design: Fused,
    team: Team,
    shard: torch.Tensor,
    bs: Sequence[torch.Tensor],
    outs: list[torch.Tensor],
    local_first: bool,
) -> torch.Tensor:
    """Run the fused kernel. Returns the panels of gathered rows in rank order; this rank's is not written."""
    world, (rows, K), tile = team.size, shard.shape, design.tile
    panel_rows = cdiv(rows, tile.block_m) * tile.block_m
    channel = gather_channel(team, shard.dtype, world * panel_rows * K)
    gathered = channel.begin(team)[: world * panel_rows * K].view(world * panel_rows, K)
    chunk = cdiv(panel_rows // tile.block_m, design.chunks) * tile.block_m
    team.copy_engine.fork()
    push_shard(
        team, shard, gathered, [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)], channel
    )
    scratch = persistent.scratch_for(team, tile, shard.dtype)
    for b, out in zip(bs, outs, strict=True):
        b = rows_contiguous(b)
        N = b.shape[0]
        tiles = make_tiles(
            rows, N, panels=world, block_m=tile.block_m, block_n=tile.block_n, group=tile.group, chunks=design.chunks
        )
        programs = persistent.programs_for(team, tiles, tile, design.split)
        tiles = persistent.with_split(tiles, programs, design.split, tiles.count // world)
        descriptors = can_describe(shard, gathered, b)
        key = design, descriptors, local_first
        launch = launch_of(
            team, all_gather_matmul_kernel, key, lambda d=descriptors: _constants(design, team, d, local_first)
        )
        launch(
            programs,
            descriptor_or_self(shard, tile.block_m, tile.block_k, descriptors),
            descriptor_or_self(gathered, tile.block_m, tile.block_k, descriptors),
            descriptor_or_self(b, tile.block_n, tile.block_k, descriptors),
            out,
            channel.landed.view,
            scratch.split,
            rows,
            persistent.sizes_of(shard, b),
            as_argument(tiles),
            tile.block(descriptors),
            team.view,
        )
    team.copy_engine.join()
    return gathered


def _constants(design: Fused, team: Team, descriptors: bool, local_first: bool) -> dict[str, Any]:
    constants = {"FLATTEN": design.flatten, "LOCAL_FIRST": local_first}
    return constants | design.tile.options(descriptors, team.caps.arch)


def push_shard(
    team: Team,
    shard: torch.Tensor,
    gathered: torch.Tensor,
    chunks: list[slice],
    channel: CopyChannel,
    local_first: bool = False,
) -> None:
    """Have the copy engine write ``shard`` into every peer's ``gathered``, one peer after the other.

    Rank r serves r - 1, r - 2, … : the peer that needs this shard next is first, and every link carries one shard at a time.
    """
    if shard.requires_grad:
        shard = shard.detach()  # copies are made outside the op, where autograd would follow it
    panel = gathered.shape[0] // team.size
    for step in range(1, team.size):
        peer = (team.rank - step) % team.size
        place = place_of.fn(team.rank, peer, team.size, local_first)
        row = team.size + place if local_first else place
        for number, chunk in enumerate(chunks):
            target = gathered[place * panel + chunk.start : place * panel + chunk.stop]
            channel.send(team, target, shard if len(chunks) == 1 else shard[chunk], row, number, peer)


def gather_channel(team: Team, dtype: torch.dtype, size: int) -> CopyChannel:
    def make(capacity: int) -> CopyChannel:
        # Zeros: rows that pad a shard to whole tiles are read, though no result depends on them.
        # A row of flags per rank for each order of rows (_run_pipelined).
        return CopyChannel.make(team, team.zeros((2, capacity), dtype=dtype), 2 * team.size)

    return grown_workspace(team, ("all_gather_matmul", dtype), size, make)

"""matmul_all_reduce for few rows: every rank's partial tiles go out as data that are their own flag, one kernel in all.

At this size the time is that of reading the weights, and then that of crossing the link: once to all ranks where the
tiles are small (one-shot), twice with a quarter of the bytes at W=4 where they are not (two-shot).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops import gemm
from weft.ops.exchange import UNWRITTEN
from weft.ops.gemm import GemmConfig, gemm_tile, join_parts, leave_part, packed
from weft.ops.tiles import locate, make_tiles, work_at, work_steps

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Bytes of the result up to which one-shot crosses the link sooner than two-shot. All-reduce on H200, W=4, one-shot /
# two-shot in microseconds: 256 KiB 5.9 / 6.3, 1 MiB 13.0 / 9.2.
ONE_SHOT_BYTES = 256 << 10


@triton.jit(do_not_specialize=["M", "tiles", "whole"])
def lamport_matmul_kernel(
    a, a_stride, b, b_stride, out, partials, totals, epoch, size, scratch, tickets, M, N, K, tiles, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, TWO_SHOT: tl.constexpr,
):  # fmt: skip
    """out[M, N] = sum over ranks of a[M, K] @ b[N, K].T        grid: (programs,)

    partials  [2, W, size]  symmetric, unwritten: partials[., s] are tiles that rank s computed, rounded to out's dtype
    totals    [2, size]     symmetric, unwritten: summed tiles (two-shot)
    epoch     [2]           this rank's
    scratch, tickets        of streamed tiles (join_parts)

    one-shot  every rank sends its tiles to all and sums all W partials of all tiles
    two-shot  rows SHARE * r .. of a tile go to rank r, who sums them and sends the total to all
    signals   none: a word that is not -0.0 has arrived (weft.language.lamport)
    order     the partials of ranks 0, 1, … , own ones rounded like the others, summed in fp32, rounded once: the same
              every run and bitwise the same on all ranks
    reuse     who has read a word makes it unwritten at once. A rank writes the same half again two calls later; it has
              then all results of the call between, which need what every rank sent after it had ended the call before.
    progress  a program sends all its tiles before it waits for any

    gemm  | tiles |
    link       | parts to owners |       | totals to all |
    sum                          | own rows |
    store                                            | all |
    """
    world: tl.constexpr = wl.num_ranks(team)
    dtype: tl.constexpr = out.dtype.element_ty
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    partials += (now & 1).to(tl.int64) * world * size
    totals += (now & 1).to(tl.int64) * size
    depth = tl.cdiv(K, BLOCK_K)
    for step in range(0, work_steps(tiles, whole, depth)):
        place, first, last = work_at(step, tiles, whole, depth)
        panel, chunk, tile_row, tile_column = locate(place, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(
            a, a_stride, M, b, b_stride, N, row, column, K, first, last, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        there = partials + me * size + place.to(tl.int64) * TILE
        if last - first == depth:
            send(acc.to(dtype), there, 0, M - row, team, SHARE, TWO_SHOT)
        elif leave_part(acc, scratch, tickets, place, tiles, whole, depth, BLOCK_M, BLOCK_N):
            for at in range(0, BLOCK_M, ROWS):
                x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                send(x.to(dtype), there, at, M - row, team, SHARE, TWO_SHOT)
    # Blocks of BLOCK whole rows: of a tile (one-shot), of this rank's rows of a tile (two-shot).
    height: tl.constexpr = SHARE if TWO_SHOT else BLOCK_M
    blocks: tl.constexpr = (height + BLOCK - 1) // BLOCK
    for unit in range(tl.program_id(0), tiles.count * blocks, tl.num_programs(0)):
        number = unit // blocks
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        begin = me * SHARE if TWO_SHOT else 0
        m = begin + unit % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = (m < tl.minimum(begin + height, BLOCK_M)) & (tile_row * BLOCK_M + m < M)
        mask = inside[:, None] & (tl.arange(0, BLOCK_N) >= 0)[None, :]
        offsets = number.to(tl.int64) * TILE + (m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :])
        x = tl.zeros((BLOCK, BLOCK_N), tl.float32)
        for source in tl.static_range(world):
            x += wl.lamport_load(partials + source * size + offsets, mask, team).to(tl.float32)
        for source in tl.static_range(world):
            wl.lamport_clear(partials + source * size + offsets, mask)
        total = x.to(dtype)
        if TWO_SHOT:
            for peer in tl.static_range(1, world):
                wl.lamport_store(wl.symm_at(totals, (me + peer) % world, team) + offsets, total, mask)
        store_rows(out, total, tile_row * BLOCK_M + m, tile_column * BLOCK_N, N, mask, BLOCK_N)
    if TWO_SHOT:
        shares: tl.constexpr = (world - 1) * blocks
        for unit in range(tl.program_id(0), tiles.count * shares, tl.num_programs(0)):
            number = unit // shares
            panel, chunk, tile_row, tile_column = locate(number, tiles)
            begin = (me + 1 + unit % shares // blocks) % world * SHARE
            m = begin + unit % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = (m < tl.minimum(begin + SHARE, BLOCK_M)) & (tile_row * BLOCK_M + m < M)
            mask = inside[:, None] & (tl.arange(0, BLOCK_N) >= 0)[None, :]
            offsets = number.to(tl.int64) * TILE + (m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :])
            total = wl.lamport_load(totals + offsets, mask, team)
            wl.lamport_clear(totals + offsets, mask)
            store_rows(out, total, tile_row * BLOCK_M + m, tile_column * BLOCK_N, N, mask, BLOCK_N)
    wl.advance_epoch(epoch, now)


@triton.jit
def send(x, there, at, height, team, SHARE: tl.constexpr, TWO_SHOT: tl.constexpr):
    """Rows ``at`` .. of a tile, ``x``, below ``height``: to every rank (myself too), or each to the rank that sums it."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCK_N: tl.constexpr = x.shape[1]
    world: tl.constexpr = wl.num_ranks(team)
    m = at + tl.arange(0, ROWS)
    mask = (m < height)[:, None] & (tl.arange(0, BLOCK_N) >= 0)[None, :]
    offsets = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if TWO_SHOT:
        row = wl.symm_at(there, m // SHARE, team)
        wl.lamport_store(row[:, None] + offsets, x, mask)
    else:
        for step in tl.static_range(world):
            wl.lamport_store(wl.symm_at(there, (wl.rank(team) + 1 + step) % world, team) + offsets, x, mask)


@triton.jit
def store_rows(out, x, m, column, N, mask, BLOCK_N: tl.constexpr):
    """out[m, column :] = x, where ``mask`` and within N columns."""
    n = column + tl.arange(0, BLOCK_N)
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], x, mask=mask & (n < N)[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    partials: torch.Tensor
    totals: torch.Tensor
    epoch: torch.Tensor


def run(a: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig) -> torch.Tensor:
    """``matmul_all_reduce`` of checked arguments with dense rows, at two ranks or more."""
    (M, K), N, world = a.shape, b.shape[0], team.size
    tiles = make_tiles(M, N, panels=1, block_m=config.block_m, block_n=config.block_n, group=config.group)
    space = _workspace(team, a.dtype, tiles.count * config.block_m * config.block_n)
    parts, programs = gemm.parts_for(team, config, a.dtype), gemm.programs(team, tiles, config)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    descriptors = gemm.can_describe(a, b)
    options = gemm.constants(config, descriptors)
    del options["PIECE"]
    two_shot = world > 2 and M * N * a.itemsize > ONE_SHOT_BYTES
    share = triton.cdiv(min(config.block_m, M), world)
    height = share if two_shot else config.block_m
    # As many rows a block as give every program one, at most 2048 elements.
    most = max(1, 2048 // config.block_n)
    block = min(most, triton.next_power_of_2(triton.cdiv(tiles.count * height, programs)))
    lamport_matmul_kernel[(programs,)](
        gemm.operand(a, config.block_m, config.block_k, descriptors), gemm.row_stride(a),
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, space.partials, space.totals, space.epoch, space.totals.shape[1], parts.scratch, parts.tickets,
        M, N, K, tiles, gemm.whole_for(tiles, programs, config), team.view,
        SHARE=share, BLOCK=block, TWO_SHOT=two_shot, launch_cooperative_grid=True, **options,
    )  # fmt: skip
    return out


def _workspace(team: Team, dtype: torch.dtype, size: int) -> Workspace:
    word, bits = UNWRITTEN[dtype.itemsize]

    def make(capacity: int) -> Workspace:
        partials, totals = team.empty((2, team.size, capacity), dtype=dtype), team.empty((2, capacity), dtype=dtype)
        for buffer in (partials, totals):
            buffer.view(word).fill_(bits)
        team.barrier()  # nobody writes into a peer's buffer before the peer has cleared it
        return Workspace(partials=partials, totals=totals, epoch=team.local((2,), torch.int32))

    return gemm.grown_workspace(team, ("lamport_matmul", dtype), size, make)

"""The second design of all_gather_matmul and matmul_reduce_scatter: library GEMMs, a segment for each rank's rows.

Copy engines carry whole segments between them, so no SM spends time on communication and every GEMM runs at the library's
speed. It needs large segments: each costs a launch, a copy's start (2 µs) and a flag (2.3 µs on H200), and its GEMM fills
the GPU by itself. Kernels here only wait, begin, and finish the last segment of a reduce-scatter.

Where there is no GPU library (the simulator) a segment's GEMM is host work of the rank's main stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops import gemm
from weft.ops.gemm import GemmConfig, gemm_tile, join_parts, leave_part, store_tile
from weft.ops.tiles import locate, make_tiles, work_at, work_steps

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit
def begin_kernel(epoch, filled, entered, team):
    """Starts the next epoch and returns once this half of every rank's buffer may be overwritten.        grid: (1,)

    epoch    [1]  this rank's: the number of the call that runs; the copy engine sends this word as its flag
    filled   [1]  this rank's, of this half: the last epoch that filled it
    entered  [W]  symmetric: entered[s] = e, once rank s has ended call e - 1

    signals  every peer: entered[me] = epoch
    waits    entered[s] > filled, for every peer s: it has ended the call that read this half last
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    now = tl.load(epoch) + 1
    last = tl.load(filled)
    for step in tl.static_range(1, world):
        wl.notify(entered + me, (me + step) % world, now, team)
    for step in tl.static_range(1, world):
        wl.wait(entered + (me + step) % world, last + 1, team)
    tl.store(filled, now)
    tl.store(epoch, now)


@triton.jit
def wait_kernel(signal, epoch, team):
    """Returns once ``signal`` has reached ``epoch``: what the copy engine sent before it is here.        grid: (1,)"""
    wl.wait(signal, tl.load(epoch), team)


@triton.jit(do_not_specialize=["rows", "tiles", "whole"])
def last_segment_kernel(
    a, a_stride, b, b_stride, out, slots, slot_size, arrived, epoch, scratch, tickets, rows, N, K, tiles, whole, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = a[rows, K] @ b[N, K].T + the sum of all slots' [rows, N]        grid: (programs,)

    slots    [W - 1, slot_size]  symmetric: slot d holds rows x N of rank me + 1 + d
    arrived  [W - 1]             symmetric: arrived[d] = epoch, once slot d is filled
    epoch    [1]                 this rank's, set by begin_kernel

    waits    every tile, after its GEMM: arrived[d] >= epoch
    progress programs wait for copy engines only, so they need not all be resident
    order    own partial (fp32) + slots 0, 1, … , summed in fp32: the same every run
    """
    now = tl.load(epoch)
    depth = tl.cdiv(K, BLOCK_K)
    for step in range(0, work_steps(tiles, whole, depth)):
        place, first, last = work_at(step, tiles, whole, depth)
        panel, chunk, tile_row, tile_column = locate(place, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(
            a, a_stride, rows, b, b_stride, N, row, column, K, first, last, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        if last - first == depth:
            await_slots(arrived, now, team)
            add_slots(acc, out, slots, slot_size, row, column, rows, N, team, BLOCK_M, BLOCK_N)
        elif leave_part(acc, scratch, tickets, place, tiles, whole, depth, BLOCK_M, BLOCK_N):
            await_slots(arrived, now, team)
            for at in range(0, BLOCK_M, ROWS):
                x = join_parts(scratch, place, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                add_slots(x, out, slots, slot_size, row + at, column, rows, N, team, ROWS, BLOCK_N)


@triton.jit
def await_slots(arrived, now, team):
    for slot in tl.range(0, wl.num_ranks(team) - 1):
        wl.wait(arrived + slot, now, team)


@triton.jit
def add_slots(x, out, slots, slot_size, row, column, rows, N, team, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[row :, column :] = x [ROWS, BLOCK_N] plus the same elements of slots 0, 1, …"""
    m, n = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    mask = (m < rows - row)[:, None] & (n < N - column)[None, :]
    slots += tl.cast(row, tl.int64) * N + column
    at = m[:, None] * N + n[None, :]
    for slot in tl.range(0, wl.num_ranks(team) - 1, num_stages=1):
        x += tl.load(slots + tl.cast(slot, tl.int64) * slot_size + at, mask=mask, other=0.0).to(tl.float32)
    store_tile(out, x, row, column, 0, rows, N, ROWS, BLOCK_N)


def finish_last_segment(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, arrived: torch.Tensor,
    epoch: torch.Tensor, team: Team, config: GemmConfig,
) -> None:  # fmt: skip
    """``out`` = a @ b.T plus what lies in ``slots`` [W - 1, at least out.numel()]."""
    (rows, K), N = a.shape, b.shape[0]
    tiles = make_tiles(rows, N, panels=1, block_m=config.block_m, block_n=config.block_n, group=config.group)
    parts, programs = gemm.parts_for(team, config, a.dtype), gemm.programs(team, tiles, config)
    descriptors = gemm.can_describe(a, b)
    options = gemm.constants(config, descriptors)
    del options["PIECE"]
    last_segment_kernel[(programs,)](
        gemm.operand(a, config.block_m, config.block_k, descriptors), gemm.row_stride(a),
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, slots, slots.shape[1], arrived, epoch, parts.scratch, parts.tickets, rows, N, K, tiles,
        gemm.whole_for(tiles, programs, config), team.view, **options,
    )  # fmt: skip


def library_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` = a[M, K] @ b[N, K].T, rounded once."""
    # Detached: this runs inside a custom op, where autograd would refuse out=.
    a, b = a.detach(), b.detach()
    if a.device.type == "cpu":
        out.copy_(a.float() @ b.float().T)
    else:
        torch.mm(a, b.T, out=out)

"""matmul_reduce_scatter: a GEMM over each rank's share of K, whose sum over the ranks stays scattered by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops import gemm
from weft.ops.gemm import GemmConfig, gemm_tile, packed, store_tile
from weft.ops.matmul import run as run_matmul
from weft.ops.tiles import at_place, first_tile, locate, make_tiles, slot_of
from weft.runtime.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit(do_not_specialize=["M", "rows", "tiles"])
def matmul_reduce_scatter_kernel(
    a, a_stride, b, b_stride, out, slots, arrived, epoch, slot_size, flags, M, rows, N, K, tiles, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = sum over ranks of a[M, K] @ b[N, K].T, rows me * rows ..      grid: (programs,), own rows last

    slots    [2, W - 1, slot_size]  symmetric: whole tiles; slot d holds what rank me + 1 + d computed of my rows
    arrived  [W - 1, flags]         symmetric: arrived[d, t] = epoch, once tile t of my rows lies in slot d
    epoch    [2]                    this rank's

    signals  every rank s, per tile of owner o: stores the tile at o, then arrived[slot of s, tile] = epoch at o
    waits    own tiles, after their GEMM: arrived[d, tile] >= epoch, d = 0 .. W - 2
    order    own partial (fp32) + those of ranks me + 1, me + 2, … (in out's dtype), summed in fp32: the same every run
    reuse    slots are double-buffered by epoch. A rank writes half h again two calls later. It has then left the call
             between, in which it waited for every rank, which sent after it had ended the call before, the reader of h.

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: panels of the owners
    link   | o1 | o2 | o3 |
    sum                    | +1 +2 +3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    half = slots + (now & 1).to(tl.int64) * (world - 1) * slot_size
    start = first_tile((me + 1) % world, tiles, world)
    for place in range(tl.program_id(0), tiles.count, tl.num_programs(0)):
        number = at_place(place, start, tiles)
        owner, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(
            a, a_stride, M, b, b_stride, N, owner * rows + row, column, K, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS
        )
        tile = number - first_tile(owner, tiles, world)
        in_slot = tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
        if owner == me:
            for slot in tl.range(0, world - 1, num_stages=1):
                wl.wait(arrived + slot * flags + tile, now, team)
                acc += tl.load(half + slot * slot_size + in_slot + packed(BLOCK_M, BLOCK_N)).to(tl.float32)
            store_tile(out, acc, row, column, 0, rows, N, BLOCK_M, BLOCK_N)
        else:
            slot = slot_of(me, owner, world)
            there = wl.symm_at(half + slot * slot_size + in_slot, owner, team)
            tl.store(there + packed(BLOCK_M, BLOCK_N), acc.to(out.dtype.element_ty))
            wl.notify(arrived + slot * flags + tile, owner, now, team)
    wl.advance_epoch(epoch, now)


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
    config = config or gemm.config_for(rows, N, a.dtype, team.caps, panels=world)
    tiles = make_tiles(rows, N, panels=world, block_m=config.block_m, block_n=config.block_n, group=config.group)
    space = _workspace(team, a.dtype, tiles.count // world * config.block_m * config.block_n)
    out = torch.empty((rows, N), dtype=a.dtype, device=a.device)
    descriptors = gemm.can_describe(a, b)
    matmul_reduce_scatter_kernel[(gemm.programs(team, tiles, config),)](
        gemm.operand(a, config.block_m, config.block_k, descriptors), gemm.row_stride(a),
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, space.slots, space.arrived, space.epoch, space.slots.shape[2], space.arrived.shape[1],
        M, rows, N, K, tiles, team.view,
        launch_cooperative_grid=True, **gemm.constants(config, descriptors),
    )  # fmt: skip
    return out


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

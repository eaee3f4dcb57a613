"""matmul_all_reduce: a GEMM over each rank's share of K, whose sum over the ranks every rank gets, bitwise the same."""

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
from weft.ops.tiles import at_place, first_tile, locate, make_tiles, owner_of, slot_of
from weft.runtime.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team import Team


@triton.jit(do_not_specialize=["M", "tiles"])
def matmul_all_reduce_kernel(
    a, a_stride, b, b_stride, out, slots, arrived, results, ready, epoch, slot_size, flags, M, N, K, tiles, team,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = sum over ranks of a[M, K] @ b[N, K].T        grid: (programs,), own tiles last

    The tiles, not the rows, are dealt out to owners, so that all ranks take part whatever M is.

    slots    [W - 1, slot_size]  symmetric: whole tiles; slot d holds what rank me + 1 + d computed of my tiles
    arrived  [W - 1, flags]      symmetric: arrived[d, t] = epoch, once my t-th tile lies in slot d
    results  [all tiles]         symmetric: the summed tiles that peers own
    ready    [all tiles]         symmetric: ready[number] = epoch, once that tile lies in results
    epoch    [2]                 this rank's

    signals  every rank s, per tile of owner o: stores the tile at o, then arrived[slot of s, t] = epoch at o
             owner, per own tile: stores the sum at every peer, then ready[number] = epoch there
    waits    own tiles, after their GEMM: arrived[d, t] >= epoch, d = 0 .. W - 2
             peers' tiles, after all own ones: ready[number] >= epoch, then the copy into out
    order    own partial (fp32) + those of ranks me + 1, me + 2, … (in out's dtype), summed in fp32 and rounded once, by
             the owner: the same every run, and bitwise the same on all ranks
    reuse    slots: their owner reads a tile before it says ready, and nobody leaves a call before all tiles are ready.
             results: an owner writes a tile only after this rank's share of it in the same call, sent after this rank's
             last call ended. Both hold whatever the shapes of the two calls are, so one buffer each is enough.

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: tiles of the owners
    link   | o1 | o2 | o3 |     | own to all |
    sum                    | +1 +2 +3 |
    copy                               | o1 | o2 | o3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    start = first_tile((me + 1) % world, tiles, world)
    for place in range(tl.program_id(0), tiles.count, tl.num_programs(0)):
        number = at_place(place, start, tiles)
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(a, a_stride, M, b, b_stride, N, row, column, K, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS)
        owner = owner_of(number, tiles, world)
        tile = number - first_tile(owner, tiles, world)
        in_slot = tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
        if owner == me:
            for slot in tl.range(0, world - 1, num_stages=1):
                wl.wait(arrived + slot * flags + tile, now, team)
                acc += tl.load(slots + slot * slot_size + in_slot + packed(BLOCK_M, BLOCK_N)).to(tl.float32)
            total = acc.to(out.dtype.element_ty)
            here = results + number.to(tl.int64) * (BLOCK_M * BLOCK_N)
            for step in tl.static_range(1, world):
                tl.store(wl.symm_at(here, (me + step) % world, team) + packed(BLOCK_M, BLOCK_N), total)
            for step in tl.static_range(1, world):
                wl.notify(ready + number, (me + step) % world, now, team)
            store_tile(out, total, row, column, 0, M, N, BLOCK_M, BLOCK_N)
        else:
            slot = slot_of(me, owner, world)
            there = wl.symm_at(slots + slot * slot_size + in_slot, owner, team)
            tl.store(there + packed(BLOCK_M, BLOCK_N), acc.to(out.dtype.element_ty))
            wl.notify(arrived + slot * flags + tile, owner, now, team)
    # The order begins with all tiles of the peers.
    of_peers = tiles.count + first_tile(me, tiles, world) - first_tile(me + 1, tiles, world)
    for place in range(tl.program_id(0), of_peers, tl.num_programs(0)):
        number = at_place(place, start, tiles)
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        wl.wait(ready + number, now, team)
        total = tl.load(results + number.to(tl.int64) * (BLOCK_M * BLOCK_N) + packed(BLOCK_M, BLOCK_N))
        store_tile(out, total, tile_row * BLOCK_M, tile_column * BLOCK_N, 0, M, N, BLOCK_M, BLOCK_N)
    wl.advance_epoch(epoch, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    slots: torch.Tensor
    arrived: torch.Tensor
    results: torch.Tensor
    ready: torch.Tensor
    epoch: torch.Tensor


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, team: Team) -> torch.Tensor:
    """The sum over ranks of a[M, K] @ b[N, K].T -> [M, N], bitwise the same on all ranks.

    a and b hold this rank's share of K; M and N are the same on all ranks. Partial results travel in the dtype of a and
    b (fp16, bf16, fp32) and are summed in fp32, in an order that depends on the tile only. Collective: all ranks call
    it, in the same order, on one stream. ValueError for shapes, dtypes or devices that do not fit; HeapExhausted.
    """
    gemm.check_operands("matmul_all_reduce", a, b, team.device)
    return torch.ops.weft.matmul_all_reduce(a, b, team.name)


def run(a: torch.Tensor, b: torch.Tensor, team: Team, config: GemmConfig | None = None) -> torch.Tensor:
    """``matmul_all_reduce`` of checked arguments, with a chosen config, the same on all ranks."""
    if team.size == 1:
        return run_matmul(a, b, config)
    a, b = gemm.rows_contiguous(a), gemm.rows_contiguous(b)
    (M, K), N = a.shape, b.shape[0]
    config = config or gemm.config_for(M, N, a.dtype, team.caps)
    tiles = make_tiles(M, N, panels=1, block_m=config.block_m, block_n=config.block_n, group=config.group)
    space = _workspace(team, a.dtype, triton.cdiv(tiles.count, team.size) * config.block_m * config.block_n)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    descriptors = gemm.can_describe(a, b)
    matmul_all_reduce_kernel[(gemm.programs(team, tiles, config),)](
        gemm.operand(a, config.block_m, config.block_k, descriptors), gemm.row_stride(a),
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, space.slots, space.arrived, space.results, space.ready, space.epoch,
        space.slots.shape[1], space.arrived.shape[1], M, N, K, tiles, team.view,
        launch_cooperative_grid=True, **gemm.constants(config, descriptors),
    )  # fmt: skip
    return out


def _workspace(team: Team, dtype: torch.dtype, slot_size: int) -> Workspace:
    def make(capacity: int) -> Workspace:
        flags = capacity // gemm.SMALLEST_TILE
        return Workspace(
            slots=team.empty((team.size - 1, capacity), dtype=dtype),
            arrived=team.signals((team.size - 1, flags)),
            results=team.empty((team.size * capacity,), dtype=dtype),
            ready=team.signals((team.size * flags,)),
            epoch=team.local((2,), torch.int32),
        )

    return gemm.grown_workspace(team, ("matmul_all_reduce", dtype), slot_size, make)


@torch.library.custom_op("weft::matmul_all_reduce", mutates_args=())
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
    grad = torch.ops.weft.all_reduce(grad, ctx.team, "auto")
    return torch.ops.weft.matmul(grad, b.t()), torch.ops.weft.matmul(grad.t(), a.t()), None


_matmul_all_reduce.register_autograd(_backward, setup_context=_remember)

"""Ops written on weft.tiles, measured beside the designs that have kernels of their own.

Each is a tile body and the call that runs it; order, transport, signals and buffers are weft.tiles'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft import tiles
from weft.bench.harness.provider import Prepared, Provider
from weft.bench.ops.problem import OpProblem
from weft.kernels.gemm_tile import Block, Operand, Outgoing, gemm_tile, store_tile
from weft.kernels.operands import can_describe, descriptor_or_self, row_stride, rows_contiguous
from weft.ops.gemm.tile import Tile, default_tile

# --- GEMMs -----------------------------------------------------------------------------------------------------------


class GemmOperands(NamedTuple):
    """Operands of the bodies: ``a`` [rows, K] of a scatter, b [N, K], as tensor descriptors or pointers."""

    a: Any
    b: Any
    a_stride: int
    b_stride: int
    N: int
    K: int
    block: Block


@triton.jit
def gathered_tile(shard, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile of all_gather(a) @ b.T"""
    row = shard.first + tile.owner_row
    a, b = Operand(shard.data, o.K, row + tile.rows), Operand(o.b, o.b_stride, o.N)
    depth = tl.cdiv(o.K, o.block.k)
    acc = gemm_tile(a, b, row, tile.column * COLUMNS, o.K, 0, depth, Outgoing(out, out, 0), o.block, False)
    store_tile(out, acc, 0, tile.column * COLUMNS, tile.row, tile.rows, o.N)


@triton.jit
def partial_tile(tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile of a @ b.T over this rank's share of K"""
    a, b = Operand(o.a, o.a_stride, tile.row + tile.rows), Operand(o.b, o.b_stride, o.N)
    nothing = Outgoing(0, 0, 0)
    return gemm_tile(a, b, tile.row, tile.column * COLUMNS, o.K, 0, tl.cdiv(o.K, o.block.k), nothing, o.block, False)


def all_gather_matmul(a: torch.Tensor, b: torch.Tensor, team: Any, transport: str, tile: Tile) -> torch.Tensor:
    """all_gather(a[m, K]) @ b[N, K].T -> [W * m, N]."""
    (m, K), (b, described) = a.shape, _rows_of(b, a)
    plan = tiles.GatherPlan(
        rows=tile.block_m, columns=tile.block_n, transport=transport, step=tile.block_k if described else 0,
        group=tile.group, num_warps=_warps(tile, described, team), num_stages=tile.num_stages,
    )  # fmt: skip
    operand = descriptor_or_self(b, tile.block_n, tile.block_k, described)
    operands = GemmOperands(operand, operand, K, row_stride(b), len(b), K, tile.block(described))
    return tiles.gather(gathered_tile, a, a.new_empty((team.size * m, len(b))), operands, team, plan=plan)


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, team: Any, tile: Tile) -> torch.Tensor:
    """Rows of this rank of the sum of a[M, K] @ b[N, K].T over the ranks -> [M / W, N]."""
    a, (b, described) = rows_contiguous(a), _rows_of(b, a)
    plan = tiles.ExchangePlan(
        rows=tile.block_m, columns=tile.block_n, group=tile.group, num_warps=_warps(tile, described, team),
        num_stages=tile.num_stages,
    )  # fmt: skip
    operands = GemmOperands(
        descriptor_or_self(a, tile.block_m, tile.block_k, described),
        descriptor_or_self(b, tile.block_n, tile.block_k, described),
        row_stride(a), row_stride(b), len(b), a.shape[1], tile.block(described),
    )  # fmt: skip
    return tiles.scatter(partial_tile, a.new_empty((len(a) // team.size, len(b))), operands, team, plan=plan)


def _rows_of(b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``b`` with dense rows, and True if descriptors can read both operands."""
    b = rows_contiguous(b)
    return b, can_describe(a, b)


def _warps(tile: Tile, described: bool, team: Any) -> int:
    return tile.options(described, team.caps.arch)["num_warps"]


def _gemm(problem: OpProblem, call: Any, *rest: Any) -> Prepared:
    (m, n, _), team = problem.shape.size, problem.team
    tile = default_tile(m // team.size, n, problem.dtype, team.caps, team.size)
    return Prepared(run=lambda number: call(*problem.sets[number], team, *rest, tile))


def _provider(name: str, op: str, make: Any) -> Provider:
    return Provider(name=name, ops=(op,), role="other", make=make, on_request=True)


TILE_PROVIDERS = (
    _provider("tiles.copy", "ag-gemm", lambda problem: _gemm(problem, all_gather_matmul, "copy")),
    _provider("tiles.store", "ag-gemm", lambda problem: _gemm(problem, all_gather_matmul, "store")),
    _provider("tiles.store", "gemm-rs", lambda problem: _gemm(problem, matmul_reduce_scatter)),
)

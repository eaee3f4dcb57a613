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
from weft.kernels.merged_parts import EMPTY, fold, merged, no_parts
from weft.kernels.operands import can_describe, descriptor_or_self, row_stride, rows_contiguous
from weft.ops.attention.merge_attention import LOG2_E
from weft.ops.collectives.all_gather import all_gather
from weft.ops.gemm.tile import Tile, default_tile
from weft.ops.moe.exchange.exchange_op import padded
from weft.ops.moe.overlapped import case_experts
from weft.ops.moe.routing import Experts
from weft.runtime.team.team import Team

# --- GEMMs -----------------------------------------------------------------------------------------------------------


class GemmOperands(NamedTuple):
    """Sizes of a GEMM with b [N, K], and of a [rows, K] in a scatter."""

    a_stride: int
    b_stride: int
    N: int
    K: int
    block: Block


@triton.jit
def gathered_tile(shard, out, tile, o, matrices, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile of all_gather(a) @ b.T"""
    row = shard.first + tile.owner_row
    a, b = Operand(shard.data, o.K, row + tile.rows), Operand(matrices.first, o.b_stride, o.N)
    depth = tl.cdiv(o.K, o.block.k)
    acc = gemm_tile(a, b, row, tile.column * COLUMNS, o.K, 0, depth, Outgoing(out, out, 0), o.block, False)
    store_tile(out, acc, 0, tile.column * COLUMNS, tile.row, tile.rows, o.N)


@triton.jit
def partial_tile(tile, o, matrices, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile of a @ b.T over this rank's share of K"""
    a, b = Operand(matrices.second, o.a_stride, tile.row + tile.rows), Operand(matrices.first, o.b_stride, o.N)
    depth = tl.cdiv(o.K, o.block.k)
    first, last = tile.share * depth // tile.shares, (tile.share + 1) * depth // tile.shares
    return gemm_tile(a, b, tile.row, tile.column * COLUMNS, o.K, first, last, Outgoing(0, 0, 0), o.block, False)


def all_gather_matmul(a: torch.Tensor, b: torch.Tensor, team: Team, transport: str, tile: Tile) -> torch.Tensor:
    """all_gather(a[m, K]) @ b[N, K].T -> [W * m, N]."""
    (m, K), (b, described) = a.shape, _rows_of(b, a)
    plan = tiles.GatherPlan(
        rows=tile.block_m, columns=tile.block_n, transport=transport, step=tile.block_k if described else 0,
        group=tile.group, num_warps=_warps(tile, described, team), num_stages=tile.num_stages,
    )  # fmt: skip
    operand = descriptor_or_self(b, tile.block_n, tile.block_k, described)
    operands, out = (
        GemmOperands(K, row_stride(b), len(b), K, tile.block(described)),
        a.new_empty((team.size * m, len(b))),
    )
    return tiles.gather(gathered_tile, a, out, operands, team, matrices=(operand,), plan=plan)


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, team: Team, tile: Tile) -> torch.Tensor:
    """Rows of this rank of the sum of a[M, K] @ b[N, K].T over the ranks -> [M / W, N]."""
    a, (b, described) = rows_contiguous(a), _rows_of(b, a)
    # Programs that share a tile of the last round have 8 steps along K at least.
    split = max(1, min(a.shape[1] // (8 * tile.block_k), tiles.MAX_SPLIT))
    plan = tiles.ExchangePlan(
        rows=tile.block_m, columns=tile.block_n, group=tile.group, split=split, num_warps=_warps(tile, described, team),
        num_stages=tile.num_stages,
    )  # fmt: skip
    matrices = (
        descriptor_or_self(b, tile.block_n, tile.block_k, described),
        descriptor_or_self(a, tile.block_m, tile.block_k, described),
    )
    operands = GemmOperands(row_stride(a), row_stride(b), len(b), a.shape[1], tile.block(described))
    out = a.new_empty((len(a) // team.size, len(b)))
    return tiles.scatter(partial_tile, out, operands, team, matrices=matrices, plan=plan)


def _rows_of(b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``b`` with dense rows, and True if descriptors can read both operands."""
    b = rows_contiguous(b)
    return b, can_describe(a, b)


def _warps(tile: Tile, described: bool, team: Team) -> int:
    return tile.options(described, team.caps.arch)["num_warps"]


def _gemm(problem: OpProblem, call: Any, *rest: Any) -> Prepared:
    (m, n, _), team = problem.shape.size, problem.team
    tile = default_tile(m // team.size, n, problem.dtype, team.caps, team.size)
    return Prepared(run=lambda number: call(*problem.sets[number], team, *rest, tile))


# --- a mixture of experts --------------------------------------------------------------------------------------------


class ExpertOperands(NamedTuple):
    """Operands of ``expert_tile``.

    pairs      int32 [pairs], of a token and a choice, in the order of the result
    expert_of  int32 [tiles]
    gate_up    [experts, 2 N, K]
    most       tokens of a rank, each with ``choices``
    STEP       columns of a step along K
    """

    pairs: Any
    expert_of: Any
    gate_up: Any
    most: int
    choices: int
    N: int
    K: int
    STEP: tl.constexpr


@triton.jit
def expert_tile(shard, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """h[p] = silu(x[t] @ gate.T) * (x[t] @ up.T) of the pairs p of one expert and of tokens t of one rank"""
    r, c, ks = tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, o.STEP)
    exists, inside = r < tile.rows, c < o.N
    token = tl.load(o.pairs + tile.row + r, mask=exists, other=0) // o.choices - tile.owner * o.most
    gate = o.gate_up + tl.load(o.expert_of + tile.number).to(tl.int64) * 2 * o.N * o.K
    x_at, w_at = shard.data + token[:, None] * o.K + ks[None, :], gate + c[None, :] * o.K + ks[:, None]
    of_gate, of_up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, o.K, o.STEP):
        deep = k + ks < o.K
        x = tl.load(x_at + k, mask=exists[:, None] & deep[None, :], other=0.0)
        mask = inside[None, :] & deep[:, None]
        of_gate = tl.dot(x, tl.load(w_at + k, mask=mask, other=0.0), of_gate, input_precision="ieee")
        of_up = tl.dot(x, tl.load(w_at + o.N * o.K + k, mask=mask, other=0.0), of_up, input_precision="ieee")
    h = of_gate / (1 + tl.exp(-of_gate)) * of_up
    at = (tile.row + r).to(tl.int64)[:, None] * o.N + c[None, :]
    tl.store(out + at, h.to(out.dtype.element_ty), mask=exists[:, None] & inside[None, :])


def expert_tiles(
    ids: torch.Tensor, experts: Experts, rank: int, world: int, N: int, plan: tiles.GatherPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs, table, expert of each tile, pairs of each expert) of all ranks' choices ids [W * most, k].

    Made on the device. Pairs by expert, of one by rank from this one on. A tile has pairs of one expert and rank; the table
    has room for the most tiles that any choices make.
    """
    most, columns = len(ids) // world, triton.cdiv(N, plan.columns)
    ranks = (torch.arange(len(ids), device=ids.device) // most - rank) % world
    local = torch.where(experts.chosen(ids), ids - experts.first, experts.count)
    group = (local * world + ranks[:, None]).flatten().long()
    pairs, groups = group.argsort(stable=True).int(), experts.count * world
    sizes = torch.zeros(groups + world, dtype=torch.int64, device=ids.device).scatter_add_(0, group, group * 0 + 1)[
        :groups
    ]
    ends, tile_ends = sizes.cumsum(0), ((sizes + plan.rows - 1) // plan.rows).cumsum(0)
    number = torch.arange(groups + ids.numel() // plan.rows, device=ids.device)
    of = torch.searchsorted(tile_ends, number, right=True)
    of = of.clamp(max=groups - 1)  # entries without a tile
    first = ends[of] - sizes[of] + (number - torch.nn.functional.pad(tile_ends, (1, 0))[of]) * plan.rows
    limit = torch.minimum(first + plan.rows, ends[of])
    entries = torch.stack(((of % world + rank) % world, first, limit, torch.zeros_like(first)), 1).repeat_interleave(
        columns, 0
    )
    entries[:, 3] = torch.arange(len(entries), device=ids.device) % columns
    return pairs, entries.int(), (of // world).repeat_interleave(columns).int(), sizes.view(-1, world).sum(1)


def all_gather_grouped_matmul_silu_mul(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    experts: Experts,
    team: Team,
    most: int,
    plan: tiles.GatherPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, number of each expert's pairs) of all ranks' tokens."""
    N, K = gate_up.shape[1] // 2, x.shape[1]
    every = all_gather(padded(ids, most, -1), team)
    pairs, table, expert_of, counts = expert_tiles(every, experts, team.rank, team.size, N, plan)
    step = tl.constexpr(16 if team.is_simulated else 64)
    operands = ExpertOperands(pairs, expert_of, gate_up, most, ids.shape[1], N, K, step)
    h = x.new_empty((every.numel(), N))
    map = tiles.TileMap.of(table, positions=True)
    return tiles.gather(expert_tile, padded(x, most, 0), h, operands, team, plan=plan, map=map), counts


def _experts(problem: OpProblem) -> Prepared:
    small = problem.team.is_simulated
    plan = tiles.GatherPlan(rows=16, columns=16) if small else tiles.GatherPlan(rows=64, columns=128, num_warps=8)
    held, most = case_experts(problem.case, problem.team.rank), problem.case.sizes[0]

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, ids, _, gate_up = problem.sets[number]
        return all_gather_grouped_matmul_silu_mul(x, ids, gate_up, held, problem.team, most, plan)

    return Prepared(run=run)


# --- decode attention ------------------------------------------------------------------------------------------------


class HeadOperands(NamedTuple):
    """This rank's parts: means [B, heads, D], natural logs of the sums of weights [B, heads].

    own  heads of a rank
    """

    means: Any
    log_sums: Any
    heads: int
    own: int


@triton.jit
def head_part(tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """State of ``fold`` of rows (sequence, own head) of the owner"""
    r = tile.owner_row + tl.arange(0, ROWS)
    exists = tl.arange(0, ROWS) < tile.rows
    at = r // o.own * o.heads + tile.owner * o.own + r % o.own
    mean = tl.load(o.means + at[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], mask=exists[:, None], other=0.0)
    log_sum = tl.load(o.log_sums + at, mask=exists, other=EMPTY)
    return fold(no_parts(ROWS, COLUMNS), mean.to(tl.float32), log_sum, LOG2_E)


@triton.jit
def merge_heads(total, part):
    largest, weight, acc = total
    other, more, values = part
    new = tl.maximum(largest, other)
    one, two = tl.exp2((largest - new) * LOG2_E), tl.exp2((other - new) * LOG2_E)
    return new, weight * one + more * two, acc * one[:, None] + values * two[:, None]


@triton.jit
def store_heads(state, source, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)
    at = (tile.owner_row + r)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, merged(state).to(out.dtype.element_ty), mask=(r < tile.rows)[:, None])


def merge_over_ranks(means: torch.Tensor, log_sums: torch.Tensor, team: Team, rows: int = 8) -> torch.Tensor:
    """Attention [B, heads / W, D] of this rank's heads from all ranks' parts.

    means [B, heads, D], log_sums [B, heads] in natural logs
    """
    (B, heads, D), own = means.shape, means.shape[1] // team.size
    out, operands = means.new_empty((B * own, D)), HeadOperands(means, log_sums, heads, own)
    plan = tiles.ExchangePlan(rows=rows, columns=D)
    part = rows * (D + 2)
    tiles.exchange(head_part, store_heads, out, operands, team, part=part, merge=merge_heads, plan=plan)
    return out.view(B, own, D)


def _provider(name: str, op: str, make: Any) -> Provider:
    return Provider(name=name, ops=(op,), role="other", make=make, on_request=True)


PROVIDERS = (
    _provider("tiles.copy", "ag-gemm", lambda problem: _gemm(problem, all_gather_matmul, "copy")),
    _provider("tiles.store", "ag-gemm", lambda problem: _gemm(problem, all_gather_matmul, "store")),
    _provider("tiles.store", "gemm-rs", lambda problem: _gemm(problem, matmul_reduce_scatter)),
    _provider("tiles.copy", "ag-moe", _experts),
)

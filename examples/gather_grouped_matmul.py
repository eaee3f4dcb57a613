"""All-gather and grouped GEMM with bias: the first GEMM of a mixture of experts, on rows as they arrive.

out[p] = x[order[p]] @ weights[e].T + bias[e]        e = experts[order[p]], positions p sorted by rank, then by expert

A table says which positions form a tile: those of one expert from one rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from running import compare, run

import weft
from weft import tiles


class Operands(NamedTuple):
    """order int32 [W * m], experts int32 [W * m], weights [E, N, K], bias [E, N]; ``m`` rows of a rank."""

    order: Any
    experts: Any
    weights: Any
    bias: Any
    m: int
    N: int
    K: int
    STEP: tl.constexpr


@triton.jit
def expert_tile(shard, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place, column = tile.row + tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS)
    exists, inside = tl.arange(0, ROWS) < tile.rows, column < o.N
    row = tl.load(o.order + place, mask=exists, other=0) - tile.owner * o.m
    expert = tl.load(o.experts + tl.load(o.order + tile.row)).to(tl.int64)
    weight = o.weights + expert * o.N * o.K
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, o.K, o.STEP):
        k = first + tl.arange(0, o.STEP)
        deep = k < o.K
        x = tl.load(shard.data + row[:, None] * o.K + k[None, :], mask=exists[:, None] & deep[None, :], other=0.0)
        w = tl.load(weight + column[None, :] * o.K + k[:, None], mask=inside[None, :] & deep[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    acc += tl.load(o.bias + expert * o.N + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = place[:, None] * o.N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=exists[:, None] & inside[None, :])


def schedule(
    experts: torch.Tensor, count: int, world: int, N: int, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, table) of all ranks' rows: positions by rank and expert, tiles of (owner, first, limit, column)."""
    key = torch.arange(world, device=experts.device).repeat_interleave(len(experts) // world) * count + experts
    order, sizes = key.argsort(stable=True).int(), key.bincount(minlength=world * count).tolist()
    entries, begin = [], 0
    for group, size in enumerate(sizes):
        end = begin + size
        for first in range(begin, end, rows):
            for column in range(triton.cdiv(N, columns)):
                entries.append((group // count, first, min(first + rows, end), column))
        begin = end
    return order, torch.tensor(entries, dtype=torch.int32, device=experts.device)


def gather_grouped_matmul(
    x: torch.Tensor, operands: Operands, table: torch.Tensor, team: weft.Team, plan: tiles.GatherPlan
) -> torch.Tensor:
    out = x.new_empty((team.size * len(x), operands.N))
    map = tiles.TileMap.of(table, covers=len(out), positions=True)
    return tiles.gather(expert_tile, x, out, operands, team, plan=plan, map=map)


def one_after_the_other(x: torch.Tensor, o: Operands, sizes: list[int], team: weft.Team) -> torch.Tensor:
    """All-gather, then a GEMM for each expert of each rank."""
    groups = team.library.all_gather(x)[o.order.long()].split(sizes)
    outs = [rows @ o.weights[n % len(o.bias)].T + o.bias[n % len(o.bias)] for n, rows in enumerate(groups)]
    return torch.cat(outs)


def main(team: weft.Team, bench: bool = False) -> str | dict[str, float]:
    m, count, N, K, plan = (
        (20, 3, 24, 16, tiles.GatherPlan(rows=16, columns=16))
        if team.is_simulated
        else (2048, 8, 2048, 4096, tiles.GatherPlan(rows=128, columns=128, num_warps=8))
    )
    step = tl.constexpr(16 if team.is_simulated else 64)

    def draw(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(team.device).bfloat16()

    for call in range(3):
        experts = torch.randint(count, (team.size * m,), generator=torch.Generator().manual_seed(call)).to(team.device)
        x, weights, bias = draw(team.rank + 10, m, K), draw(100 + team.rank, count, N, K), draw(200, count, N)
        order, table = schedule(experts, count, team.size, N, plan.rows, plan.columns)
        operands = Operands(order, experts.int(), weights, bias, m, N, K, step)
        key = torch.arange(team.size, device=x.device).repeat_interleave(m) * count + experts
        sizes = key.bincount(minlength=team.size * count).tolist()
        out = gather_grouped_matmul(x, operands, table, team, plan)
        torch.testing.assert_close(out, one_after_the_other(x, operands, sizes, team), rtol=2e-2, atol=0.2)
    if not bench:
        return "right"
    calls = {
        "weft": lambda: gather_grouped_matmul(x, operands, table, team, plan),
        "torch": lambda: one_after_the_other(x, operands, sizes, team),
    }
    return compare(team, calls)


if __name__ == "__main__":
    run(main)

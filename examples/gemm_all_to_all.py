"""GEMM and all-to-all: each column tile travels to its owner while the next one is computed.

out[W * m, N / W] = columns of this rank of every rank's a[m, K] @ b[N, K].T
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
    """a [m, K], b [N, K] of this rank; ``n`` columns of a rank, in ``across`` tiles of the result."""

    a: Any
    b: Any
    m: int
    n: int
    K: int
    across: int
    down: int
    ROWS: tl.constexpr
    STEP: tl.constexpr


@triton.jit
def owner_of(number, o):
    return number // (o.across * o.down)


@triton.jit
def rows_of(number, o):
    row = number // o.across % o.down * o.ROWS
    return row, tl.minimum(o.m - row, o.ROWS), number % o.across


@triton.jit
def product_tile(tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile.row + tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS)
    b = o.b + tile.owner * o.n * o.K
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, o.K, o.STEP):
        k = first + tl.arange(0, o.STEP)
        x = tl.load(o.a + row[:, None] * o.K + k[None, :], mask=(row < o.m)[:, None] & (k < o.K)[None, :], other=0.0)
        y = tl.load(
            b + column[None, :] * o.K + k[:, None], mask=(column < o.n)[None, :] & (k < o.K)[:, None], other=0.0
        )
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return (acc,)


@triton.jit
def store_tile(part, source, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile.row + tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS)
    at = (source * o.m + row)[:, None] * o.n + column[None, :]
    tl.store(out + at, part[0].to(out.dtype.element_ty), mask=(row < o.m)[:, None] & (column < o.n)[None, :])


def gemm_all_to_all(
    a: torch.Tensor, b: torch.Tensor, team: weft.Team, tile: tuple[int, int, int] = (128, 128, 64)
) -> torch.Tensor:
    (m, K), n, (rows, columns, step) = a.shape, len(b) // team.size, tile
    across, down = triton.cdiv(n, columns), triton.cdiv(m, rows)
    operands = Operands(a, b, m, n, K, across, down, tl.constexpr(rows), tl.constexpr(step))
    plan = tiles.ExchangePlan(rows=rows, columns=columns, num_warps=8 if rows * columns > 8192 else 4)
    return tiles.exchange(
        product_tile, store_tile, a.new_empty((team.size * m, n)), operands, team, part=rows * columns, dtype=a.dtype,
        plan=plan, map=tiles.TileMap(owner_of=owner_of, rows_of=rows_of, tiles=team.size * across * down),
    )  # fmt: skip


def one_after_the_other(a: torch.Tensor, b: torch.Tensor, team: weft.Team) -> torch.Tensor:
    m, n = len(a), len(b) // team.size
    parts = (a @ b.T).view(m, team.size, n).transpose(0, 1).contiguous()
    return weft.ops.all_to_all(parts, team).view(team.size * m, n)


def main(team: weft.Team, bench: bool = False) -> str | dict[str, float]:
    m, n, K, tile = (20, 24, 32, (16, 16, 16)) if team.is_simulated else (2048, 2048, 2048, (128, 128, 64))
    for call in range(3):
        seeds = [torch.Generator().manual_seed(10 * call + rank) for rank in range(team.size)]
        every = [
            [torch.randn(size, K, generator=seed).to(team.device).bfloat16() for size in (m, team.size * n)]
            for seed in seeds
        ]
        a, b = every[team.rank]
        out = gemm_all_to_all(a, b, team, tile)
        mine = slice(team.rank * n, (team.rank + 1) * n)
        wanted = torch.cat([x.float() @ y[mine].float().T for x, y in every])
        torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=0.2)
    if not bench:
        return "right"
    calls = {
        "weft": lambda: gemm_all_to_all(a, b, team, tile),
        "torch, then weft's all-to-all": lambda: one_after_the_other(a, b, team),
    }
    return compare(team, calls)


if __name__ == "__main__":
    run(main)

"""All-gather and softmax of the rows: softmax of a peer's rows begins when they arrive.

out[W * m, N] = softmax(all_gather(x[m, N]), dim=1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from running import compare, run

import weft
from weft import tiles


class Row(NamedTuple):
    """Operands of the body: the length of a row."""

    N: int


@triton.jit
def softmax_tile(shard, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (row < tile.rows) & (column < o.N)
    x = tl.load(shard.data + (tile.owner_row + row) * o.N + column, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = x / tl.sum(x, axis=1)[:, None]
    tl.store(out + (tile.row + row) * o.N + column, y.to(out.dtype.element_ty), mask=inside)


def gather_softmax(x: torch.Tensor, team: weft.Team, rows: int = 4, chunks: int = 4) -> torch.Tensor:
    m, N = x.shape
    plan = tiles.GatherPlan(rows=rows, columns=triton.next_power_of_2(N), chunks=chunks)
    return tiles.gather(softmax_tile, x, x.new_empty((team.size * m, N)), Row(N), team, plan=plan)


def one_after_the_other(x: torch.Tensor, team: weft.Team) -> torch.Tensor:
    return team.library.all_gather(x).softmax(1)


def main(team: weft.Team, bench: bool = False) -> str | dict[str, float]:
    m, N = (10, 40) if team.is_simulated else (4096 // team.size, 8192)
    for call in range(3):
        x = torch.randn(m, N, generator=torch.Generator().manual_seed(10 * call + team.rank)).to(team.device).bfloat16()
        torch.testing.assert_close(gather_softmax(x, team), one_after_the_other(x, team), rtol=2e-2, atol=1e-3)
    if not bench:
        return "right"
    calls = {"weft": lambda: gather_softmax(x, team), "torch": lambda: one_after_the_other(x, team)}
    return compare(team, calls)


if __name__ == "__main__":
    run(main)

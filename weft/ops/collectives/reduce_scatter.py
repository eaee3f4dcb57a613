"""Reduce-scatter: rank r gets part r of the sum of all ranks' tensors.

out_r[...] = round(sum over s of x_s[r * m : (r + 1) * m])      x: [W * m, ...], out: [m, ...]; fp32, rounded once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weft.ops.case import Case, Inputs, part_of, sum_of
from weft.ops.collectives import cases
from weft.ops.collectives.collective import ENDLESS, Collective, Copy
from weft.ops.collectives.copy_engine import CopyEngine, add, on_lines
from weft.ops.collectives.over_nodes import OverNodes, added_over_nodes
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_even, check_tensor
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import Team, find_team
from weft.transport.exchange import exchange_parts, own_part, part_for_each, summed
from weft.transport.push import launch


@triton.jit
def reduce_scatter_kernel(
    x,  # [W, n]
    out,  # [n]
    n,
    buffer,  # Slots, in x's dtype
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out = sum over ranks of their x[my rank]

    grid     (programs,), each over every programs-th tile of BLOCK columns

    One send and receive a tile; signals, waits, order, progress: weft.transport.exchange. Elements beyond n are sent as zeros.

    every rank   | push tile 0, one row to each | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
    """
    exchange_parts(x, out, n, buffer, epochs, team, part_for_each, own_part, summed, BLOCK, ROWS, TRANSPORT)


class ReduceScatter(Collective):
    name, alias = "reduce_scatter", "reduce-scatter"
    rows_divided = True
    dtypes = FLOATS
    copy_engine_from = {2: ENDLESS, 4: 256 << 20, 8: ENDLESS}
    # Two ranks' parts are long, and the engines wait for their sum: more programs.
    copies = {2: CopyEngine(pieces=(3, 1), programs=132), 8: CopyEngine(pieces=(3, 1))}

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return sum_of([part_of(x, rank, case.world_size) for (x,) in by_rank])

    def cases(self) -> Iterator[Case]:
        return cases.reduce_scatter_cases(self.name)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_reduce_scatter_cases(self.name)

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return reduce_scatter(x, team, algorithm)

    def run(self, design: Any, team: Team, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter of ``x``, checked, any strides: a new contiguous tensor [x.shape[0] / W, ...]."""
        self.check_design(design)
        out = x.new_empty((x.shape[0] // team.size, *x.shape[1:]))
        if isinstance(design, Copy):
            return out.copy_(x)
        if isinstance(design, OverNodes):
            if out.numel() > 0:
                parts = x.detach().contiguous().chunk(team.shape.nodes)
                added_over_nodes(
                    team, lambda node: self.run(design.node.design, team.node, parts[node]), out, design.node
                )
            return out
        if out.numel() > 0:
            if isinstance(design, CopyEngine):
                sources = on_lines(x.detach().contiguous().view(-1)).view(team.size, -1).unbind()
                add(sources, out.view(-1), team, design)
                return out
            plan = design.push
            launch(
                reduce_scatter_kernel, x.contiguous(), out, out.numel(), cdiv(out.nbytes, plan.row_bytes), team, plan
            )
        return out

    def fake(self, x, team, algorithm="auto"):
        return x.new_empty((x.shape[0] // find_team(team).size, *x.shape[1:]))

    def backward(self, given, grad):
        # Each rank's out has one part of x.
        return {"x": torch.ops.weft.all_gather.default(grad, given.team)}


REDUCE_SCATTER = ReduceScatter()
register(REDUCE_SCATTER)


def reduce_scatter(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Sum all ranks' ``x`` and return part r on rank r: a new contiguous tensor [x.shape[0] / W, ...].

    ``x``: [W * m, ...], any strides, fp16, bf16 or fp32, on ``team.device``; the same shape and dtype on all ranks.
    The same bits from run to run. -0.0 may come out as +0.0. Captured in a CUDA graph it replays correctly, after one
    call outside. ValueError for wrong arguments. The backward is an all-gather.

    ``algorithm``: "auto" (weft.ops.explain tells its choice), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    check_tensor("reduce_scatter", "x", x, team, FLOATS, over_nodes=True)
    check_even("reduce_scatter", "x", x, team)
    check_choice("reduce_scatter", "algorithm", algorithm, REDUCE_SCATTER.algorithms)
    return REDUCE_SCATTER.dispatch(x, team.name, algorithm)

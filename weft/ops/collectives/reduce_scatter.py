"""Reduce-scatter: rank r gets part r of the sum of all ranks' tensors.

out_r[...] = round(sum over s of x_s[r * m : (r + 1) * m])      x: [W * m, ...], out: [m, ...]; fp32, rounded once
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.ops.case import Case, Inputs, part_of, sum_of
from weft.ops.collectives import cases
from weft.ops.collectives.collective import ALONE, ENDLESS, OWN_FIRST, RANK_ORDER, Collective
from weft.ops.collectives.copy_engine import CopyEngine
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_even, check_tensor
from weft.runtime.team.team import Team
from weft.transport.exchange import Body, own_part, part_for_each, summed

# out = sum over ranks of their x[my rank]                    x [W, n], out [n]
# every rank   | push tile 0, one row to each | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
BODY = Body(name="reduce_scatter_kernel", send=part_for_each, own=own_part, store=summed)


class ReduceScatter(Collective):
    name, alias = "reduce_scatter", "reduce-scatter"
    bits = {"push": RANK_ORDER, "copy_engine": OWN_FIRST, "copy": ALONE, "over_nodes": OWN_FIRST}
    rows_divided = True
    dtypes = FLOATS
    body = BODY
    copy_engine_from = {2: ENDLESS, 4: 256 << 20, 8: ENDLESS}
    # Two ranks' parts are long, and the engines wait for their sum: more programs.
    copies = {2: CopyEngine(pieces=(3, 1), programs=132), 8: CopyEngine(pieces=(3, 1))}

    cases, large_cases = cases.reduce_scatter_cases, cases.large_reduce_scatter_cases

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return sum_of([part_of(x, rank, case.world_size) for (x,) in by_rank])

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return reduce_scatter(x, team, algorithm)

    def backward(self, given, grad):
        # Each rank's out has one part of x.
        return {"x": torch.ops.weft.all_gather.default(grad, given.team)}


REDUCE_SCATTER = register(ReduceScatter())


def reduce_scatter(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Sum all ranks' ``x`` and return part r on rank r: a new contiguous tensor [x.shape[0] / W, ...].

    ``x``: [W * m, ...], any strides, fp16, bf16 or fp32, on ``team.device``; the same shape and dtype on all ranks.
    The same bits from run to run. -0.0 may come out as +0.0. Captured in a CUDA graph it replays correctly, after one
    call outside. ValueError for wrong arguments. The backward is an all-gather.

    ``algorithm``: "auto" (weft.ops.explain tells its choice), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    if (out := REDUCE_SCATTER.again(x, team, algorithm)) is not None:
        return out
    check_tensor("reduce_scatter", "x", x, team, FLOATS, over_nodes=True)
    check_even("reduce_scatter", "x", x, team)
    check_choice("reduce_scatter", "algorithm", algorithm, REDUCE_SCATTER.algorithms)
    return REDUCE_SCATTER.dispatch(x, team.name, algorithm)

"""All-gather: every rank gets all ranks' tensors, one after the other along dimension 0.

out[s * m : (s + 1) * m] = x_s                      x_s: [m, ...], out: [W * m, ...]; every bit as it was sent
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.ops.case import Case, Inputs
from weft.ops.collectives import cases
from weft.ops.collectives.collective import ENDLESS, Collective
from weft.ops.collectives.copy_engine import CopyEngine
from weft.ops.op import UNCHANGED, register
from weft.ops.registration import check_choice, check_has_rows, check_tensor
from weft.runtime.team.team import Team
from weft.transport.exchange import Body, side_by_side, whole

# out[s] = x of rank s                                        x [n] words, out [W, n]
# every rank   | push tile 0 to all | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
BODY = Body(name="all_gather_kernel", send=whole, own=whole, store=side_by_side)


class AllGather(Collective):
    name, alias = "all_gather", "all-gather"
    bits = UNCHANGED
    replicated = True
    moves_bits = gathers = True
    body = BODY
    copy_engine_from = {2: 256 << 20, 4: 128 << 20, 8: ENDLESS}
    copies = {2: CopyEngine(pieces=(3, 1))}

    cases, large_cases = cases.all_gather_cases, cases.large_all_gather_cases

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([x for (x,) in by_rank])

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return all_gather(x, team, algorithm)

    def backward(self, given, grad):
        # x lies in its part of every rank's out, so its gradient is the sum of that part over the ranks.
        return {"x": torch.ops.weft.reduce_scatter.default(grad, given.team)}


ALL_GATHER = register(AllGather())


def all_gather(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Gather all ranks' ``x`` along dimension 0, on every rank: a new tensor [W * x.shape[0], ...].

    The result is contiguous. ``x``: at least one dimension, any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or
    8 bytes, on ``team.device``; the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph
    it replays correctly, after one call outside with its shape, dtype and algorithm. ValueError for wrong arguments. The
    backward is a reduce-scatter.

    ``algorithm``: "auto" (weft.ops.explain tells its choice), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    if (out := ALL_GATHER.again(x, team, algorithm)) is not None:
        return out
    check_tensor("all_gather", "x", x, team, over_nodes=True)
    check_has_rows("all_gather", "x", x)
    check_choice("all_gather", "algorithm", algorithm, ALL_GATHER.algorithms)
    return ALL_GATHER.dispatch(x, team.name, algorithm)

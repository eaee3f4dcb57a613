"""All-to-all with even splits: part s of a rank's tensor goes to rank s, which stores it by sender.

out_r[s * m : (s + 1) * m] = x_s[r * m : (r + 1) * m]       x, out: [W * m, ...]; every bit as it was sent
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.ops.case import Case, Inputs, part_of
from weft.ops.collectives import cases
from weft.ops.collectives.collective import ENDLESS, Collective
from weft.ops.collectives.copy_engine import CopyEngine
from weft.ops.op import UNCHANGED, register
from weft.ops.registration import check_choice, check_even, check_tensor
from weft.runtime.team.team import Team
from weft.transport.exchange import Body, own_part, part_for_each, side_by_side

# out[s] = x[my rank] of rank s                               x, out [W, n] words
# every rank   | push tile 0, one row to each | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
BODY = Body(name="all_to_all_kernel", send=part_for_each, own=own_part, store=side_by_side)


class AllToAll(Collective):
    name, alias = "all_to_all", "all-to-all"
    bits = UNCHANGED
    rows_divided = True
    moves_bits = True
    body = BODY
    copy_engine_from = {2: 256 << 20, 4: 256 << 20, 8: ENDLESS}
    copies = {2: CopyEngine(pieces=(3, 1))}

    cases, large_cases = cases.all_to_all_cases, cases.large_all_to_all_cases

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([part_of(x, rank, case.world_size) for (x,) in by_rank])

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return all_to_all(x, team, algorithm)

    def backward(self, given, grad):
        # The parts go back where they came from.
        return {"x": torch.ops.weft.all_to_all.default(grad, given.team, given.algorithm)}


ALL_TO_ALL = register(AllToAll())


def all_to_all(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Send part s of ``x`` to rank s; part s of the result is from rank s.

    Returns a new contiguous tensor of ``x``'s shape.

    ``x``: [W * m, ...], any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or 8 bytes, on ``team.device``;
    the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph it replays
    correctly, after one call outside with its shape, dtype and algorithm. ValueError for wrong arguments. The backward is
    an all-to-all.

    ``algorithm``: "auto" (weft.ops.explain tells its choice), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    if (out := ALL_TO_ALL.again(x, team, algorithm)) is not None:
        return out
    check_tensor("all_to_all", "x", x, team, over_nodes=True)
    check_even("all_to_all", "x", x, team)
    check_choice("all_to_all", "algorithm", algorithm, ALL_TO_ALL.algorithms)
    return ALL_TO_ALL.dispatch(x, team.name, algorithm)

"""All-to-all with even splits: part s of a rank's tensor goes to rank s, which stores it by sender.

out_r[s * m : (s + 1) * m] = x_s[r * m : (r + 1) * m]       x, out: [W * m, ...]; every bit as it was sent
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weft.ops.case import Case, Inputs, part_of
from weft.ops.collectives import cases
from weft.ops.collectives.collective import ENDLESS, Collective, Copy
from weft.ops.collectives.copy_engine import CopyEngine, exchange, on_lines
from weft.ops.collectives.over_nodes import OverNodes, swapped
from weft.ops.op import register
from weft.ops.registration import as_words, check_choice, check_even, check_tensor
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import Team
from weft.transport.exchange import exchange_parts, own_part, part_for_each, side_by_side
from weft.transport.plans import word_of
from weft.transport.push import launch


@triton.jit
def all_to_all_kernel(
    x,  # [W, n] words
    out,  # [W, n]
    n,
    buffer,  # Slots, in x's dtype
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out[s] = x[my rank] of rank s

    grid     (programs,), each over every programs-th tile of BLOCK columns

    One send and receive a tile; signals, waits, order, progress: weft.transport.exchange.

    every rank   | push tile 0, one row to each | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
    """
    exchange_parts(x, out, n, buffer, epochs, team, part_for_each, own_part, side_by_side, BLOCK, ROWS, TRANSPORT)


class AllToAll(Collective):
    name, alias = "all_to_all", "all-to-all"
    rows_divided = True
    moves_bits = True
    copy_engine_from = {2: 256 << 20, 4: 256 << 20, 8: ENDLESS}
    copies = {2: CopyEngine(pieces=(3, 1))}

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([part_of(x, rank, case.world_size) for (x,) in by_rank])

    def cases(self) -> Iterator[Case]:
        return cases.all_to_all_cases(self.name)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_all_to_all_cases(self.name)

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return all_to_all(x, team, algorithm)

    def run(self, design: Any, team: Team, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """All-to-all of ``x``, checked, any strides: ``into`` or a new contiguous tensor of its shape."""
        self.check_design(design)
        out = x.new_empty(x.shape) if into is None else into
        if isinstance(design, Copy):
            return out.copy_(x)
        if isinstance(design, OverNodes):
            if x.numel() > 0:
                for node, piece in swapped(team, x.detach().contiguous().chunk(team.shape.nodes), design.node):
                    self.run(design.node.design, team.node, piece, into=out.chunk(team.shape.nodes)[node])
            return out
        if x.numel() > 0:
            words = as_words(x.detach(), word_of(x.nbytes // team.size))
            if isinstance(design, CopyEngine):
                sources, outs = (t.view(team.size, -1).unbind() for t in (on_lines(words), as_words(out, words.dtype)))
                exchange(sources, outs, team, design)
                return out
            n, plan = words.numel() // team.size, design.push
            tiles = cdiv(n * max(2, words.itemsize), plan.row_bytes)
            launch(all_to_all_kernel, words, as_words(out, words.dtype), n, tiles, team, plan)
        return out

    def fake(self, x, team, algorithm="auto"):
        return x.new_empty(x.shape)

    def backward(self, given, grad):
        # The parts go back where they came from.
        return {"x": torch.ops.weft.all_to_all.default(grad, given.team, given.algorithm)}


ALL_TO_ALL = AllToAll()
register(ALL_TO_ALL)


def all_to_all(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Send part s of ``x`` to rank s; part s of the result is from rank s.

    Returns a new contiguous tensor of ``x``'s shape.

    ``x``: [W * m, ...], any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or 8 bytes, on ``team.device``;
    the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph it replays
    correctly, after one call outside with its shape, dtype and algorithm. ValueError for wrong arguments. The backward is
    an all-to-all.

    ``algorithm``: "auto" (weft.ops.explain tells its choice), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    check_tensor("all_to_all", "x", x, team, over_nodes=True)
    check_even("all_to_all", "x", x, team)
    check_choice("all_to_all", "algorithm", algorithm, ALL_TO_ALL.algorithms)
    return ALL_TO_ALL.dispatch(x, team.name, algorithm)

"""All-gather: every rank gets all ranks' tensors, one after the other along dimension 0.

out[s * m : (s + 1) * m] = x_s                      x_s: [m, ...], out: [W * m, ...]; every bit as it was sent
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weft.ops.case import Case, Inputs
from weft.ops.collectives import cases
from weft.ops.collectives.collective import ENDLESS, Collective, Copy
from weft.ops.collectives.copy_engine import CopyEngine, exchange, on_lines
from weft.ops.collectives.over_nodes import OverNodes, swapped
from weft.ops.op import register
from weft.ops.registration import as_words, check_choice, check_has_rows, check_tensor
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import Team, find_team
from weft.transport.exchange import exchange_parts, side_by_side, whole
from weft.transport.plans import word_of
from weft.transport.push import launch


@triton.jit
def all_gather_kernel(
    x,  # [n] words
    out,  # [W, n]
    n,
    buffer,  # Slots, in x's dtype
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out[s] = x of rank s

    grid     (programs,), each over every programs-th tile of BLOCK words

    One send and receive a tile; signals, waits, order, progress: weft.transport.exchange.

    every rank   | push tile 0 to all | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
    """
    exchange_parts(x, out, n, buffer, epochs, team, whole, whole, side_by_side, BLOCK, ROWS, TRANSPORT)


class AllGather(Collective):
    name, alias = "all_gather", "all-gather"
    replicated = True
    moves_bits = gathers = True
    copy_engine_from = {2: 256 << 20, 4: 128 << 20, 8: ENDLESS}
    copies = {2: CopyEngine(pieces=(3, 1))}

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([x for (x,) in by_rank])

    def cases(self) -> Iterator[Case]:
        return cases.all_gather_cases(self.name)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_all_gather_cases(self.name)

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return all_gather(x, team, algorithm)

    def run(self, design: Any, team: Team, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """All-gather of ``x``, checked, any strides: ``into``, or a new tensor [W * x.shape[0], ...]."""
        self.check_design(design)
        out = x.new_empty((team.size * x.shape[0], *x.shape[1:])) if into is None else into
        if isinstance(design, Copy):
            return out.copy_(x)
        if isinstance(design, OverNodes):
            mine = x.detach().contiguous()
            for node, piece in swapped(team, [mine] * team.shape.nodes, design.node) if x.numel() else ():
                self.run(design.node.design, team.node, piece, into=out.chunk(team.shape.nodes)[node])
            return out
        if x.numel() > 0:
            words = as_words(x.detach(), word_of(x.nbytes))
            if isinstance(design, CopyEngine):
                outs = as_words(out, words.dtype).view(team.size, -1)
                exchange([on_lines(words)] * team.size, outs.unbind(), team, design)
                return out
            plan = design.push
            tiles = cdiv(words.numel() * max(2, words.itemsize), plan.row_bytes)
            launch(all_gather_kernel, words, as_words(out, words.dtype), words.numel(), tiles, team, plan)
        return out

    def fake(self, x, team, algorithm="auto"):
        return x.new_empty((find_team(team).size * x.shape[0], *x.shape[1:]))

    def backward(self, given, grad):
        # x lies in its part of every rank's out, so its gradient is the sum of that part over the ranks.
        return {"x": torch.ops.weft.reduce_scatter.default(grad, given.team)}


ALL_GATHER = AllGather()
register(ALL_GATHER)


def all_gather(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Gather all ranks' ``x`` along dimension 0, on every rank: a new tensor [W * x.shape[0], ...].

    The result is contiguous. ``x``: at least one dimension, any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or
    8 bytes, on ``team.device``; the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph
    it replays correctly, after one call outside with its shape, dtype and algorithm. ValueError for wrong arguments. The
    backward is a reduce-scatter.

    ``algorithm``: "auto" (weft.ops.explain tells its choice), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    check_tensor("all_gather", "x", x, team, over_nodes=True)
    check_has_rows("all_gather", "x", x)
    check_choice("all_gather", "algorithm", algorithm, ALL_GATHER.algorithms)
    return ALL_GATHER.dispatch(x, team.name, algorithm)

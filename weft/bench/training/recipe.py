"""The sequence-parallel recipe with GEMMs or backwards that are arguments, also for the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.ops.overlap.all_gather_matmul_backward import ALL_GATHER_MATMUL_BACKWARD, BackwardArguments
from weft.parallel import plain
from weft.parallel.sequence_parallel import SequenceParallel
from weft.parallel.tensors import AttentionWeights, MLPWeights, SequenceShard

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from weft.parallel.step import Step
    from weft.runtime.team.team import Team

# Designs of AG-GEMM's backward that are measured by name.
DESIGNS = tuple(ALL_GATHER_MATMUL_BACKWARD.designs)
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByFunctions(SequenceParallel):
    """The recipe with other GEMMs.

    column  (rows [T/W, K], weight [N, K]) -> all rows @ weight.T
    row     (x [T, K], weight [N, K]) -> this rank's rows of the sum over the ranks of x @ weight.T
    """

    column: Multiply
    row: Multiply

    def attention(self, x: SequenceShard, w: AttentionWeights, step: Step, cache: None) -> SequenceShard:
        attended = plain.attend(self.column(x.rows, w.qkv), w, step, cache)
        return SequenceShard(self.row(attended, w.o))

    def mlp(self, x: SequenceShard, w: MLPWeights) -> SequenceShard:
        return SequenceShard(self.row(plain.silu_mul(self.column(x.rows, w.gate_up)), w.down))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByDesign(SequenceParallel):
    """The recipe with one design of AG-GEMM's backward, by its name, instead of the plan's."""

    design: str

    def attention(self, x: SequenceShard, w: AttentionWeights, step: Step, cache: None) -> SequenceShard:
        attended = plain.attend(_Designed.apply(x.rows, w.qkv, self.team, self.design, False), w, step, cache)
        return SequenceShard(ops.matmul_reduce_scatter(attended, w.o, self.team))

    def mlp(self, x: SequenceShard, w: MLPWeights) -> SequenceShard:
        gated = plain.silu_mul(_Designed.apply(x.rows, w.gate_up, self.team, self.design, True))
        return SequenceShard(ops.matmul_reduce_scatter(gated, w.down, self.team, own_first=True))


class _Designed(torch.autograd.Function):
    """all_gather_matmul with the gradients of a design by name."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, team: Team, design: str, own_first: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = design, team, own_first
        return ops.all_gather_matmul(x, weight, team, own_first=own_first)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple:
        (x, weight), (design, team, own_first) = ctx.saved_tensors, ctx.how
        given = BackwardArguments(grad.contiguous(), x, weight, team.name, own_first, weight.dtype)
        grads = ALL_GATHER_MATMUL_BACKWARD.run(design, team, given)
        return *grads, None, None, None


def answering(team: Team) -> ByFunctions:
    """By plain torch and the team's baseline collectives, for answers."""
    gather, scatter = team.library.all_gather, team.library.reduce_scatter
    return ByFunctions(
        team=team,
        local=plain,
        column=lambda x, weight: _Exchanged.apply(x, gather, scatter) @ weight.T,
        row=lambda x, weight: _Exchanged.apply(x @ weight.T, scatter, gather),
    )


class _Exchanged(torch.autograd.Function):
    """there(x), whose gradient is back(grad)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad.contiguous()), None, None

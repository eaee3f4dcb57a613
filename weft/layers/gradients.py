"""Gradients of layers: of which calls they are asked, and of parameters that several ranks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from weft.kernels.fp8 import E4M3
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.parallel.recipe import StepPlan
from weft.parallel.step_plan import plan_layer
from weft.plan.planned import AUTO

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def asked_for(layer: nn.Module, x: torch.Tensor) -> bool:
    """True if a call of ``layer`` with ``x`` is recorded for a backward."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in (x, *layer.parameters()))


def with_gradients(layer: nn.Module, x: torch.Tensor, plan: StepPlan) -> bool:
    """``asked_for``; RuntimeError if weights are quantized, or the plan's collectives have no backward."""
    asked = asked_for(layer, x)
    for dtype, bits in ((E4M3, "fp8"), (torch.uint8, "4 bits")):
        if asked and any(one.dtype == dtype for one in layer.parameters()):
            raise RuntimeError(f"weights in {bits} have no gradients; take weights of 16 bits, or torch.no_grad()")
    if asked and plan.mode == "reference":
        raise RuntimeError(
            "mode='reference' has no gradients; use mode='replicated' or 'sequence_parallel', or torch.no_grad()"
        )
    return asked


def plan_for(layer: nn.Module, x: torch.Tensor, tokens: int) -> StepPlan:
    """Plan of a layer used by itself, in kernels that have a backward if gradients are asked for."""
    fused = False if asked_for(layer, x) and layer.mode != "invariant" else None
    return plan_layer(tokens, mode=layer.mode, team=layer.team, fused=fused)


def replicated_plan(plan: StepPlan) -> StepPlan:
    """Plan of the operations whose gradients stand for the ones of mode "invariant"."""
    return plan_layer(1, mode="replicated", team=plan.recipe.team, fused=False)


def _summed(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Sum over the ranks, without checks of ``x``, which torch.compile does not trace in a backward."""
    return ALL_REDUCE.dispatch(x, team.name, AUTO, False)


class SummedGradient(torch.autograd.Function):
    """A parameter that all ranks hold: its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.team), None


class SharedHeadsGradient(torch.autograd.Function):
    """Weights of heads, the last rows shared: their gradient is the sum over the ranks that hold them.

    shared   number of the shared rows, keys' and values'
    sharers  number of neighbouring ranks that hold the same
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, shared: int, sharers: int, team: Team) -> torch.Tensor:
        ctx.shared, ctx.sharers, ctx.team = shared, sharers, team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # One all-reduce has a place for each group of sharers.
        shared, group = grad[-ctx.shared :], ctx.team.rank // ctx.sharers
        places = grad.new_zeros(ctx.team.size // ctx.sharers, *shared.shape)
        places[group] = shared
        summed = _summed(places, ctx.team)[group]
        return torch.cat((grad[: -ctx.shared], summed)), None, None, None

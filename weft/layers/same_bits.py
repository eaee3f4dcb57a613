"""Forward passes of mode "invariant" with gradients of the operations of mode "replicated"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

Run = Callable[[torch.Tensor], torch.Tensor]


class RecomputedBackward(torch.autograd.Function):
    """y = forward(x); the gradients of again(x), which is computed in the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, forward: Run, again: Run, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.again, ctx.parameters = again, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return forward(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        [x] = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.needs_input_grad[2])
            places = [place for place, one in enumerate((x, *ctx.parameters)) if one.requires_grad]
            inputs = [(x, *ctx.parameters)[place] for place in places]
            taken = torch.autograd.grad(ctx.again(x), inputs, grad, allow_unused=True)
        gradients = dict(zip(places, taken, strict=True))
        return None, None, *(gradients.get(place) for place in range(1 + len(ctx.parameters)))


def with_backward(layer: nn.Module, x: torch.Tensor, forward: Run, again: Run) -> torch.Tensor:
    """``forward(x)`` of a layer, with the gradients of ``again(x)`` for x and for the layer's parameters."""
    return RecomputedBackward.apply(forward, again, x, *layer.parameters())

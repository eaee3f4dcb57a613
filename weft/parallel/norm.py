"""RMSNorm between two halves of a layer: with the residual, and where the plan defers it, with the all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from weft import ops
from weft.kernels.deferred_norm import FactoredNorm
from weft.parallel.linear import empty_parameter
from weft.parallel.sharding import Shard, whole
from weft.parallel.step_plan import Plan

if TYPE_CHECKING:
    from weft.runtime.team import Team


class ResidualRMSNorm(nn.Module):
    """hidden = x + residual; normed = hidden / sqrt(mean(hidden^2) + eps) * weight

    x, residual, hidden, normed: [M, H], or this rank's [M/W, H] of them in mode ag_rs. In a deferred plan x is this rank's
    summand, whole or in parts (ops.matmul_parts), and hidden = (sum over ranks of x) + residual. `residual` None is zero, of
    an x that is whole.
    """

    def __init__(self, hidden_size: int, eps: float, *, team: Team, dtype: torch.dtype) -> None:
        super().__init__()
        self.team, self.eps = team, eps
        self.weight = empty_parameter(hidden_size, team=team, dtype=dtype)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight)}

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, plan: Plan
    ) -> tuple[torch.Tensor | FactoredNorm, torch.Tensor]:
        """(normed, hidden)"""
        if plan.fused or plan.deferred:
            residual = torch.zeros_like(x) if residual is None else residual
        if plan.deferred:
            return ops.all_reduce_rms_norm(x, residual, self.weight, self.eps, self.team, factored=plan.factored)
        if plan.fused:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        hidden = x if residual is None else x + residual
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps), hidden

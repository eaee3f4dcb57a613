"""Weight of an RMSNorm, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.parallel.linear import empty_parameter
from weft.parallel.sharding import Shard, whole
from weft.parallel.tensors import NormWeights

if TYPE_CHECKING:
    from weft.runtime.team import Team


class ResidualRMSNorm(nn.Module):
    """hidden = x + residual; normed = hidden / sqrt(mean(hidden^2) + eps) * weight"""

    def __init__(self, hidden_size: int, eps: float, *, team: Team, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(hidden_size, team=team, dtype=dtype)

    @property
    def weights(self) -> NormWeights:
        return NormWeights(self.weight, self.eps)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight)}

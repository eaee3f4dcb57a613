"""RMSNorm whose weight comes out of a checkpoint: whole, or this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.parallel.linear import Rows
from weft.parallel.sharding import Shard, WholeTensor

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class RMSNorm(nn.RMSNorm):
    """weight [rows.size]: this rank's part of a checkpoint's weight, for inference.

    one_plus  the checkpoint has w for a weight of 1 + w, which is kept in fp32
    """

    def __init__(self, rows: Rows | int, eps: float, *, team: Team, dtype: torch.dtype, one_plus: bool = False) -> None:
        self.rows = rows if isinstance(rows, Rows) else Rows(rows, 0, rows)
        super().__init__(self.rows.size, eps=eps, device=team.device, dtype=torch.float32 if one_plus else dtype)
        self.one_plus = one_plus
        self.requires_grad_(False)

    def shards(self) -> dict[str, Shard]:
        total, start, size = self.rows.total, self.rows.start, self.rows.size
        kind = OnePlusShard if self.one_plus else Shard
        target = {"target": self.weight.data, "shape": (total,), "start": start}
        return {"weight": kind(**target, replicated=size == total)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePlusShard(Shard):
    """target = 1 + whole[start : start + n], in fp32: no bits of a weight in 16 bits are lost."""

    def copy_from(self, whole: WholeTensor) -> None:
        Shard.copy_from(self, whole)
        self.target.add_(1.0)

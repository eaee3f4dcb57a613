"""Linear layers split over the ranks of a team, and the three ways to bring their results together.

mode      tokens between layers     column-parallel            row-parallel
torch     replicated [M, H]         cuBLAS                     cuBLAS, then torch.distributed's all-reduce
ag_rs     sharded    [M/W, H]       all_gather_matmul          matmul_reduce_scatter
gemm_ar   replicated [M, H]         matmul                     matmul_all_reduce; deferred: matmul_parts, partial sums

M is a multiple of W in ag_rs. A column-parallel layer always returns all M tokens, of its own share of the features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from weft import ops
from weft.arguments import check_instance, positive, quoted
from weft.kernels.deferred_norm import FactoredNorm
from weft.parallel.sharding import Shard
from weft.parallel.step_plan import Mode, Plan, check_mode, plan_alone

if TYPE_CHECKING:
    from weft.runtime.team import Team


def check_layer(team: Team, mode: Mode, dtype: torch.dtype, **sizes: int) -> None:
    """ValueError unless a layer can be made of these arguments, its sizes among them."""
    # Weights can be made without a simulation, for a stand-in of a team.
    if not all(hasattr(team, name) for name in ("rank", "size", "device")):
        raise ValueError(f"team={quoted(team)} is not a Team; weft.init() makes one, and main(team) gets one")
    check_mode(mode)
    check_instance("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.bfloat16")
    for name, size in sizes.items():
        positive(name, size)


def split_evenly(name: str, value: int, team: Team) -> int:
    """value / W; ValueError where that is not whole."""
    if value % team.size:
        possible = ", ".join(str(w) for w in range(1, min(value, 64) + 1) if value % w == 0)
        raise ValueError(f"{name}={value} is not divisible by world_size={team.size}; use a world size of {possible}")
    return value // team.size


def empty_parameter(*shape: int, team: Team, dtype: torch.dtype) -> nn.Parameter:
    """Inference only: no gradients are kept."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=team.device), requires_grad=False)


def all_reduce(x: torch.Tensor, team: Team, mode: Mode) -> torch.Tensor:
    return team.library.all_reduce(x) if mode == "torch" else ops.all_reduce(x, team)


def all_gather(x: torch.Tensor, team: Team, mode: Mode) -> torch.Tensor:
    """x[n, ...] of every rank, one under another: [W * n, ...]."""
    return team.library.all_gather(x) if mode == "torch" else ops.all_gather(x, team)


def matmul(x: torch.Tensor | FactoredNorm, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """x[M, K] @ weight[N, K].T, of this rank alone."""
    return ops.matmul(x, weight) if plan.fused else F.linear(x, weight)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start .. start + size of a checkpoint weight that has `total`."""

    total: int
    start: int
    size: int

    @classmethod
    def even(cls, name: str, total: int, team: Team) -> Rows:
        size = split_evenly(name, total, team)
        return cls(total, team.rank * size, size)


class ColumnParallelLinear(nn.Module):
    """y[M, N_local] = x @ weight[N_local, K].T          x: [M, K], or [M/W, K] in mode ag_rs

    `weight` is this rank's rows of several checkpoint weights, one under another: one GEMM computes q, k and v.
    """

    def __init__(self, in_features: int, parts: dict[str, Rows], *, team: Team, mode: Mode, dtype: torch.dtype) -> None:
        super().__init__()
        check_mode(mode)
        self.team, self.mode, self.parts = team, mode, parts
        self.weight = empty_parameter(sum(rows.size for rows in parts.values()), in_features, team=team, dtype=dtype)

    def shards(self) -> dict[str, Shard]:
        targets = self.weight.data.split([rows.size for rows in self.parts.values()])
        return {
            f"{name}.weight": Shard(target=target, shape=(rows.total, self.weight.shape[1]), start=rows.start)
            for (name, rows), target in zip(self.parts.items(), targets, strict=True)
        }

    def forward(
        self,
        x: torch.Tensor | FactoredNorm,
        plan: Plan | None = None,
        *,
        in_parts: bool = False,
        own_first: bool = False,
    ) -> torch.Tensor | FactoredNorm:
        """in_parts: what becomes y in the kernel behind will do, where that is sooner (ops.matmul_parts).
        own_first: in mode ag_rs the tokens of ranks r, r + 1, … (mod W) come in this order at rank r."""
        plan = plan or plan_alone(self.mode, self.team)
        if plan.mode == "ag_rs":
            return ops.all_gather_matmul(x, self.weight, self.team, own_first=own_first)
        if in_parts and plan.fused:
            return ops.matmul_parts(x, self.weight)
        return matmul(x, self.weight, plan)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x[M, K_local] @ weight[N, K_local].T          y: [M, N], or its [M/W, N] in mode ag_rs

    In a deferred plan y is this rank's summand alone, whole or in parts (ops.matmul_parts): the norm behind it adds both up.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, *, team: Team, mode: Mode, dtype: torch.dtype
    ) -> None:
        super().__init__()
        check_mode(mode)
        self.team, self.mode, self.name, self.in_features = team, mode, name, in_features
        local = split_evenly(f"in_features of {name}", in_features, team)
        self.weight = empty_parameter(out_features, local, team=team, dtype=dtype)

    def shards(self) -> dict[str, Shard]:
        out_features, local = self.weight.shape
        shape = (out_features, self.in_features)
        return {f"{self.name}.weight": Shard(target=self.weight.data, shape=shape, dim=1, start=self.team.rank * local)}

    def forward(self, x: torch.Tensor, plan: Plan | None = None, *, own_first: bool = False) -> torch.Tensor:
        """own_first: in mode ag_rs the tokens come in the order of a column-parallel layer's own_first."""
        plan = plan or plan_alone(self.mode, self.team)
        if plan.mode == "torch":
            return self.team.library.all_reduce(F.linear(x, self.weight))
        if plan.mode == "ag_rs":
            return ops.matmul_reduce_scatter(x, self.weight, self.team, own_first=own_first)
        if plan.deferred:
            return ops.matmul_parts(x, self.weight) if plan.fused else F.linear(x, self.weight)
        return ops.matmul_all_reduce(x, self.weight, self.team)

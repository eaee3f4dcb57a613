"""Weights of linear layers split over the ranks of a team, and how they come out of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.arguments import check_instance, positive, quoted
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import E4M3, Fp8
from weft.parallel.four_bit import Cut, FourBitFormat, FourBitScales
from weft.parallel.modes import Mode, check_mode
from weft.parallel.quantized import Format, Formats, Fp8Grid, Fp8Scales
from weft.parallel.sharding import Shard, whole
from weft.parallel.tensors import Lora

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def check_layer(team: Team, mode: Mode, dtype: torch.dtype, **sizes: int) -> None:
    """ValueError unless a layer can be made of these arguments, its sizes among them."""
    check_team(team)
    check_mode(mode)
    check_instance("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.bfloat16")
    for name, size in sizes.items():
        positive(name, size)


def check_team(team: Team) -> None:
    """ValueError unless ``team`` is a Team, or a stand-in: weights can be made without a simulation."""
    if not all(hasattr(team, name) for name in ("rank", "size", "device")):
        raise ValueError(f"team={quoted(team)} is not a Team; weft.init() makes one, and main(team) gets one")


def check_rows(layer: str, x: torch.Tensor, weight: torch.Tensor | Fp8 | FourBit) -> None:
    """ValueError unless x is [M, K] or [batch, length, K], and `weight` [N, K] in its dtype or quantized."""
    check_instance("x", x, torch.Tensor, "a tensor [M, hidden] or [batch, length, hidden]")
    if x.dim() not in (2, 3) or x.shape[-1] != weight.shape[1]:
        K = weight.shape[1]
        raise ValueError(f"{layer}: x has shape {tuple(x.shape)}; pass [M, {K}] or [batch, length, {K}]")
    if isinstance(weight, torch.Tensor) and x.dtype != weight.dtype:
        raise ValueError(f"{layer}: x.dtype={x.dtype} and the weights are {weight.dtype}; convert one")


def split_evenly(name: str, value: int, team: Team) -> int:
    """value / W; ValueError where W does not divide it."""
    if value % team.size:
        possible = ", ".join(str(w) for w in range(1, min(value, 64) + 1) if value % w == 0)
        raise ValueError(f"{name}={value} is not divisible by world_size={team.size}; use a world size of {possible}")
    return value // team.size


def empty_parameter(*shape: int, team: Team, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised parameter for inference: no gradients are kept."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=team.device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start .. start + size of a checkpoint weight with `total` rows."""

    total: int
    start: int
    size: int

    @classmethod
    def even(cls, name: str, total: int, team: Team) -> Rows:
        """This rank's 1/W of the rows."""
        size = split_evenly(name, total, team)
        return cls(total, team.rank * size, size)


class ParallelLinear(nn.Module):
    """Base of both layers.

    scales  of a quantized ``weight``
    lora    its adapters (weft.models.adapters); None: there are none
    """

    weight: nn.Parameter
    scales: Fp8Scales | FourBitScales | None
    lora: Lora | None = None

    @property
    def matrix(self) -> torch.Tensor | Fp8 | FourBit:
        """The weight, with its scales if it is quantized."""
        return self.weight if self.scales is None else self.scales.matrix(self.weight)


class ColumnParallelLinear(ParallelLinear):
    """weight [N_local, K], bias [N_local] or None: this rank's rows of several weights, for one GEMM.

    formats  of the weights; None: they are in `dtype`
    block    rows at whose multiples blocks of scales may be cut, beside seams and ranks' edges; 0: at none
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, Rows],
        *,
        team: Team,
        dtype: torch.dtype,
        bias: bool = False,
        formats: Formats | None = None,
        block: int = 0,
    ) -> None:
        super().__init__()
        self.parts, self.in_features = parts, in_features
        sizes = [rows.size for rows in parts.values()]
        seams = [*accumulate(sizes[:-1]), *(rows.size for rows in parts.values() if rows.size < rows.total)]
        format = None if formats is None else formats(tuple(parts))
        self.weight = matrix_parameter(sum(sizes), in_features, team=team, dtype=dtype, format=format)
        self.scales = scales_beside(self.weight, in_features, format, row_edges=[*seams, block])
        self.bias = empty_parameter(sum(sizes), team=team, dtype=dtype) if bias else None

    def shards(self) -> dict[str, Shard]:
        shards, first = {}, 0
        for name, rows in self.parts.items():
            for kind in ("weight", "bias"):
                parameter = getattr(self, kind)
                if parameter is None:
                    continue
                target = parameter.data[first : first + rows.size]
                shape = (rows.total, self.in_features)[: target.dim()]
                shard = Shard(target=target, shape=shape, start=rows.start)
                scaled = kind == "weight" and self.scales is not None
                shards |= self.scales.shards(name, shard, first) if scaled else {f"{name}.{kind}": shard}
            first += rows.size
        return shards


class RowParallelLinear(ParallelLinear):
    """weight [N, K_local]: this rank's columns of a checkpoint weight; its GEMM gives a partial sum.

    bias  [N] or None, for the sum over the ranks
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        team: Team,
        dtype: torch.dtype,
        bias: bool = False,
        formats: Formats | None = None,
    ) -> None:
        super().__init__()
        self.team, self.name, self.in_features = team, name, in_features
        self.local = local = split_evenly(f"in_features of {name}", in_features, team)
        format = None if formats is None else formats((name,))
        self.weight = matrix_parameter(out_features, local, team=team, dtype=dtype, format=format)
        self.scales = scales_beside(self.weight, local, format, column_edges=[local] if team.size > 1 else [])
        self.bias = empty_parameter(out_features, team=team, dtype=dtype) if bias else None

    def shards(self) -> dict[str, Shard]:
        shape = (len(self.weight), self.in_features)
        shard = Shard(target=self.weight.data, shape=shape, dim=1, start=self.team.rank * self.local)
        shards = {f"{self.name}.weight": shard} if self.scales is None else self.scales.shards(self.name, shard)
        return shards if self.bias is None else shards | {f"{self.name}.bias": whole(self.bias)}


def matrix_parameter(*shape: int, team: Team, dtype: torch.dtype, format: Format | None) -> nn.Parameter:
    """Uninitialised matrix in ``dtype``, or in its format."""
    if isinstance(format, FourBitFormat):
        return empty_parameter(*format.data_shape(*shape), team=team, dtype=torch.uint8)
    return empty_parameter(*shape, team=team, dtype=dtype if format is None else E4M3)


def scales_beside(
    weight: nn.Parameter,
    columns: int,
    format: Format | None,
    *,
    row_edges: Sequence[int] = (),
    column_edges: Sequence[int] = (),
) -> Fp8Scales | FourBitScales | None:
    """Scales of a matrix of ``columns`` in a format, whose blocks these edges may cut; None without one."""
    if format is None:
        return None
    if isinstance(format, FourBitFormat):
        return FourBitScales(Cut.of(format, columns, column_edges), *weight.shape[:-1], device=weight.device)
    grid = Fp8Grid.of(format, columns, row_edges, column_edges)
    return Fp8Scales(grid, *weight.shape, device=weight.device)

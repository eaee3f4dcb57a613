"""One rank's part of a whole weight, and how it is filled from a module or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn


class WholeTensor(Protocol):
    """A tensor, or a safetensors slice, of which only the parts are read that are asked for."""

    def __getitem__(self, index: object, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """target = whole[start : start + n] along dimension `dim`, n the size of `target` there.

    target: a parameter of this rank or a view of some of its rows
    shape:  the whole tensor's
    replicated: every rank holds all of it
    ends_within_a_row: the tensor has a row for several rows of its matrix, whose last row is not the last of one
    order:  rows of `target` as they come out of the checkpoint, in the order in which they stay; None: in that one
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    replicated: bool = False
    ends_within_a_row: bool = False
    order: torch.Tensor | None = None

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        """All tensors of this rank that are filled from the whole tensor itself."""
        return (self.target,)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if the whole tensor may have this shape."""
        return shape == self.shape

    @property
    def stored(self) -> torch.dtype | None:
        """The dtype that the whole tensor has to have; None: any that converts to the target's."""
        return torch.float8_e4m3fn if self.target.dtype == torch.float8_e4m3fn else None

    def copy_from(self, whole: WholeTensor) -> None:
        """Fill from `whole`. Of a safetensors slice only this shard's bytes are read."""
        if self.target.numel() == 0:
            return
        index = (slice(None),) * self.dim + (slice(self.start, self.start + self.target.shape[self.dim]),)
        # Columns out of a row-major tensor are strided: gather them on the CPU, not by a strided copy to the GPU.
        self.target.copy_(whole[index].contiguous())
        self.reorder()

    def reorder(self) -> None:
        if self.order is not None:
            bits = self.target.view(torch.uint8) if self.target.itemsize == 1 else self.target
            bits.copy_(bits[self.order])


def in_order(shard: Shard, order: torch.Tensor) -> Shard:
    """``shard`` with rows of its matrix in this order; a shard of scales moves with its blocks of rows."""
    rows = len(order) // len(shard.target)
    return replace(shard, order=order[::rows] // rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralShards(Shard):
    """Rows of a whole tensor at several places.

    target  the first part's
    """

    parts: tuple[Shard, ...]

    @classmethod
    def of(cls, parts: Iterable[Shard]) -> SeveralShards:
        first, *rest = parts
        return cls(target=first.target, shape=first.shape, parts=(first, *rest))

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return tuple(part.target for part in self.parts)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.parts[0].fits(shape)

    @property
    def stored(self) -> torch.dtype | None:
        return self.parts[0].stored

    def copy_from(self, whole: WholeTensor) -> None:
        for part in self.parts:
            part.copy_from(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorShard(Shard):
    """A vector that every rank holds whole, and that a checkpoint may have as one row."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> VectorShard:
        return cls(target=parameter.data, shape=tuple(parameter.shape), replicated=True)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape in (self.shape, (1, *self.shape))

    def copy_from(self, whole: WholeTensor) -> None:
        self.target.copy_(whole[...].reshape(self.shape))


def whole(parameter: torch.Tensor) -> Shard:
    """Shard of a parameter that every rank holds whole."""
    return Shard(target=parameter.data, shape=tuple(parameter.shape), replicated=True)


def under(prefix: str, shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The same shards, their names after `prefix` and a dot."""
    return {f"{prefix}.{name}": shard for name, shard in shards.items()}


def fill_from_module(shards: Mapping[str, Shard], module: nn.Module) -> None:
    """Fill every shard from the parameter of the same name in `module`.

    ValueError where names or shapes differ: a weight without use (a bias, say) is as wrong as a missing one.
    """
    fill(shards, module.state_dict(), type(module).__name__)


def fill(shards: Mapping[str, Shard], tensors: Mapping[str, torch.Tensor], module: str) -> None:
    """``fill_from_module`` of tensors by name; ``module`` names theirs in errors."""
    missing, unknown = sorted(shards.keys() - tensors.keys()), sorted(tensors.keys() - shards.keys())
    if missing or unknown:
        raise ValueError(
            f"module={module} lacks {missing or 'nothing'} and has {unknown or 'nothing'} that this "
            f"layer does not use; it needs exactly {sorted(shards)}"
        )
    for name, shard in shards.items():
        if not shard.fits(tuple(tensors[name].shape)):
            raise ValueError(
                f"{name} of the module has shape {tuple(tensors[name].shape)}, but this layer needs {shard.shape}"
            )
        shard.copy_from(tensors[name].detach())

"""Which part of a whole weight one rank holds, and how it gets there from a module or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """target = whole[start : start + n] along dimension `dim`, where n is as long as `target` is there.

    target: a parameter of this rank or a view of some of its rows
    shape:  what the whole tensor must have
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def copy_from(self, whole: Any) -> None:
        """`whole` is a tensor or a safetensors slice; of a slice only the bytes of this shard are read."""
        if self.target.numel() == 0:
            return
        index = (slice(None),) * self.dim + (slice(self.start, self.start + self.target.shape[self.dim]),)
        # Columns out of a row-major tensor are strided: gather them on the CPU, not by a strided copy to the GPU.
        self.target.copy_(whole[index].contiguous())


def whole(parameter: torch.Tensor) -> Shard:
    """Every rank holds all of it."""
    return Shard(target=parameter.data, shape=tuple(parameter.shape))


def under(prefix: str, shards: Mapping[str, Shard]) -> dict[str, Shard]:
    return {f"{prefix}.{name}": shard for name, shard in shards.items()}


def fill_from_module(shards: Mapping[str, Shard], module: nn.Module) -> None:
    """Fills every shard from the parameter of the same name in `module`.

    ValueError where names or shapes differ: a weight that we would not use (a bias, say) is as wrong as one we miss.
    """
    tensors = module.state_dict()
    missing, unknown = sorted(shards.keys() - tensors.keys()), sorted(tensors.keys() - shards.keys())
    if missing or unknown:
        raise ValueError(
            f"module={type(module).__name__} lacks {missing or 'nothing'} and has {unknown or 'nothing'} that this "
            f"layer does not use; it needs exactly {sorted(shards)}"
        )
    for name, shard in shards.items():
        if tuple(tensors[name].shape) != shard.shape:
            raise ValueError(
                f"{name} of the module has shape {tuple(tensors[name].shape)}, but this layer needs {shard.shape}"
            )
        shard.copy_from(tensors[name].detach())

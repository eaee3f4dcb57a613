"""Tensors of all experts in a checkpoint, as the shards of single experts that a model has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from weft.models.checkpoint import Checkpoint
from weft.models.family import WeightNames
from weft.parallel.sharding import Shard, WholeTensor

# Ends of names of a single expert's tensors → of a stacked one's, beside the name of its weights.
ENDS = {
    "weight": "",
    "bias": "_bias",
    "weight_packed": "_blocks",
    "weight_scale": "_scales",
    "weight_scale_inv": "_scale_inv",
}
Part = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedShard(Shard):
    """Shards of single experts in one tensor. target, shape: of any shard, and the stacked tensor's.

    parts        (expert, part of it, its shard)
    transposed   matrices are [columns, rows]
    interleaved  rows of gate and of up take turns
    """

    parts: tuple[tuple[int, Part, Shard], ...]
    transposed: bool
    interleaved: bool

    def fits(self, shape: tuple[int, ...]) -> bool:
        # Numbers in MXFP4 have a dimension more: columns under one scale.
        flat = (*shape[:2], prod(shape[2:])) if len(self.shape) == 3 else shape
        return flat == self.shape

    @property
    def stored(self) -> torch.dtype | None:
        return self.parts[0][2].stored

    def copy_from(self, whole: WholeTensor) -> None:
        last = None
        for expert, part, shard in self.parts:
            if expert != last:
                matrix, last = whole[expert], expert
                matrix = matrix.flatten(1) if matrix.dim() > 2 else matrix.t() if self.transposed else matrix
            shard.copy_from(self.rows(matrix, part))

    def rows(self, matrix: torch.Tensor, part: Part) -> torch.Tensor:
        """Rows of gate, of up or of down."""
        if part == "down":
            return matrix
        second = part == "up"
        return matrix[second::2] if self.interleaved else matrix.chunk(2)[second]

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return tuple(shard.target for _, _, shard in self.parts)


def as_stored(
    shards: Mapping[str, Shard], checkpoint: Checkpoint, names: WeightNames, num_experts: int
) -> dict[str, Shard]:
    """Shards of a model by the names of this checkpoint's tensors, which may have all experts in one."""
    stored: dict[str, Shard] = {}
    stacks: dict[str, list[tuple[int, Part, Shard]]] = {}
    for name, shard in shards.items():
        stack, expert, part = _stack_of(name, names) or (None, 0, "down")
        if stack is None or checkpoint.has(name) or not checkpoint.has(stack):
            stored[name] = shard
        else:
            stacks.setdefault(stack, []).append((expert, part, shard))
    for name, parts in stacks.items():
        _, part, shard = parts[0]
        rows, *columns = shard.shape
        matrix = (rows if part == "down" else 2 * rows, *columns)
        transposed = names.stacked.transposed and len(matrix) == 2 and shard.stored is None
        stored[name] = StackedShard(
            target=shard.target,
            shape=(num_experts, *(reversed(matrix) if transposed else matrix)),
            parts=tuple(sorted(parts, key=lambda one: one[0])),
            transposed=transposed,
            interleaved=names.stacked.interleaved,
        )
    return stored


def _stack_of(name: str, names: WeightNames) -> tuple[str, int, Part] | None:
    """(name of the stacked tensor, expert, part) of a single expert's tensor; None for any other name."""
    mixture, _, rest = name.rpartition(".experts.")
    expert, _, projection_and_end = rest.partition(".")
    projection, _, end = projection_and_end.partition(".")
    if not mixture or not expert.isdigit() or projection not in names.projections or end not in ENDS:
        return None
    part: Part = ("gate", "up", "down")[names.projections.index(projection)]
    stacked = names.stacked.down if part == "down" else names.stacked.gate_up
    return f"{mixture}.{stacked}{ENDS[end]}", int(expert), part

"""Matrices that share a tensor of a checkpoint: rules of names, and the rows of each matrix.

Without torch: tables of families name the rules, and the command line reads the tables before it loads torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import CheckpointError

if TYPE_CHECKING:
    from weft.parallel.sharding import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A module of a checkpoint whose tensors hold the rows of several matrices, one after another.

    name   last word of its name, such as qkv_proj
    parts  last words of the names that the matrices have in weft's layers, in the order of their rows
    """

    name: str
    parts: tuple[str, ...]


QKV = Joined(name="qkv_proj", parts=("q_proj", "k_proj", "v_proj"))
GATE_UP = Joined(name="gate_up_proj", parts=("gate_proj", "up_proj"))


def joined_name(name: str, rules: Collection[Joined]) -> str | None:
    """Name of the tensor that holds this one's rows; None where no rule is for it."""
    rule = _rule_for(name, rules)
    return None if rule is None else _sibling(name, rule.name)


def rows_in(tensor: Any, name: str, rules: Collection[Joined], shards: Mapping[str, Shard]) -> Any:
    """Rows of the tensor `name` in a joined one.

    tensor  the joined one, as safetensors slices it; so is what this returns
    shards  by the names of all parts

    CheckpointError where the joined tensor does not have the shape of its parts together, or a part ends within a row.
    """
    rule, shape = _rule_for(name, rules), tuple(tensor.get_shape())
    parts = [shards[_sibling(name, part)] for part in rule.parts]
    if all(part.shape == (1, 1) and part.fits(shape) for part in parts):
        return tensor  # one scale for all parts
    rows = [part.shape[0] for part in parts]
    expected = (sum(rows), *parts[0].shape[1:])
    # A column of scales may be a vector.
    if shape != expected and not (expected[1:] == (1,) and shape == expected[:1]):
        raise CheckpointError(
            f"tensor {_sibling(name, rule.name)} has shape {shape}, but config.json asks for {expected}"
        )
    for part, shard in zip(rule.parts[:-1], parts, strict=False):
        if shard.ends_within_a_row:
            raise CheckpointError(
                f"tensor {_sibling(name, rule.name)} has a row for several rows of the weight, and {part} ends within one; "
                f"take a checkpoint of 16 bits"
            )
    at = rule.parts.index(_module(name))
    return RowsOf(tensor=tensor, first=sum(rows[:at]), count=rows[at])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """Rows first .. first + count of a tensor, read as a safetensors slice is."""

    tensor: Any
    first: int
    count: int

    def get_shape(self) -> list[int]:
        return [self.count, *self.tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()

    def __getitem__(self, index: Any) -> Any:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        begin, end, _ = (slice(None) if rows is Ellipsis else rows).indices(self.count)
        return self.tensor[(slice(self.first + begin, self.first + end), *columns)]


def _module(name: str) -> str:
    """q_proj of "model.layers.0.self_attn.q_proj.weight"."""
    return name.rsplit(".", 2)[-2]


def _sibling(name: str, module: str) -> str:
    """The tensor's name with another module in place of its last one."""
    prefix, _, kind = name.rsplit(".", 2)
    return f"{prefix}.{module}.{kind}"


def _rule_for(name: str, rules: Collection[Joined]) -> Joined | None:
    if name.count(".") < 2:
        return None
    return next((rule for rule in rules if _module(name) in rule.parts), None)

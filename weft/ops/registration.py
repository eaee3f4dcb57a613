"""Argument checks of the public functions of ops, which torch.compile traces through."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from weft.arguments import check_bool, check_int, check_number, did_you_mean, quoted
from weft.runtime.team.checks import (
    FLOATS,
    HALVES,
    ITEM_SIZES,
    check_is_tensor,
    check_one_node,
    check_team,
    check_tensor,
)
from weft.runtime.team.team import Team

__all__ = [
    "FLOATS", "HALVES", "ITEM_SIZES", "as_words", "check_choice", "check_count", "check_divides", "check_even", "check_flag",
    "check_has_rows", "check_is_tensor", "check_list", "check_one_node", "check_scalar", "check_team", "check_tensor",
]  # fmt: skip


def check_flag(op: str, name: str, value: bool) -> None:
    """ValueError unless ``value`` is True or False."""
    if value is not True and value is not False:
        check_bool(f"{op}: {name}", value)


def check_scalar(op: str, name: str, value: float) -> None:
    """ValueError unless ``value`` is a finite number, or a symbolic one of torch.compile."""
    if (type(value) is not float or not math.isfinite(value)) and not isinstance(value, (torch.SymInt, torch.SymFloat)):
        most = sys.float_info.max
        check_number(f"{op}: {name}", value, -most, most, "a finite number")


def check_count(op: str, name: str, value: int, low: int = 0) -> None:
    """ValueError unless ``value`` is an integer of at least ``low``, or a symbolic one of torch.compile."""
    if not isinstance(value, torch.SymInt):
        check_int(f"{op}: {name}", value, low)


def check_even(op: str, name: str, x: torch.Tensor, team: Team) -> None:
    """ValueError unless dimension 0 of ``x`` is divisible by the number of ranks."""
    check_has_rows(op, name, x)
    check_divides(op, f"{name}.shape[0]", x.shape[0], team.size)


def check_divides(op: str, name: str, size: int, world_size: int) -> None:
    if size % world_size != 0:
        padded = -(-size // world_size) * world_size
        dim = "M" if name == "M" else "dimension 0"
        raise ValueError(f"{op}: {name}={size} is not divisible by world_size={world_size}; pad {dim} to {padded}")


def check_has_rows(op: str, name: str, x: torch.Tensor) -> None:
    """ValueError unless ``x`` is a tensor with a dimension 0."""
    check_is_tensor(op, name, x)
    if x.dim() == 0:
        raise ValueError(f"{op}: {name} has no dimension 0 to split or join along; pass {name}.reshape(1)")


def check_list(op: str, name: str, value: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``value`` as a list. ValueError unless it is a list or tuple with at least one member."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{op}: {name}={quoted(value)} is neither a tensor nor a list of at least one; pass a tensor")
    return list(value)


def check_choice(op: str, name: str, value: str, choices: Sequence[str]) -> None:
    if type(value) is not str or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{op}: {name}={quoted(value)} is not one of {listed}{did_you_mean(value, choices)}")


def as_words(x: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Bits of ``x``, any strides, as a flat tensor of int words: a view if aligned and dense, else a copy."""
    flat = x.contiguous().view(-1)
    if flat.data_ptr() % word.itemsize != 0:
        flat = flat.clone()
    return flat if flat.dtype == word else flat.view(word)

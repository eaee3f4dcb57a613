"""Argument checks of the public functions of ops, which torch.compile traces through."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from weft.arguments import check_bool, check_int, check_number, did_you_mean, quoted
from weft.runtime.dense import check_dense
from weft.runtime.team.team import Team

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
ITEM_SIZES = (1, 2, 4, 8)


def check_tensor(
    op: str,
    name: str,
    x: torch.Tensor,
    team: Team,
    dtypes: Sequence[torch.dtype] | None = None,
    over_nodes: bool = False,
) -> None:
    """ValueError unless ``x`` is on the team's device, in one of ``dtypes`` (None: of 1, 2, 4 or 8 bytes).

    over_nodes  the team may have several nodes
    """
    try:
        # An eager call takes the host about 20 µs, so the error is only looked for once there is one.
        fits = x.dtype.itemsize in ITEM_SIZES if dtypes is None else x.dtype in dtypes
        fits = fits and x.device == team.device and x.layout is torch.strided
    except AttributeError:
        fits = False
    if not fits or not isinstance(team, Team):
        _refuse_tensor(op, name, x, team, dtypes)
    elif team.rail is not None and not over_nodes:
        check_one_node(op, team)


def _refuse_tensor(op: str, name: str, x: torch.Tensor, team: Team, dtypes: Sequence[torch.dtype] | None) -> None:
    check_is_tensor(op, name, x)
    if not isinstance(team, Team):
        check_team(op, team)
    if x.device != team.device:
        raise ValueError(
            f"{op}: {name} is on {x.device} and team '{team.name}' on {team.device}; "
            f"move it with {name}.to(team.device)"
        )
    if dtypes is None:
        raise ValueError(
            f"{op}: {name}.dtype={x.dtype} has {x.dtype.itemsize} bytes an element, not 1, 2, 4 or 8; "
            f"pass {name}.view(...) with such a dtype"
        )
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(f"{op}: {name}.dtype={x.dtype} is not one of {allowed}; convert it with {name}.to(...)")


def check_is_tensor(op: str, name: str, x: torch.Tensor) -> None:
    """ValueError unless ``x`` is a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{op}: {name}={quoted(x)} is not a tensor; pass a torch.Tensor")
    check_dense(f"{op}: {name}", x)


def check_team(op: str, team: Team, over_nodes: bool = False) -> torch.device:
    """The team's device. ValueError unless ``team`` is a Team, of one node unless ``over_nodes``."""
    if not isinstance(team, Team):
        raise ValueError(f"{op}: team={quoted(team)} is not a Team; pass the team of weft.init() or of main(team)")
    if not over_nodes:
        check_one_node(op, team)
    return team.device


def check_one_node(op: str, team: Team) -> None:
    """ValueError for a team of several nodes, with which the op does not work."""
    if team.rail is not None:
        raise ValueError(f"{op}: the team has {team.shape}, and this op works within a node; pass team.node")


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
        raise ValueError(
            f"{op}: {name}={size} is not divisible by world_size={world_size}; pad dimension 0 to {padded}"
        )


def check_has_rows(op: str, name: str, x: torch.Tensor) -> None:
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

"""Checks of a call: its tensors, its team, and that all ranks pass the same sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.arguments import quoted
from weft.runtime.dense import check_dense
from weft.runtime.team.team import COMPARING, Team

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
    except (AttributeError, TypeError):  # TypeError: of a Team in the place of the tensor
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


def agree(op: str, team: Team, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """ValueError on all ranks unless ``values``, called ``names``, are the same on all.

    Kernels of different calls would wait for each other without end. The ranks exchange each set of values once; the rendezvous
    reports a rank that exchanges alone. A team that compares calls compares each.
    """
    if team.name in COMPARING:
        team.compare(op, {name: str(value) for name, value in zip(names, values, strict=True)})
    seen = team.workspace("agreed calls", set)
    if (op, values) in seen:
        return
    by_rank = team.exchange((op, names, values))
    if any(of_rank != by_rank[0] for of_rank in by_rank):
        calls = [{"op": name, **dict(zip(named, given, strict=True))} for name, named, given in by_rank]
        different = [
            f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(passed))}"
            for name in ("op", *names)
            if len(set(passed := [call.get(name) for call in calls])) > 1
        ]
        raise ValueError(f"{op}: {'; '.join(different)}; pass the same on all ranks")
    seen.add((op, values))

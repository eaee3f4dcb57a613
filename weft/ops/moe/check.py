"""Checks of what the ops of a mixture of experts take: choices, a rank's experts, what was dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.arguments import quoted
from weft.kernels.fp8 import E4M3
from weft.ops.local import check_like, check_shape
from weft.ops.moe.routing import MAX_CHOICES, Dispatched, Experts, Routing
from weft.ops.registration import FLOATS

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """True if gradients of one of ``tensors`` are asked for."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def check_experts(op: str, experts: Experts) -> None:
    """ValueError unless ``experts`` are a rank's."""
    if not isinstance(experts, Experts):
        raise ValueError(
            f"{op}: experts={quoted(experts)} is not an Experts; pass weft.ops.Experts(total, first, count)"
        )


def check_share(op: str, experts: Experts, team: Team, in_node: bool = False) -> int:
    """``Experts.sharers`` of this rank. ValueError unless ``experts`` are an equal share of all.

    in_node  the ranks that share them must lie in one node
    """
    check_experts(op, experts)
    try:
        tp = experts.sharers(team.rank, team.size)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    if in_node and team.shape.node_size % tp:
        raise ValueError(
            f"{op}: experts={experts} are shared by {tp} ranks, which node_size={team.shape.node_size} is no multiple of; "
            f"take a tp that divides it"
        )
    return tp


def check_choices(op: str, ids: torch.Tensor) -> None:
    """ValueError unless a token of ``ids`` [T, k] has as many choices as kernels take."""
    check_shape(op, "ids", ids, ("T", "k"))
    if not 1 <= ids.shape[1] <= MAX_CHOICES:
        raise ValueError(f"{op}: ids has shape {tuple(ids.shape)}; a token has 1 to {MAX_CHOICES} choices")


def check_routing(
    op: str, routing: Routing, device: torch.device, dtypes: Sequence[torch.dtype] = FLOATS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) of ``routing``. ValueError unless they fit each other. dtypes: of the weights."""
    if not isinstance(routing, Routing):
        raise ValueError(f"{op}: routing={quoted(routing)} is not a Routing; weft.ops.route gives one")
    ids, weights = routing
    check_like(op, "ids", ids, device, (torch.int32,))
    check_like(op, "weights", weights, device, dtypes)
    check_choices(op, ids)
    check_shape(op, "weights", weights, ids.shape)
    return ids, weights


def check_sent(op: str, dtype: torch.dtype | None, team: Team) -> bool:
    """True if rows are sent in fp8. ValueError unless rows can be sent in ``dtype``; None: their own."""
    if dtype not in (None, E4M3):
        raise ValueError(
            f"{op}: dtype={quoted(dtype)} is not None or {E4M3}; rows are sent in x's dtype or in that one"
        )
    if dtype is not None and team.rail is not None:
        raise ValueError(f"{op}: dtype={dtype} is sent within one node, and the team has {team.shape}; leave it out")
    return dtype is not None


def check_dispatched(op: str, dispatched: Dispatched, team: Team, in_node: bool = False) -> int:
    """``check_share`` of what was dispatched. ValueError unless it has choices of all ranks' tokens."""
    if not isinstance(dispatched, Dispatched):
        raise ValueError(f"{op}: dispatched={quoted(dispatched)} is not a Dispatched; weft.ops.moe_dispatch gives one")
    ids, _ = check_routing(op, dispatched.routing, team.device)
    if len(ids) % team.size:
        raise ValueError(f"{op}: ids has {len(ids)} rows; it has one for each of W * max_tokens tokens, W={team.size}")
    return check_share(op, dispatched.experts, team, in_node)

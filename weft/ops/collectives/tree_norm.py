"""Plan of an invariant all_reduce_rms_norm: one kernel, or an all-reduce and a norm, of the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.costs import fitted, pushes
from weft.costs.choice import least
from weft.costs.gpu import gpu_of
from weft.costs.pushes import NORM_PART, NORM_PROGRAMS
from weft.kernels.slices import SLICES
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import CollectiveCall, NormCall, OneShot, TwoShot
from weft.ops.collectives.tree import Tree, check_ranks
from weft.ops.registration import HALVES
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv
from weft.runtime.codec import exchangeable
from weft.transport.plans import PushPlan

HOPS = {"one_shot": OneShot, "two_shot": TwoShot}


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class TreeThenNorm:
    """An all-reduce in a tree, then ``add_rms_norm(invariant=True)``."""

    reduce: Planned


def planned(op: str, call: NormCall, machine: Machine) -> Planned:
    """Plan of one kernel while all its tiles are resident at once; else of two.

    ValueError where no tree spans the ranks.
    """
    check_ranks(op, machine)
    rows, push = call.nbytes // max(1, call.row_bytes), push_of_parts(call.row_bytes, machine.caps.sms)
    parts = cdiv(call.row_bytes, push.row_bytes)
    at_once = NORM_PROGRAMS * machine.caps.sms // parts
    tiles = {"one_shot": rows, "two_shot": cdiv(rows, machine.world_size)}
    width = call.row_bytes // call.dtype.itemsize
    sizes = rows, width, call.dtype.itemsize, machine.world_size
    times = pushes.all_reduce_rms_norm(gpu_of(machine.caps), fitted.read(), *sizes)
    resident = {name: time for name, time in times.items() if tiles[name] <= at_once}
    if not resident:
        reduce = ALL_REDUCE.plan(CollectiveCall(call.nbytes, call.dtype, invariant=True), machine)
        reason = f"invariant: {rows} rows in {parts} parts are not resident at once, so the norm follows the all-reduce"
        return Planned("tree_then_norm", TreeThenNorm(reduce=reduce), reason)
    name, reason = least(resident, machine.caps)
    hops = Planned(name, HOPS[name](push=push), reason)
    return Planned(
        "tree", Tree(hops=hops), f"invariant: nodes in rank order, and the norm in the same kernel; {reason}"
    )


def push_of_parts(row_bytes: int, sms: int) -> PushPlan:
    """Cut of a row into parts, no more than SMs, each a power of two long as ``sum_of_rows`` needs it."""
    part = NORM_PART
    while cdiv(row_bytes, part) > sms:
        part *= 2
    return PushPlan(transport="lamport", row_bytes=part, num_warps=1, programs_per_sm=NORM_PROGRAMS)


def check(op: str, x: torch.Tensor, residual: torch.Tensor, world_size: int, algorithm: str, factored: bool) -> None:
    """ValueError for arguments that ``invariant=True`` does not go with."""
    if algorithm != AUTO:
        raise ValueError(f"{op}: algorithm={algorithm!r} with invariant=True, which is a tree; leave algorithm out")
    if factored:
        raise ValueError(f"{op}: factored=True with invariant=True, whose norms are whole; leave factored out")
    if x.dtype not in HALVES:
        raise ValueError(f"{op}: invariant=True with x of {x.dtype}; pass bfloat16 or float16")
    most = SLICES // world_size
    if x.dim() == residual.dim() + 1 and x.shape[0] not in [count for count in (1, 2, 4, 8) if count <= most]:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, {x.shape[0]} nodes; with invariant=True on {world_size} ranks a rank has a "
            f"power of two of nodes, at most {most}"
        )

"""Plan of an invariant all_reduce_rms_norm: one kernel, or an all-reduce and a norm, of the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from weft.costs import fitted, pushes
from weft.costs.choice import least
from weft.costs.gpu import gpu_of
from weft.kernels.slices import SLICES
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import CollectiveCall, NormCall, OneShot, TwoShot
from weft.ops.collectives.tree import Tree, check_ranks
from weft.ops.knobs import design_type
from weft.ops.registration import HALVES
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.transport.plans import PushPlan

Default = Callable[[str, NormCall, Machine], OneShot | TwoShot]


@design_type
class TreeThenNorm:
    """An all-reduce in a tree, then ``add_rms_norm(invariant=True)``."""

    reduce: Planned


def planned(op: str, call: NormCall, machine: Machine, default: Default) -> Planned:
    """Plan of one kernel while all its tiles are resident at once; else of two.

    default: that of the op. ValueError where no tree spans the ranks.
    """
    check_ranks(op, machine)
    rows = call.nbytes // call.row_bytes
    tiles = {"one_shot": rows, "two_shot": cdiv(rows, machine.world_size)}
    sizes = rows, call.row_bytes // call.dtype.itemsize, call.dtype.itemsize, machine.world_size
    times = pushes.all_reduce_rms_norm(gpu_of(machine.caps), fitted.read(), *sizes)
    hops = {name: in_powers_of_two(default(name, call, machine)) for name in times}
    resident = {name: us for name, us in times.items() if fits(hops[name].push, tiles[name], call, machine)}
    if not resident:
        reduce = ALL_REDUCE.plan(CollectiveCall(call.nbytes, call.dtype, invariant=True), machine)
        reason = f"invariant: programs of {rows} rows are not resident at once, so the norm follows the all-reduce"
        return Planned("tree_then_norm", TreeThenNorm(reduce=reduce), reason)
    name, reason = least(resident, machine.caps)
    tree = Tree(hops=Planned(name, hops[name], reason))
    return Planned("tree", tree, f"invariant: nodes in rank order, and the norm in the same kernel; {reason}")


def in_powers_of_two(hops: OneShot | TwoShot) -> OneShot | TwoShot:
    """The design with parts of rows a power of two long, as ``sum_of_rows`` needs them."""
    return replace(hops, push=replace(hops.push, row_bytes=next_power_of_2(hops.push.row_bytes)))


def fits(push: PushPlan, tiles: int, call: NormCall, machine: Machine) -> bool:
    """True if programs for all parts of ``tiles`` tiles are resident at once."""
    return tiles * cdiv(call.row_bytes, push.row_bytes) <= push.programs_per_sm * machine.caps.sms


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

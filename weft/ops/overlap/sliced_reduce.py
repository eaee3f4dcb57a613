"""GEMM over each rank's slices of K, and an all-reduce of their nodes in a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.kernels.fp8 import Fp8
from weft.kernels.slices import SLICES
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.gemm import sliced
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.knobs import design_type
from weft.ops.overlap.operands import Operand, quantized
from weft.plan.planned import Machine, Planned

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class SlicedReduce:
    """GEMM of a rank's slices of K, then an all-reduce of their nodes.

    The all-reduce adds up the nodes of several programs as it reads them.
    """

    gemm: Planned
    collective: Planned


def planned(op: str, call: GemmCall, machine: Machine) -> Planned:
    """Plan of a call whose ranks each have 1/W of K. ValueError where eight slices do not divide it."""
    nbytes = call.M * call.N * call.dtype.itemsize
    reduce = ALL_REDUCE.plan(CollectiveCall(nbytes, call.dtype, invariant=True), machine)
    gemm = sliced.planned(op, call, (SLICES // machine.world_size, SLICES), machine.caps)
    return Planned("sliced", SlicedReduce(gemm=gemm, collective=reduce), f"{gemm.reason}; {reduce.reason}")


def run(
    op: str, design: SlicedReduce, team: Team, a: Operand, b: Operand, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of a @ b.T over the ranks: ``into``, or a new tensor."""
    return ALL_REDUCE.run_of_nodes(design.collective.design, team, nodes(op, design, team, a, b), a.dtype, into)


def nodes(op: str, design: SlicedReduce, team: Team, a: Operand, b: Operand) -> torch.Tensor:
    """Nodes over this rank's slices, [count, M, N]."""
    slices = SLICES // team.size
    step = sliced.step_of(op, a.shape[1], slices, SLICES, isinstance(b, Fp8))
    return sliced.run(design.gemm.design, quantized(a, b), b, slices, rounded=True, step=step, dtype=a.dtype)

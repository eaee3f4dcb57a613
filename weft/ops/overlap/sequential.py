"""The design without overlap: a GEMM and a collective, one after the other; and the checks that overlapped ops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.ops.gemm.gemm_op import GemmCall, GemmOp
from weft.ops.gemm.matmul import MATMUL
from weft.plan.planned import Machine, Planned
from weft.plan.table import Found

# Rows of the whole GEMM up to which cuBLAS's GEMM and weft's collective, one after the other, win: the overlap
# saves less than smaller GEMMs lose.
SEQUENTIAL_ROWS = 512


def rows_overlap(M: int) -> bool:
    """True if a GEMM of ``M`` rows, of all ranks together, is long enough to overlap with a collective."""
    return M > SEQUENTIAL_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """A GEMM of each rank and a collective. collective: None where there is one rank."""

    gemm: Planned
    collective: Planned | None = None


class Overlapped(GemmOp):
    """What the three overlapped ops share in choosing."""

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
        if machine.world_size == 1:
            gemm = MATMUL.plan(_alone(call), machine)
            return Planned("sequential", Sequential(gemm=gemm), f"one rank: nothing to send; {gemm.reason}", gemm.row)
        return super().choose(call, machine)

    def found(self, call: GemmCall, machine: Machine) -> Found | None:
        found = super().found(call, machine)
        # Rows of larger GEMMs say nothing of one below the crossover.
        return None if found and call.M <= SEQUENTIAL_ROWS < found.row.shape[0] else found

    def from_row(self, row: Any, call: GemmCall, machine: Machine) -> Any:
        # The row says that the steps are sequential; the steps have plans of their own.
        return (
            self.default(row.design, call, machine)
            if row.design == "sequential"
            else super().from_row(row, call, machine)
        )


def _alone(call: GemmCall) -> GemmCall:
    """The same GEMM on one rank, where a pipelined design, which has one step, and a sequential one are cuBLAS's GEMM."""
    alone = {"fused": "persistent", "pipelined": "cublas", "sequential": "cublas"}
    return GemmCall(call.M, call.N, call.K, call.dtype, call.aligned, design=alone.get(call.design, call.design))

"""Design without overlap, a GEMM and then a collective; and the base of the overlapped ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.ops.gemm.gemm_op import GemmCall, GemmOp
from weft.ops.gemm.matmul import MATMUL
from weft.plan.planned import Machine, Planned
from weft.plan.table import Found
from weft.runtime.codec import exchangeable

# Rows of the whole GEMM up to which a cuBLAS GEMM followed by a collective is fastest: overlap saves less time than the
# smaller GEMMs lose.
SEQUENTIAL_ROWS = 512


def rows_overlap(M: int) -> bool:
    """True if a GEMM of ``M`` rows, of all ranks together, is long enough to overlap with a collective."""
    return M > SEQUENTIAL_ROWS


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """GEMM of each rank and a collective, one after the other. collective: None on one rank."""

    gemm: Planned
    collective: Planned | None = None


class Overlapped(GemmOp):
    """Base of the three overlapped ops: the part of planning that they share."""

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
        if machine.world_size == 1:
            gemm = MATMUL.plan(_alone(call), machine)
            return Planned("sequential", Sequential(gemm=gemm), f"one rank: nothing to send; {gemm.reason}", gemm.row)
        return super().choose(call, machine)

    def rule(self, call: GemmCall, machine: Machine) -> tuple[str, str]:
        if machine.caps.is_simulated:
            return "fused", "simulated ranks run weft's own kernel"
        if call.M <= SEQUENTIAL_ROWS:
            return "sequential", f"M={call.M} <= {SEQUENTIAL_ROWS}: too little to overlap"
        return "pipelined", "cuBLAS computes each rank's rows while copy engines carry the others'"

    def found(self, call: GemmCall, machine: Machine) -> Found | None:
        found = super().found(call, machine)
        # A row of a GEMM above the crossover does not hold below it.
        return None if found and call.M <= SEQUENTIAL_ROWS < found.row.shape[0] else found

    def config_of(self, design: Any) -> dict[str, Any]:
        return {} if isinstance(design, Sequential) else super().config_of(design)

    def from_row(self, row: Any, call: GemmCall, machine: Machine) -> Any:
        # The row decides that the steps are sequential; each step has its own plan.
        return (
            self.default(row.design, call, machine)
            if row.design == "sequential"
            else super().from_row(row, call, machine)
        )


def _alone(call: GemmCall) -> GemmCall:
    """Call of the GEMM on one rank, where the pipelined and the sequential design are a cuBLAS GEMM."""
    alone = {"fused": "persistent", "pipelined": "cublas", "sequential": "cublas"}
    return GemmCall(call.M, call.N, call.K, call.dtype, call.aligned, design=alone.get(call.design, call.design))

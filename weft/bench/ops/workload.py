"""Workload of an op: shapes of one op of the registry (weft.ops.op)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.harness.limits import Limits
from weft.bench.harness.provider import Provider
from weft.bench.harness.workload import DTYPES, Shape, Workload
from weft.bench.ops.problem import MOST_SETS, OpProblem
from weft.bench.ops.providers import providers_for
from weft.bench.ops.shapes import FORMS, computes, has_flops, op_of
from weft.kernels.fp8 import E4M3
from weft.ops.gemm.gemm_op import FP8
from weft.ops.op import Op

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWorkload(Workload):
    """Workload of the op of this name or alias, or of a variant of it (``VARIED``)."""

    @property
    def op(self) -> Op:
        return op_of(self.name)

    @property
    def fields(self) -> dict[str, bool]:
        """Fields of the calls, by the variants in the name."""
        return dict.fromkeys(self.name.split("+")[1:], True)

    @property
    def unit(self) -> str:
        if not computes(self.op):
            return "busbw GB/s"
        return "TFLOP/s" if has_flops(self.op) else "GB/s"

    @property
    def axis(self) -> str:
        return FORMS[self.op.form].axis

    def available(self) -> tuple[Provider, ...]:
        return providers_for(self.name, self.baselines)

    def problem(self, shape: Shape, team: Team, **fields: bool) -> OpProblem:
        """``fields``: of the call, beside the name's."""
        return OpProblem(self.op, shape, self.dtype, team, **self.fields, **fields)

    @property
    def check_rule(self) -> str:
        return (
            "every answer against plain torch in fp64 before timing, and once more as it is timed, alone and in a row"
        )

    def protocol(self, common: dict[str, Any], quick: bool) -> dict[str, Any]:
        data = f"random; several sets in rotation, at most {MOST_SETS}: 120 MB of weights lie between two uses of one"
        if computes(self.op):
            return common | {"data": data}
        in_a_row = "; baselines that reduce in place continue with their own sums, which grow and are not checked"
        return common | {
            "data": data,
            "in a row": common["in a row"] + in_a_row,
            "input of a collective": "written on the same stream just before the barrier, not timed",
        }

    # --- traffic -----------------------------------------------------------------------------------------------------

    def moved_bytes(self) -> int:
        kind = DTYPES[self.dtype]
        return max((self.op.moved_bytes(shape.size, kind) for shape in self.shapes), default=0)

    def wire_bytes(self, world_size: int, size: Sequence[int]) -> int:
        """Minimum number of bytes that each rank must send."""
        return self.op.traffic_of(self.op.case_of(size, DTYPES[self.dtype], world_size, **self.fields))

    def floor_us(self, world_size: int, size: Sequence[int], limits: Limits | None) -> float | None:
        """Wire time + one hop for a collective; max(T_compute, T_memory, T_comm) for an op that computes."""
        if limits is None or (computes(self.op) and self.dtype == "fp32"):
            return None
        wire = self.wire_bytes(world_size, size) / limits.link
        if not computes(self.op):
            return (wire + (limits.latency if world_size > 1 else 0.0)) * 1e6
        op, kind, flops = self.op, DTYPES[self.dtype], limits.flops
        if op.form == "gemm" and {*FP8} & {*self.fields}:
            kind, flops = E4M3, 2 * flops  # tensor cores multiply bytes twice as fast
        gemm = max(self._flops(world_size, size) / flops, op.memory_bytes(size, kind) / limits.memory)
        return max(gemm, wire) * 1e6

    def rate(self, world_size: int, size: Sequence[int], microseconds: float) -> float:
        """Bus bandwidth of a collective (nccl-tests' busbw), a GEMM's TFLOP/s, or GB/s of a rank's memory."""
        if not computes(self.op):
            return self.wire_bytes(world_size, size) / microseconds / 1e3
        if has_flops(self.op):
            return self._flops(world_size, size) / microseconds / 1e6
        return self.op.memory_bytes(size, DTYPES[self.dtype]) / microseconds / 1e3

    def _flops(self, world_size: int, size: Sequence[int]) -> float:
        """Floating-point operations of each rank."""
        return self.op.flops(size) / (world_size if self.op.form == "prefill" else 1)

"""Workload of an op: shapes of one op of the registry (weft.ops.op)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.harness.limits import Limits
from weft.bench.harness.provider import Provider
from weft.bench.harness.workload import DTYPES, Shape, Workload
from weft.bench.ops.problem import MOST_SETS, OpProblem
from weft.bench.ops.providers import choose
from weft.bench.ops.shapes import RATED_BY_FLOPS, op_of
from weft.ops.op import Op

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWorkload(Workload):
    """Workload of the op of this name or alias."""

    @property
    def op(self) -> Op:
        return op_of(self.name)

    @property
    def rated_by_flops(self) -> bool:
        """True for an op that is rated by its operations; others are rated by their bytes on the wire."""
        return self.op.form in RATED_BY_FLOPS

    def providers(self, simulated: bool = False) -> tuple[Provider, ...]:
        return choose(self.name, self.words, simulated)

    def problem(self, shape: Shape, team: Team, **fields: bool) -> OpProblem:
        """``fields``: of the call."""
        return OpProblem(self.op, shape, self.dtype, team, **fields)

    @property
    def check_rule(self) -> str:
        return (
            "every answer against plain torch in fp64 before timing, and once more as it is timed, alone and in a row"
        )

    def protocol(self, common: dict[str, Any], quick: bool) -> dict[str, Any]:
        data = f"random; several sets in rotation, at most {MOST_SETS}: 120 MB of weights lie between two uses of one"
        if self.rated_by_flops:
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
        kind = DTYPES[self.dtype]
        return self.op.traffic(self.op.case_of(size, kind, world_size).sizes, kind, world_size)

    def floor_us(self, world_size: int, size: Sequence[int], limits: Limits | None) -> float | None:
        """Wire time + one hop for a collective, max(T_gemm, T_comm) for a GEMM op."""
        if limits is None or (self.rated_by_flops and self.dtype == "fp32"):
            return None
        wire = self.wire_bytes(world_size, size) / limits.link
        if not self.rated_by_flops:
            return (wire + (limits.latency if world_size > 1 else 0.0)) * 1e6
        op, kind = self.op, DTYPES[self.dtype]
        gemm = max(op.flops(size) / limits.flops, op.memory_bytes(size, kind) / limits.memory)
        return max(gemm, wire) * 1e6

    def rate(self, world_size: int, size: Sequence[int], microseconds: float) -> float:
        """GB/s of bus bandwidth (nccl-tests' busbw) for a collective, TFLOP/s of one rank for a GEMM op."""
        if self.rated_by_flops:
            return self.op.flops(size) / microseconds / 1e6
        return self.wire_bytes(world_size, size) / microseconds / 1e3

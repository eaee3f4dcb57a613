"""Workload of ``weft bench train``: a decoder layer's forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.harness.baselines import baselines_for
from weft.bench.harness.limits import Limits
from weft.bench.harness.provider import Provider
from weft.bench.harness.workload import DTYPES, Shape, Workload
from weft.bench.training.problem import TrainProblem
from weft.bench.training.providers import PROVIDERS
from weft.bench.training.shapes import LayerShape

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorkload(Workload):
    """Forward and backward of a decoder layer: its output, and gradients of its input and of four weights."""

    @property
    def unit(self) -> str:
        return "TFLOP/s"

    @property
    def axis(self) -> str:
        return "sequences x tokens"

    def available(self) -> tuple[Provider, ...]:
        return (*PROVIDERS, *baselines_for(self.name, self.baselines))

    def problem(self, shape: Shape, team: Team) -> TrainProblem:
        return TrainProblem(shape, self.dtype, team)

    @property
    def check_rule(self) -> str:
        return (
            "output and gradients against torch's operations and collectives in fp32: root mean square of a tensor's error "
            "over that of the tensor; before timing, and once more as timed"
        )

    def protocol(self, common: dict[str, Any], quick: bool) -> dict[str, Any]:
        return common | {
            "data": "random; one layer, whose weights are larger than the caches; gradients are new tensors"
        }

    def moved_bytes(self) -> int:
        """Size of the hidden states of all ranks."""
        sizes = (LayerShape(*shape.size) for shape in self.shapes)
        return max((one.tokens * one.hidden for one in sizes), default=0) * DTYPES[self.dtype].itemsize

    def floor_us(self, world_size: int, size: Sequence[int], limits: Limits | None) -> float | None:
        """max(T_compute, T_comm): four gathers or scatters forward, six backward."""
        if limits is None or self.dtype == "fp32":
            return None
        shape = LayerShape(*size)
        wire = 10 * shape.tokens * shape.hidden * DTYPES[self.dtype].itemsize * (world_size - 1) // world_size
        return max(shape.flops / world_size / limits.flops, wire / limits.link) * 1e6

    def rate(self, world_size: int, size: Sequence[int], microseconds: float) -> float:
        return LayerShape(*size).flops / world_size / microseconds / 1e6

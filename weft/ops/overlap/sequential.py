"""Design without overlap, a GEMM and then a collective; and the base of the overlapped ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weft.costs import fitted
from weft.costs.choice import least
from weft.costs.gemms import LONG, SEQUENTIAL_ROWS, Size, follows
from weft.costs.gpu import gpu_of
from weft.costs.predicted import WEIGHTS
from weft.ops.case import Accuracy, Case
from weft.ops.collectives import fp8_wire
from weft.ops.collectives.over_nodes import OverNodes
from weft.ops.gemm.gemm_op import FP8, GemmCall, GemmOp, named
from weft.ops.gemm.matmul import MATMUL
from weft.ops.knobs import around, design_type
from weft.ops.overlap.operands import Operand, quantized
from weft.ops.registration import check_flag
from weft.plan.planned import AUTO, Machine, Planned
from weft.plan.table import Found, bucket

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# K at which an op that sums over ranks predicts its designs: ranks may hold different shares of K, and must agree.
COMMON_K = 4096


def rows_overlap(M: int) -> bool:
    """True if a GEMM of ``M`` rows, of all ranks together, is long enough to overlap with a collective."""
    return M > SEQUENTIAL_ROWS


@design_type
class Sequential:
    """GEMM of each rank and a collective, one after the other. collective: None on one rank."""

    gemm: Planned
    collective: Planned | None = None


class Overlapped(GemmOp):
    """Base of the three overlapped ops: the part of planning that they share.

    predict  µs by design, of weft.costs.gemms
    judged   designs among which predicted times choose, the first of close ones
    designs_in_fp8  designs whose sums can travel in fp8
    """

    spans_nodes = True
    composed = ("sequential",)
    judged: ClassVar[tuple[str, ...]]
    designs_in_fp8: ClassVar[tuple[str, ...]] = ()
    predict: ClassVar[Callable[..., dict[str, float]]]

    def offers(self, design: str, variants: Sequence[str]) -> bool:
        if "fp8_wire" in variants:
            return design in self.designs_in_fp8
        return design != "fused" or not {*FP8} & {*variants}

    def offered(self, call: GemmCall) -> list[str]:
        """Names of the designs that a call may ask for."""
        variants = [name for name in self.variants if getattr(call, name)]
        return [name for name in self.algorithms[1:] if self.offers(name, variants)]

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
        if call.fp8_wire:
            self._check_wire(call, machine)
        if call.design != AUTO and call.design not in self.offered(call):
            raise ValueError(
                f"{self.name}: design={call.design!r} multiplies rows of 16 bits; pass 'pipelined' for fp8 weights"
            )
        if machine.nodes > 1 and call.fp8 and self.gathers:
            reason = f"{machine.nodes} nodes: fp8 rows are gathered over them, then multiplied"
            return Planned("sequential", self.default("sequential", call, machine), reason)
        if machine.nodes > 1:
            node = self.plan(call._replace(M=call.M // machine.nodes), machine.node)
            return Planned(
                "over_nodes", OverNodes(node=node), f"{machine.nodes} nodes: a node's rows while other rows cross"
            )
        if machine.world_size == 1:
            gemm = MATMUL.plan(_alone(call), machine)
            return Planned("sequential", Sequential(gemm=gemm), f"one rank: nothing to send; {gemm.reason}", gemm.row)
        return super().choose(call, machine)

    def _check_wire(self, call: GemmCall, machine: Machine) -> None:
        """ValueError unless sums of ``call`` can travel in fp8."""
        fp8_wire.check_machine(self.name, call.dtype, machine)
        if call.invariant:
            raise ValueError(f"{self.name}: wire='fp8' with invariant=True, whose sums are of 16 bits; leave out one")
        if call.design != AUTO and call.design not in self.designs_in_fp8:
            known = " or ".join(map(repr, self.designs_in_fp8))
            raise ValueError(f"{self.name}: design={call.design!r} sends sums of 16 bits; with wire='fp8' pass {known}")

    def traffic_of(self, case: Case) -> int:
        return fp8_wire.sent(super().traffic_of(case), case)

    def accuracy(self, case: Case) -> Accuracy:
        exact = super().accuracy(case)
        return fp8_wire.loosened(exact, case) if case.field("fp8_wire") else exact

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        if not (quick and isinstance(design, self.designs.get("fused", ()))):
            most = max(machine.world_size - 1, getattr(design, "span", 1))
            yield from (one for one in around(design) if getattr(one, "span", 1) <= most)

    def planned(
        self, team: Team, a: Operand, bs: Sequence[Operand], own_first: bool, *, into: Sequence[torch.Tensor]
    ) -> None:
        """Compute ``into``, the result for each b, of checked operands, by the plan that ranks agree on."""
        raise NotImplementedError

    def arguments(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Rows in fp8 for an fp8 weight, as norms write them."""
        a, b, _ = named(case, tensors)
        return (quantized(a, b), *tensors[1:])

    def rule(self, call: GemmCall, machine: Machine) -> tuple[str, str]:
        """The least predicted time, in ``judged``'s order among close ones; of many rows, not in sequence."""
        few = follows(call.M, LONG if self.gathers else call.N * call.dtype.itemsize, machine.world_size)
        times, offered = self.times(call, machine), self.offered(call)
        names = [name for name in self.judged if name in offered and (few or call.fp8_wire or name != "sequential")]
        name, reason = least({name: times[name] for name in names}, machine.caps)
        if not few and not call.fp8_wire and times["sequential"] < times[name]:
            reason += f"; sequential {times['sequential']:.3g}, with more of the heap"
        return name, f"{reason}, at K={COMMON_K}" if self.ranks_differ_in_k else reason

    def times(self, call: GemmCall, machine: Machine) -> dict[str, float]:
        """Predicted µs of the designs that are judged, or that send sums in fp8."""
        variant = next((name for name in FP8 if getattr(call, name)), "")
        item, of = call.dtype.itemsize, fitted.shipped(variant)
        K = COMMON_K if self.ranks_differ_in_k else call.K
        weight = WEIGHTS.get(variant, float(item))
        size = Size(call.M, call.N, K, item, weight, call.fp8, call.block_fp8, call.local_first, call.fp8_wire)
        times = type(self).predict(gpu_of(machine.caps), of.gemms, of.pushes, size, machine.world_size)
        return times if call.fp8_wire else {name: times[name] for name in self.judged}

    def table_key(self, call: GemmCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        _, shape, world_size = super().table_key(call, machine)
        return self.variant(call._replace(local_first=False)), shape, world_size

    def row_for(self, call: GemmCall, machine: Machine) -> Found | None:
        best = super().row_for(call, machine)
        if best and best.row.design == "fused" and not call.dense:
            return None
        # Ranks with other shares of K see the same row, and decide by M and N.
        deciding = 2 if self.ranks_differ_in_k else 3
        if best is None or bucket(best.row.shape)[:deciding] == bucket(call[:3])[:deciding]:
            return best
        # A row of another size does not hold beyond a crossover of the predicted times.
        there = call._replace(**dict(zip(("M", "N", "K"), best.row.shape, strict=False)))
        return best if self.rule(there, machine)[0] == self.rule(call, machine)[0] else None


def wire_of(case: Case) -> str:
    """Argument ``wire`` of a case."""
    return "fp8" if case.field("fp8_wire") else "same"


def check_own_first(op: str, own_first: bool, team: Team) -> None:
    """ValueError unless ``own_first`` is a flag, and False for a team of several nodes."""
    check_flag(op, "own_first", own_first)
    if own_first and team.rail is not None:
        raise ValueError(
            f"{op}: own_first=True orders the rows of one node's ranks, and the team has {team.shape}; leave it out"
        )


def _alone(call: GemmCall) -> GemmCall:
    """Call of the GEMM on one rank, where the pipelined and the sequential design are a cuBLAS GEMM."""
    alone = {"fused": "persistent", "pipelined": "cublas", "sequential": "cublas"}
    return call._replace(local_first=False, fp8_wire=False, design=alone.get(call.design, call.design))

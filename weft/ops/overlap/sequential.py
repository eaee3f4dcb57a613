"""Design without overlap, a GEMM and then a collective; and the base of the overlapped ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.ops.case import Case
from weft.ops.collectives.over_nodes import OverNodes
from weft.ops.gemm.gemm_op import FP8, GemmCall, GemmOp, named
from weft.ops.gemm.matmul import MATMUL
from weft.ops.knobs import around
from weft.ops.overlap.operands import Operand, quantized
from weft.ops.registration import check_flag
from weft.plan.planned import AUTO, Machine, Planned
from weft.plan.table import Found, Row
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Rows of the whole GEMM up to which a cuBLAS GEMM followed by a collective is fastest: overlap saves less time than the
# smaller GEMMs lose. Four H200s, AG-GEMM 256x12800x5120: 77 us, overlapped 153 (lab/h200-x4-matmul.json@4c5a438).
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

    spans_nodes = True

    def offers(self, design: str, variants: Sequence[str]) -> bool:
        return design != "fused" or not {*FP8} & {*variants}

    def offered(self, call: GemmCall) -> list[str]:
        """Names of the designs that a call may ask for."""
        variants = [name for name in self.variants if getattr(call, name)]
        return [name for name in self.algorithms[1:] if self.offers(name, variants)]

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
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

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        if not (quick and isinstance(design, self.designs.get("fused", ()))):
            most = max(machine.world_size - 1, getattr(design, "span", 1))
            yield from (one for one in around(design) if getattr(one, "span", 1) <= most)

    def planned(self, team: Team, a: Operand, bs: Sequence[Operand], own_first: bool) -> list[torch.Tensor]:
        """Results for each b, of checked operands, by their plan, on which the ranks agree.

        An op adds ``into``, results of an earlier allocation.
        """
        raise NotImplementedError

    def arguments(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Rows in fp8 for an fp8 weight, as norms write them."""
        a, b, _ = named(case, tensors)
        return (quantized(a, b), *tensors[1:])

    def rule(self, call: GemmCall, machine: Machine) -> tuple[str, str]:
        if call.M <= SEQUENTIAL_ROWS:
            return "sequential", f"M={call.M} <= {SEQUENTIAL_ROWS}: too little to overlap"
        return "pipelined", "cuBLAS computes each rank's rows while copy engines carry other ranks' rows"

    def table_key(self, call: GemmCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        _, shape, world_size = super().table_key(call, machine)
        return self.variant(call._replace(local_first=False)), shape, world_size

    def row_for(self, call: GemmCall, machine: Machine) -> Found | None:
        best = super().row_for(call, machine)
        if best and best.row.design == "fused" and not call.dense:
            return None
        # A row of a GEMM above the crossover does not hold below it.
        return None if best and call.M <= SEQUENTIAL_ROWS < best.row.shape[0] else best

    def config_of(self, design: Any) -> dict[str, Any]:
        return {} if isinstance(design, Sequential) else super().config_of(design)

    def from_row(self, row: Row, call: GemmCall, machine: Machine) -> Any:
        # The row decides that the steps are sequential; each step has a plan.
        return (
            self.default(row.design, call, machine)
            if row.design == "sequential"
            else super().from_row(row, call, machine)
        )


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
    return call._replace(local_first=False, design=alone.get(call.design, call.design))

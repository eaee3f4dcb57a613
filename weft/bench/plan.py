"""What to measure, and how: chosen before any rank starts, written into every report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.bench.problem import DTYPES
from weft.bench.providers import choose
from weft.bench.shapes import Shape

# A weft op's workspace is a few times its largest tensor, in capacities of powers of two that are all kept.
HEAP_FACTOR = 8

EVENTS = "[prepare, barrier of all ranks on the GPU, event, op, event] in one CUDA graph; nothing subtracted"
AROUND = "a CUDA graph of [prepare, barrier, op, op, …] minus one of [prepare, barrier], timed from outside and divided"
CHECK = "every answer against fp32 before timing, and once more as it is timed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One op to measure. ``providers``: names or families of names, all if empty."""

    op: str
    shapes: tuple[Shape, ...]
    dtype: str = "bf16"
    providers: tuple[str, ...] = ()
    check_only: bool = False
    quick: bool = False
    eager: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        choose(self.op, self.providers)  # ValueError for names that do not fit
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")


def heap_bytes(plans: Sequence[Plan]) -> int:
    """Symmetric memory per rank that the GEMM ops' workspaces may need, besides 2 GiB."""
    largest: dict[str, int] = {}
    for plan in plans:
        for shape in plan.shapes:
            if len(shape.size) == 3:
                m, n, k = shape.size
                moved = m * (k if plan.op == "ag-gemm" else n) * DTYPES[plan.dtype].itemsize
                largest[plan.op] = max(largest.get(plan.op, 0), 0 if plan.op == "gemm" else moved)
    return min((2 << 30) + HEAP_FACTOR * sum(largest.values()), 40 << 30)


def protocol(plan: Plan, simulated: bool, empty_us: float | None) -> dict[str, Any]:
    """How the times came about, for the JSON. ``empty_us``: of two events in a graph with nothing between them."""
    if simulated:
        return {"timing": "the host's clock around simulated calls: times mean nothing", "check": CHECK}
    return {
        "timing": AROUND if empty_us is None else EVENTS,
        "in a row": "[prepare all, barrier, event, op, op, …, event] in one CUDA graph, over the number of ops",
        "empty_us": empty_us,
        "alternation": "all providers of a shape in turn in one process, every round starting with another",
        "rounds": "quick" if plan.quick else "full",
        "data": "random; several sets in turn: of weights, so many that 120 MB lie between two uses of one",
        "input of a collective": "written on the same stream just before the barrier, not timed",
        "statistic": "the maximum over the ranks of the median; p10 and p90 of that rank",
        "check": CHECK,
    }

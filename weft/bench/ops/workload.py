"""Plans: shapes, providers and protocol, chosen before any rank starts and written into every report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.models.names import LEVELS
from weft.bench.ops.normed import NormProblem
from weft.bench.ops.problem import MOST_SETS, Problem
from weft.bench.ops.providers import Provider, choose
from weft.bench.ops.shapes import DTYPES, Shape, is_gemm, op_of

if TYPE_CHECKING:
    from weft.bench.harness.meters import Meter
    from weft.bench.harness.runner import Bench
    from weft.runtime.team.team import Team

# Of ops with several results.
PROBLEMS = {"rows": NormProblem}
# A weft op's workspace is a few times its largest tensor, in power-of-two capacities that are all kept.
HEAP_FACTOR = 8

EVENTS = "[prepare, barrier of all ranks on the GPU, event, op, event] in one CUDA graph; nothing subtracted"
AROUND = "a CUDA graph of [prepare, barrier, op, op, …] minus one of [prepare, barrier], timed from outside and divided"
CHECK = "every answer against plain torch in fp64 before timing, and once more as it is timed, alone and in a row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one op. ``providers``: names or families of names, all if empty."""

    op: str
    shapes: tuple[Shape, ...]
    dtype: str = "bf16"
    providers: tuple[str, ...] = ()
    check_only: bool = False
    quick: bool = False
    eager: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        self.chosen()  # ValueError for unknown names
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")

    @property
    def subject(self) -> str:
        """Model of the op; "" if the shapes name it."""
        return ""

    def chosen(self, simulated: bool = False) -> tuple[Provider, ...]:
        return choose(self.op, self.providers, simulated)

    def problem(self, shape: Shape, team: Team, **fields: bool) -> Any:
        """Problem set up at this shape (weft.bench.ops.problem.Problem). ``fields``: of the call."""
        return PROBLEMS.get(op_of(self.op).form, Problem)(self.op, shape, self.dtype, team, **fields)

    def bench(self, team: Team, empty_us: float | None, say: Callable[[str], None]) -> Bench:
        from weft.bench.harness.runner import Bench  # it imports this module

        return Bench(team, self, empty_us, say)

    def parts(self, team: Team, meter: Meter | None) -> dict[str, float] | None:
        """Breakdown of the time of a provider that was timed; None if not requested. Collective."""
        return None

    def moved_bytes(self) -> int:
        """Size of the largest tensor moved between ranks in a GEMM op; 0 if the op needs no more memory."""
        op = op_of(self.op)
        return max((op.moved_bytes(shape.size, DTYPES[self.dtype]) for shape in self.shapes), default=0)

    def protocol(self, simulated: bool, empty_us: float | None) -> dict[str, Any]:
        """Description of the timing for the JSON. ``empty_us``: time between two adjacent events in a graph."""
        if simulated:
            return {"timing": "the host's clock around simulated calls: times mean nothing", "check": CHECK}
        found = {
            "timing": AROUND if empty_us is None else EVENTS,
            "in a row": "[prepare all, barrier, event, op, op, …, event] in one CUDA graph, over the number of ops",
            "empty_us": empty_us,
            "alternation": "all providers of a shape in one process, every round in another order",
            "rounds": "quick" if self.quick else "full",
            "data": f"random; several sets in rotation, at most {MOST_SETS}: 120 MB of weights lie between two uses of one",
            "statistic": "the maximum over the ranks of the median; p10 and p90 of that rank",
            "check": CHECK,
        }
        if self.op in LEVELS or is_gemm(self.op):
            return found
        found["in a row"] += (
            "; baselines that reduce in place continue with their own sums, which grow and are not checked"
        )
        found["input of a collective"] = "written on the same stream just before the barrier, not timed"
        return found


def heap_bytes(plans: Sequence[Plan]) -> int:
    """Symmetric memory per rank for the GEMM ops' workspaces, besides 6 GiB.

    Candidates of `weft tune` for collectives have receive buffers of 1.4 GiB at four ranks and 2.8 at eight, for each of two
    transports.
    """
    largest: dict[str, int] = {}
    for plan in plans:
        largest[plan.op] = max(largest.get(plan.op, 0), plan.moved_bytes())
    return min((6 << 30) + HEAP_FACTOR * sum(largest.values()), 40 << 30)

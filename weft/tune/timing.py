"""Timing of candidates side by side: checked, alternating, the fastest confirmed with the default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.bench.harness import compiling
from weft.bench.harness.bench import Entrant
from weft.bench.harness.provider import Prepared, Provider
from weft.bench.ops.providers import prepared
from weft.tune import spaces

if TYPE_CHECKING:
    from weft.bench.harness.bench import Bench
    from weft.bench.harness.report import Row
    from weft.bench.ops.problem import OpProblem

# Candidates timed together, and the memory that all their CUDA graphs may hold: one result per call.
TOGETHER, GRAPHS_BYTES = 24, 32e9
# Candidates of a group that are timed once more.
FINALISTS = 2


def timed(
    bench: Bench, problem: OpProblem, designs: Sequence[Any], reference: float | None = None
) -> tuple[dict[Any, float], list[tuple[str, str]]]:
    """({design: its time, see `deciding`}, [(candidate, reason why it was dropped)]). Collective.

    reference  time of the first design, the default, in an earlier round

    More than TOGETHER are timed in groups, with the first two designs in each group. The first one and a group's FINALISTS
    are timed once more. GPUs slow down as they warm up, so all times are scaled to the first pass by the default's ratio.
    """
    times: dict[Any, float] = {}
    failed: list[tuple[str, str]] = []
    made = [partial(prepared(problem, design).run, 0) for design in designs]
    compiling.compile_shares(made, bench.team)
    anchors, rest = list(designs[:2]), list(designs[2:])
    together = most_together(problem)
    groups = [rest[at : at + together] for at in range(0, len(rest), together)] or [[]]
    for group in groups:
        entrants: dict[Any, Entrant] = {}
        for design in [*anchors, *group]:
            entrant = enter(bench, problem, design)
            if entrant.single is not None:
                entrants[design] = entrant
            else:
                failed.append((spaces.label(problem.op, design), entrant.row.reason))
        first_times = measured(bench, entrants)
        ordered = [
            design for design in sorted(first_times, key=lambda design: first_times[design]) if design != designs[0]
        ]
        # Equal on all ranks, which have the same times.
        last = [design for design in (designs[0], *ordered[:FINALISTS]) if design in first_times]
        passes = [first_times]
        if len(first_times) > len(last) > 1:
            passes.append(measured(bench, {design: entrants[design] for design in last}))
        reference = reference or first_times.get(designs[0])
        for one in passes:
            times |= scaled(one, designs[0], reference)
        for entrant in entrants.values():
            entrant.leave()
    return times, list(dict.fromkeys(failed))


def measured(bench: Bench, entrants: Mapping[Any, Entrant]) -> dict[Any, float]:
    """Times by which candidates are compared."""
    bench.time(list(entrants.values()))
    return dict(zip(entrants, deciding([entrant.row for entrant in entrants.values()]), strict=True))


def scaled(times: dict[Any, float], default: object, reference: float | None) -> dict[Any, float]:
    """``times`` scaled so that the default takes ``reference``."""
    factor = reference / times[default] if reference and default in times else 1.0
    return {design: us * factor for design, us in times.items()}


def deciding(rows: Sequence[Row]) -> list[float]:
    """µs of a call alone; for collectives, timed in a row too, the geometric mean of both.

    Alone a call pays for its launch, in a row for the work it leaves to the next one; in a model it may be either.
    """
    in_a_row = all(row.chain_us is not None for row in rows)
    return [math.sqrt(row.median_us * row.chain_us) if in_a_row else row.median_us for row in rows]


def most_together(problem: OpProblem) -> int:
    """Largest number of candidates per group at one shape, besides two more in every group."""
    return max(1, min(TOGETHER, int(GRAPHS_BYTES / (problem.result_bytes * problem.replicas)) - 2))


def enter(bench: Bench, problem: OpProblem, design: object) -> Entrant:
    """Entrant of a candidate after all steps but timing; no ``single`` if it was dropped. Collective."""

    def make(problem: OpProblem) -> Prepared:
        made = prepared(problem, design)
        # All ranks exchange the result before any rank launches.
        compiling.compile_only(lambda: made.run(0), problem.team)
        return made

    provider = Provider(name=spaces.label(problem.op, design), ops=(problem.op.alias,), role="weft", make=make)
    return bench.enter_one_design(problem, provider, rows=not problem.computes)

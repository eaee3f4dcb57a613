"""Model benchmark at one rank, with answers compared to eager torch's on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.bench.harness.runner import Bench

if TYPE_CHECKING:
    from weft.bench.harness.report import Row
    from weft.bench.ops.providers import Attempt
    from weft.bench.ops.shapes import Shape


class LevelBench(Bench):
    def problem(self, shape: Shape) -> tuple[Any, str | None]:
        problem, reason = Bench.problem(self, shape)
        if problem is None or reason:
            return None, reason
        distance, reason = self.together(problem.expect, launches=f"eager torch at {shape.label}")
        if reason:
            return None, reason
        problem.agree(self.team.exchange(distance))
        return problem, None

    def rehearsed(self, problem: Any, attempt: Attempt, what: str) -> str | None:
        if attempt.first is None:
            return None
        distances, reason = self.together(attempt.first, launches=what)
        return reason or problem.wrong_first(self.team.exchange(distances)) or None

    def judged(self, row: Row, problem: Any, attempt: Attempt, out: Any, complaint: str) -> Row:
        row = Bench.judged(self, row, problem, attempt, out, complaint)
        if row.reason or attempt.chosen is None:
            return row
        choices, reason = self.together(lambda: problem.choices(out, attempt.chosen))
        if reason:
            return replace(row, reason=f"could not be checked: {reason}")
        wrong = problem.wrong_choice(self.team.exchange(choices))
        return replace(row, reason=f"{complaint}: {wrong}" if wrong else None)

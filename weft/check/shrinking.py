"""The simplest schedule that still shows a finding: fewer ranks, fewer preemptions, fewer programs at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.check.report import Found, Schedule

if TYPE_CHECKING:
    from weft.check.run import Outcome, Runner

# Runs that may be spent on one report, and schedules of one strategy that are tried.
_RUNS = 16
_SEEDS = 3


class Shrinking:
    """Search for simpler schedules: each must show its finding again, and none but those of ``known`` causes.

    Runs are remembered, as findings often have one schedule in common."""

    def __init__(self, runner: Runner, known: Collection[tuple]) -> None:
        self._runner, self._known = runner, known
        self._outcomes: dict[Schedule, Outcome] = {}

    def shrunk(self, found: Found) -> Schedule:
        if found.finding.kind == "divergence":
            return self._pair(found.replay)
        simple = next((s for s in _simpler(found.replay) if self._shows(s, found.finding.cause)), found.replay)
        for sms in (1, 2):
            fewer = replace(simple, sms=sms)
            if sms < self._programs(simple) and self._shows(fewer, found.finding.cause):
                return fewer
        return simple

    def _outcome(self, schedule: Schedule) -> Outcome | None:
        """None where the runs are spent."""
        if schedule not in self._outcomes and len(self._outcomes) < _RUNS:
            self._outcomes[schedule] = self._runner.run(schedule)
        return self._outcomes.get(schedule)

    def _shows(self, schedule: Schedule, cause: tuple) -> bool:
        outcome = self._outcome(schedule)
        if outcome is None:
            return False
        shown = {finding.cause for finding in outcome.causes if finding.allowed is None}
        return cause in shown and shown <= self._known

    def _programs(self, schedule: Schedule) -> int:
        outcome = self._outcome(schedule)
        return outcome.programs if outcome is not None else 0

    def _pair(self, known: Schedule) -> Schedule:
        """Two schedules with consecutive seeds whose results differ, or the range that is known to hold two."""
        for strategy in ("pct", "uniform"):
            before: Any = None
            for seed in range(2 * _SEEDS):
                outcome = self._outcome(replace(known, strategy=strategy, seed=seed, runs=1))
                digest = outcome.digest if outcome is not None and not outcome.findings else None
                if before is not None and digest is not None and digest != before:
                    return replace(known, strategy=strategy, seed=seed - 1, runs=2)
                before = digest
        return known


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Candidates, the simplest first: two ranks before more; no preemption before one; late stores where they were."""
    sizes = [size for size in (2, 3) if size < schedule.world_size]
    for size in [*sizes, schedule.world_size]:
        for depth in (1, 2):
            for seed in range(_SEEDS):
                yield replace(schedule, world_size=size, strategy="pct", seed=seed, depth=depth)
        if schedule.strategy == "delay":
            for seed in range(_SEEDS):
                yield replace(schedule, world_size=size, seed=seed)

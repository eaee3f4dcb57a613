"""Search for the simplest schedule of a finding: fewer ranks, preemptions and resident programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from weft.check.digests import Digest
from weft.check.report import Found, Schedule
from weft.check.runner import Outcome, Runner

# Most runs for one report, and seeds tried for one strategy.
_RUNS = 16
_SEEDS = 3


class Shrinking:
    """Search for simpler schedules.

    Each must show its finding again, and only findings of ``known`` causes. Outcomes are cached, since several findings
    often share a schedule.
    """

    def __init__(self, runner: Runner, known: Collection[tuple]) -> None:
        self._runner, self._known = runner, known
        self._outcomes: dict[Schedule, Outcome] = {}

    def shrunk(self, entry: Found) -> Schedule:
        if entry.finding.kind == "divergence":
            return self._pair(entry.replay)
        simple = next((s for s in _simpler(entry.replay) if self._shows(s, entry.finding.cause)), entry.replay)
        for sms in (1, 2):
            fewer = replace(simple, sms=sms)
            if sms < self._programs(simple) and self._shows(fewer, entry.finding.cause):
                return fewer
        return simple

    def _outcome(self, schedule: Schedule) -> Outcome | None:
        """Outcome of a schedule; None if no runs are left."""
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
        """Two schedules with consecutive seeds and different results, or else the range known to contain two."""
        for strategy in ("pct", "uniform"):
            before: Digest | None = None
            for seed in range(2 * _SEEDS):
                outcome = self._outcome(replace(known, strategy=strategy, seed=seed, runs=1))
                digest = outcome.digest if outcome is not None and not outcome.findings else None
                if before is not None and digest is not None and digest != before:
                    return replace(known, strategy=strategy, seed=seed - 1, runs=2)
                before = digest
        return known


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Candidates, simplest first: two ranks before more, no preemption before one."""
    sizes = [size for size in (2, 3) if size < schedule.world_size and size % (schedule.node_size or 1) == 0]
    for size in [*sizes, schedule.world_size]:
        for depth in (1, 2):
            for seed in range(_SEEDS):
                yield replace(schedule, world_size=size, strategy="pct", seed=seed, depth=depth)
        if schedule.strategy == "delay":
            for seed in range(_SEEDS):
                yield replace(schedule, world_size=size, seed=seed)

"""Findings of many runs, merged by cause and listed under their causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.check.detector.advice import early_load
from weft.check.detector.findings import Finding
from weft.check.digests import Digest, first_difference
from weft.check.folding import Seen, causes_of
from weft.check.report import Found, Schedule
from weft.check.runner import Outcome


class Gathered:
    """Findings of all runs so far, by cause."""

    def __init__(self, strategy: str, deterministic: bool, on_results: Callable[[list[Any]], None] | None) -> None:
        self.runs, self._strategy, self._deterministic, self._on_results = 0, strategy, deterministic, on_results
        self._found: dict[tuple, Found] = {}
        self._seen: dict[tuple, set[int]] = {}
        self._digests: dict[tuple[int, int], tuple[Digest, Schedule]] = {}  # by world size and SMs
        self._runs_of: dict[int, set[int]] = {}  # by world size

    def add(self, schedule: Schedule, outcome: Outcome) -> None:
        self.runs += 1
        self._runs_of.setdefault(schedule.world_size, set()).add(self.runs)
        for finding, count in outcome.findings:
            self._merge(finding, count, schedule)
        if outcome.digest is not None and self._on_results is not None:
            self._on_results(outcome.results)
        if outcome.digest is not None and self._deterministic:
            size = schedule.world_size
            first, other = self._digests.setdefault((size, schedule.sms), (outcome.digest, schedule))
            where = first_difference(first, outcome.digest)
            if where:
                text = (
                    f"{where} differs bitwise between strategy {other.strategy}, seed {other.seed} and strategy "
                    f"{schedule.strategy}, seed {schedule.seed} at world size {size}"
                )
                both = self._range(other, schedule)
                self._merge(Finding(kind="divergence", message=text), 1, both, ("divergence", size))

    def _range(self, first: Schedule, last: Schedule) -> Schedule:
        """Schedule that repeats both."""
        if last.strategy == "exhaustive":
            return last
        strategy = last.strategy if self._strategy != "mix" else "mix"
        return replace(last, strategy=strategy, seed=first.seed, runs=last.seed - first.seed + 1)

    def _merge(self, finding: Finding, count: int, schedule: Schedule, cause: tuple | None = None) -> None:
        cause = cause or finding.cause
        old = self._found.get(cause)
        if old is None:
            self._found[cause] = Found(finding=finding, count=count, schedules=1, replay=schedule)
        else:
            self._found[cause] = replace(old, count=old.count + count, schedules=old.schedules + 1)
        # A wait that sees a later value orders more than it asks for, which may hide a race in a run with wrong results. So
        # findings of all runs of the world size may explain a divergence.
        runs = self._runs_of[schedule.world_size] if finding.kind == "divergence" else (self.runs,)
        self._seen.setdefault(cause, set()).update(runs)

    def found(self) -> list[Found]:
        """Findings, each with its consequences."""
        every = [(self._found[cause], self._seen[cause]) for cause in self._found]
        causes = causes_of([Seen(finding=found.finding, runs=frozenset(runs)) for found, runs in every])
        kept = []
        for index, (found, _) in enumerate(every):
            if causes[index] == index:
                also = tuple(every[i][0].finding for i, cause in enumerate(causes) if cause == index != i)
                advice = early_load(found.finding, also) or found.finding.advice
                finding = replace(found.finding, advice=advice)
                kept.append(replace(found, finding=finding, also=also))
        return kept

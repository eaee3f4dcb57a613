"""Findings of many runs, merged by cause and listed under their causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from weft.check.detector.findings import LOADS, STORES, Arrivals, Finding, Side
from weft.check.digests import first_difference
from weft.check.folding import Seen, causes_of
from weft.check.report import Found, Schedule
from weft.check.runner import Outcome

_MOST = 4  # lines that a divergence names


class Gathered:
    """Findings of all runs so far, by cause."""

    def __init__(self, strategy: str, deterministic: bool, on_results: Callable[[list[Any]], None] | None) -> None:
        self.runs, self._strategy, self._deterministic, self._on_results = 0, strategy, deterministic, on_results
        self.has_kernels = False
        self._found: dict[tuple, Found] = {}
        self._seen: dict[tuple, set[int]] = {}
        self._first: dict[tuple[int, int], tuple[Outcome, Schedule]] = {}  # by world size and SMs
        self._runs_of: dict[int, set[int]] = {}  # by world size

    def add(self, schedule: Schedule, outcome: Outcome) -> None:
        self.runs += 1
        self.has_kernels = self.has_kernels or outcome.programs > 0
        self._runs_of.setdefault(schedule.world_size, set()).add(self.runs)
        for finding, count in outcome.findings:
            self._merge(finding, count, schedule)
        if outcome.digest is not None and self._on_results is not None:
            self._on_results(outcome.results)
        if outcome.digest is not None and self._deterministic:
            size = schedule.world_size
            first, other = self._first.setdefault((size, schedule.sms), (outcome, schedule))
            where = first_difference(first.digest, outcome.digest)
            if where:
                text = (
                    f"{where} differs bitwise between strategy {other.strategy}, seed {other.seed} and strategy "
                    f"{schedule.strategy}, seed {schedule.seed} at world size {size}"
                )
                both = self._range(other, schedule)
                sides = _lines_that_differ(first.arrivals, outcome.arrivals)
                self._merge(Finding(kind="divergence", message=text, sides=sides), 1, both, ("divergence", size))

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

    def findings(self) -> list[Found]:
        """Findings, each with its consequences."""
        every = [(self._found[cause], self._seen[cause]) for cause in self._found]
        causes = causes_of([Seen(finding=entry.finding, runs=frozenset(runs)) for entry, runs in every])
        kept = []
        for index, (entry, _) in enumerate(every):
            if causes[index] == index:
                also = _once(every[i][0].finding for i, cause in enumerate(causes) if cause == index != i)
                advice = _early_load(entry.finding, also) or entry.finding.advice
                finding = replace(entry.finding, advice=advice)
                kept.append(replace(entry, finding=finding, also=also))
        return _of_all_sizes(kept)


def _once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, with one divergence for all world sizes."""
    listed = list(findings)
    first = next((finding for finding in listed if finding.kind == "divergence"), None)
    return tuple(finding for finding in listed if finding.kind != "divergence" or finding is first)


def _of_all_sizes(kept: list[Found]) -> list[Found]:
    """The findings, with a divergence at several world sizes as one."""
    first, *more = [one for one in kept if one.finding.kind == "divergence"] or [None]
    if not more:
        return kept
    count, schedules = (sum(getattr(one, name) for one in (first, *more)) for name in ("count", "schedules"))
    finding = replace(first.finding, detail=tuple(f"also: {one.finding.message}" for one in more))
    merged = replace(first, finding=finding, count=count, schedules=schedules)
    return [merged if one is first else one for one in kept if one not in more]


def _lines_that_differ(one: Arrivals, other: Arrivals) -> tuple[Side, ...]:
    """Lines whose atomics have read other values in the two runs, only float sums if any."""
    sides = [side for side, read in one.items() if side in other and other[side] != read]
    return tuple([side for side in sides if one[side][1]] or sides)[:_MOST]


def _early_load(finding: Finding, also: Iterable[Finding]) -> str:
    """Remedy for a race whose load came too early, as it has read unwritten memory; else ""."""
    loads = [side for side in finding.sides if side.verb in LOADS]
    stores = [side for side in finding.sides if side.verb in STORES]
    if finding.kind != "race" or not (loads and stores):
        return ""
    unwritten = {side.place for one in also if one.kind == "uninitialised" for side in one.sides}
    if loads[0].place not in unwritten:
        return ""
    return (
        f"the load comes too early: notify (release) after the store in {stores[0].place}, and wait for it (acquire) before "
        f"the load in {loads[0].place}"
    )

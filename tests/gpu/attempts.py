"""Attempts of all ranks together, and their verdicts: a failure of one rank is that of all, and later attempts still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

# (label, launch, verify): ``launch()`` gives the GPU work; ``verify(made)`` judges it and returns what must be equal on all
# ranks, or None.
Attempts = Iterable[tuple[str, Callable[[], Any], Callable[[Any], Any]]]

SLOW_SECONDS = 10  # an attempt that takes longer is named, so that a slow one can be told from a hang
TELL_SECONDS = 30  # from line to line of a group that goes on: a run that is ended says how far it came


class Desynchronised(Exception):
    """Some ranks gave work to their GPUs and others could not: kernels wait for peers that will not come."""


@dataclass
class Group:
    name: str
    cases: list[str] = field(default_factory=list)
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Suite:
    """One rank's end of the run."""

    def __init__(self, team: Any) -> None:
        self.team = team
        self.groups: list[Group] = []

    def group(self, name: str, attempts: Attempts) -> None:
        group = Group(name)
        self.groups.append(group)
        started = told = time.perf_counter()
        for label, launch, verify in attempts:
            group.cases.append(label)
            began = time.perf_counter()
            wrong = self.attempt(launch, verify)
            if (took := time.perf_counter() - began) > SLOW_SECONDS:
                self.say(f"  {name}: {label}: {took:.0f} s")
            if wrong:
                group.failures.append(f"{label}: {wrong}")
                self.say(f"  FAILED {name}: {label}: {wrong}")
            else:
                group.passed += 1
            if time.perf_counter() - told > TELL_SECONDS:
                told = time.perf_counter()
                self.say(f"  {name}: {group.passed} passed after {told - started:.0f} s")
        group.seconds = time.perf_counter() - started
        self.say(f"{name:14} {group.passed:4} passed, {len(group.failures)} failed   {group.seconds:6.1f} s")

    def attempt(self, launch: Callable[[], Any], verify: Callable[[Any], Any]) -> str:
        """What went wrong on any rank, the same text on all; empty if nothing."""
        made, error = None, ""
        try:
            made = launch()
        except Exception as failure:  # noqa: BLE001  every failure is a verdict
            error = one_line(failure)
        errors = self.team.exchange(error)
        if any(errors):
            if not all(errors):
                raise Desynchronised(first_of(errors))
            return first_of(errors)
        self.team.synchronize()
        token = None
        try:
            token = verify(made)
        except Exception as failure:  # noqa: BLE001
            error = one_line(failure)
        verdicts = self.team.exchange((error, token))
        if any(error for error, _ in verdicts):
            return first_of([error for error, _ in verdicts])
        if len({token for _, token in verdicts}) > 1:
            return "ranks that should have the same bits differ"
        return ""

    def say(self, line: str) -> None:
        if self.team.rank == 0:
            print(line, flush=True)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:600]


def first_of(errors: list[str]) -> str:
    return next(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)

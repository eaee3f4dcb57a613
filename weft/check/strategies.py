"""Scheduling strategies: the choice of the task that runs next, as a function of the seed.

uniform  any ready task, with equal probability
pct      random priorities, lowered at ``depth - 1`` random steps: finds a bug that needs ``depth`` ordering constraints with
         probability at least 1 / (tasks * steps ** (depth - 1)) (Burckhardt and others, ASPLOS 2010). The number of steps of
         a run is not known in advance, so the seed chooses a power of two
slow     one rank, or one program number on all ranks (as if its SM were slow), is chosen 30 times less often
delay    uniform, and stores may arrive later than anything that does not order them (``store_buffers``)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.arguments import did_you_mean
from weft.check.report import Schedule
from weft.simulator.machine.strategy import Strategy, Uniform

if TYPE_CHECKING:  # greenlet need not be installed where this is imported
    from weft.simulator.machine.tasks import Task

STRATEGIES = ("mix", "uniform", "pct", "slow", "delay", "exhaustive")
_MIX = ("uniform", "delay", "pct", "slow")
_SLOWNESS = 30.0


class Slow(Uniform):
    def __init__(self, seed: int, world_size: int, sms: int) -> None:
        super().__init__(seed)
        self._rank = self._random.randrange(world_size) if self._random.random() < 0.5 else None
        self._number = self._random.randrange(sms)

    def choose(self, ready: Sequence[Task], step: int) -> Task:
        quick = [task for task in ready if not self._is_slow(task)]
        if quick and (len(quick) == len(ready) or self._random.random() * _SLOWNESS > 1.0):
            ready = quick
        return super().choose(ready, step)

    def _is_slow(self, task: Task) -> bool:
        return task.rank == self._rank if self._rank is not None else task.number == self._number


class Pct:
    explores = False

    def __init__(self, seed: int, depth: int) -> None:
        self._random = random.Random(seed)
        self._priorities: dict[int, float] = {}
        self._keep: list[Task] = []  # ids are unique among live objects only
        steps = 1 << self._random.randint(5, 12)
        self._changes = {self._random.randrange(steps) for _ in range(depth - 1)}
        self._lowest = 0.0

    def choose(self, ready: Sequence[Task], step: int) -> Task:
        for task in ready:
            if id(task) not in self._priorities:
                self._priorities[id(task)] = 1.0 + self._random.random()
                self._keep.append(task)
        chosen = max(ready, key=lambda task: self._priorities[id(task)])
        if step in self._changes:
            self._changes.discard(step)
            self._lower(chosen)
            chosen = max(ready, key=lambda task: self._priorities[id(task)])
        return chosen

    def polled(self, task: Task) -> None:
        if id(task) in self._priorities:
            self._lower(task)

    def _lower(self, task: Task) -> None:
        self._lowest -= 1.0
        self._priorities[id(task)] = self._lowest


def strategy_of(name: str, seed: int) -> str:
    """Strategy of the schedule ``seed``: ``name`` itself, or for "mix" each in turn."""
    return _MIX[seed % len(_MIX)] if name == "mix" else name


def make(schedule: Schedule) -> Strategy:
    """Strategy of a run. ValueError for an unknown one."""
    if schedule.strategy in ("uniform", "delay"):
        return Uniform(schedule.seed)
    if schedule.strategy == "slow":
        return Slow(schedule.seed, schedule.world_size, schedule.sms)
    if schedule.strategy == "pct":
        return Pct(schedule.seed, schedule.depth)
    near = did_you_mean(schedule.strategy, STRATEGIES)
    raise ValueError(f"strategy={schedule.strategy!r} is not one of {', '.join(STRATEGIES)}{near}")

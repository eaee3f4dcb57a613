"""Choice of the task that runs next, a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weft.simulator.machine.tasks import Task


class Strategy(Protocol):
    """Strategy of one run. ``explores``: ``choose`` needs the tasks' next accesses (``Task.next``)."""

    explores: bool

    def choose(self, ready: Sequence[Task], step: int) -> Task:
        """Task to run next, one of ``ready``."""

    def polled(self, task: Task) -> None:
        """Note a read by ``task`` that brought nothing new: it may be spinning."""


class Uniform:
    """Any ready task, with equal probability. ``slow``: rank -> factor by which it is chosen less often."""

    explores = False

    def __init__(self, seed: int, slow: Mapping[int, float] | None = None) -> None:
        self._random, self._slow = random.Random(seed), dict(slow or {})

    def choose(self, ready: Sequence[Task], step: int) -> Task:
        while True:
            task = ready[int(self._random.random() * len(ready))]
            if not self._slow:
                return task
            factor = self._slow.get(task.rank, 1.0)
            if factor <= 1.0 or self._random.random() * factor < 1.0:
                return task
            if all(other.rank == task.rank for other in ready):
                return task

    def polled(self, task: Task) -> None: ...

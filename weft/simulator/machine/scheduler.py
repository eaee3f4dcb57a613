"""Choice of the task that runs next.

The running task calls ``step()`` before each access to memory, where the strategy picks the next task, so that a run is a
function of its seed. A blocked task names what it waits for: when no task can run, that is the report.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.simulator.machine.interrupts import Interrupts
from weft.simulator.machine.strategy import Strategy
from weft.simulator.machine.tasks import Task, Waiting

# Fruitless polls (loads, and atomics that changed nothing) per ready task after which the run counts as stuck: kernels may
# spin with raw atomics, and a spinning task never blocks.
_POLLS_PER_TASK = 1000
# Weight of a plain load outside polling loops: a long inner loop reads much before it writes.
_PLAIN_LOAD = 0.02
# Share of the patience that counts as spent after a change that may help the polling tasks.
_PATIENCE_SPENT = 0.75


class Scheduler:
    """Scheduler of all tasks."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._ready: list[Task] = []
        self._blocked: list[Task] = []
        self._chosen: Task | None = None
        self._fruitless = 0.0
        self.current: Task | None = None
        self.failed: Task | None = None  # the first that raised
        self.steps = 0
        # Called when no task can go on; True if it changed memory.
        self.when_stuck: Callable[[], bool] = lambda: False
        self.interrupts = Interrupts(Scheduler.loop, Task.run)

    # --- called by tasks ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Scheduling point: any other task may run here."""
        self.steps += 1
        task = self.current
        self._chosen = chosen = self.strategy.choose(self._ready, self.steps) if self._ready else self._pick()
        if chosen is not task or self._hopeless():
            task.pause()

    def block(self, waiting: Waiting) -> None:
        """Block the calling task until ``waiting.done()``, tested when its bytes change or on ``recheck``."""
        if waiting.low is not None:
            self.current.next = ((waiting.low, waiting.high, False),)
        self.step()
        if waiting.done():
            return
        task = self.current
        task.waiting = waiting
        self._ready.remove(task)
        self._blocked.append(task)
        self._chosen = None
        task.pause()

    def spawn(self, task: Task) -> None:
        self._ready.append(task)
        self.changed()

    def changed(self) -> None:
        """Note a change that a spinning task may be polling for."""
        self._fruitless = 0.0

    def polled(self, plain: bool, new: bool = False) -> None:
        """Note a load, or an atomic that changed nothing.

        ``new``: its first read of these bytes, which is progress.
        """
        self._fruitless = 0.0 if new else self._fruitless + (_PLAIN_LOAD if plain else 1.0)
        if not plain:
            self.strategy.polled(self.current)

    def written(self, low: int, high: int) -> None:
        """Wake tasks that wait for bytes ``low .. high - 1``, which were written."""
        self._fruitless = 0.0
        for task in self._blocked:
            waiting = task.waiting
            if waiting.low is not None and waiting.low < high and low < waiting.high:
                self._wake(lambda w: w.low is not None and w.low < high and low < w.high)
                return

    def recheck(self) -> None:
        """Wake tasks whose condition, other than on memory, now holds."""
        self._wake(lambda w: w.low is None)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, stuck: Callable[[], BaseException]) -> None:
        """Run until all tasks have finished.

        Raises ``stuck()`` when none can go on, and a task's unobserved error.
        """
        try:
            self.loop(stuck)
        finally:
            self.interrupts.leaving = True
            self._abandon_all()

    def loop(self, stuck: Callable[[], BaseException]) -> None:
        """Part of ``run`` that an interrupt may end anywhere."""
        while self._ready or self._blocked:
            task = self._chosen if self._chosen is not None and not self._chosen.finished else None
            task = task or self._pick()
            if task is None and self.when_stuck():
                continue
            if task is None:
                raise stuck()
            if self._hopeless():
                self._wake(lambda w: True)
                if self._hopeless():
                    if not self.when_stuck():
                        raise stuck()
                    self._fruitless = _PATIENCE_SPENT * _POLLS_PER_TASK * len(self._ready)
            self._chosen = None
            self.current = task
            task.resume()
            self.current = None
            if task.finished:
                self._retire(task)

    def _abandon_all(self) -> None:
        left, interrupted = [*self._ready, *self._blocked], self.current
        if interrupted in left:  # host code still runs, so it must come to its pause first
            left.remove(interrupted)
            left.insert(0, interrupted)
        for task in left:
            self.current = task
            task.abandon(task is interrupted, lambda: self.interrupts.held > 0)
            if not task.finished:
                return  # it may still call this scheduler, as the current task
        self.current = None

    def waiting_tasks(self) -> list[Task]:
        """Blocked tasks, then spinning ones, in order of creation."""
        return [*self._blocked, *self._ready]

    def _hopeless(self) -> bool:
        """True if all ready tasks have only polled for so long that the run counts as stuck."""
        return self._fruitless > _POLLS_PER_TASK * len(self._ready)

    def _retire(self, task: Task) -> None:
        self._ready.remove(task)
        self.changed()
        if task.error is not None and self.failed is None:
            self.failed = task
        if task.on_finish is not None:
            task.on_finish()
        elif task.error is not None:
            raise task.error
        self.recheck()

    def _pick(self) -> Task | None:
        if not self._ready:
            self._wake(lambda w: True)
            if not self._ready:
                return None
        return self.strategy.choose(self._ready, self.steps)

    def _wake(self, concerns: Callable[[Waiting], bool]) -> None:
        woken = [task for task in self._blocked if concerns(task.waiting) and task.waiting.done()]
        for task in woken:
            task.waiting = None
            self._blocked.remove(task)
            self._ready.append(task)
            self._fruitless = 0.0

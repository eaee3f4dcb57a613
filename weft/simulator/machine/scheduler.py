"""Tasks, and the choice of the one that runs next.

A rank's host code is a thread; a program instance or a stream operation is a greenlet. Exactly one of them runs at any time.
The running task calls ``step()`` before each access to memory, where a seeded generator picks the next task, so that a run is
a function of its seed. A blocked task names what it waits for: when no task can run, that is the report.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from greenlet import GreenletExit, greenlet

from weft.simulator.machine.interrupts import Interrupts

# Fruitless polls (loads, and atomics that changed nothing) per ready task after which the run counts as stuck: kernels may
# spin with raw atomics, and a spinning task never blocks.
_POLLS_PER_TASK = 1000
# Weight of a plain load outside polling loops: a long inner loop reads much before it writes.
_PLAIN_LOAD = 0.02
# Seconds between two checks whether to go on waiting for host code when a simulation ends early.
_HURRY_AFTER = 0.1
# Share of the patience that counts as spent after a change that may help the polling tasks.
_PATIENCE_SPENT = 0.75


class Abandoned(BaseException):
    """Thrown into remaining host threads when a simulation ends early.

    Not an Exception: users must not catch it.
    """


@dataclass(slots=True)
class Waiting:
    """Condition of a blocked task.

    ``low``/``high``: bytes whose change can fulfil it, None for anything else.
    """

    done: Callable[[], bool]
    describe: Callable[[], str]
    low: int | None = None
    high: int | None = None


class Task:
    """Thread of control of one rank."""

    def __init__(self, scheduler: Scheduler, rank: int, label: str, body: Callable[[], Any]) -> None:
        self.scheduler, self.rank, self.label, self.body = scheduler, rank, label, body
        self.waiting: Waiting | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.on_finish: Callable[[], None] | None = None
        # Its next access and that access's source line, filled in for a strategy that explores.
        self.next: tuple[tuple[int, int, bool], ...] | None = None
        self.next_line: Any = None
        self.history: Any = None  # of a program: its reads since it last changed memory

    def run(self) -> None:
        """Run the body and keep its result or error."""
        try:
            self.result = self.body()
        except (GreenletExit, Abandoned):
            pass
        except BaseException as error:  # raised again in the task that waits for this one
            self.error = error
            self.scheduler.failed = self.scheduler.failed or self
        finally:
            self.finished = True

    def resume(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        """Switch from the task, which calls this, to the scheduler until it is resumed."""
        raise NotImplementedError

    def abandon(self, hurried: Callable[[], bool]) -> None:
        """End the task. ``hurried()``: True to stop waiting for host code that does not return."""
        raise NotImplementedError


class GreenletTask(Task):
    """Program instance or stream operation, as a greenlet in the scheduler's thread."""

    _greenlet: greenlet | None = None

    def resume(self) -> None:
        if self._greenlet is None:
            self._greenlet = greenlet(self.run)
        self._greenlet.switch()

    def pause(self) -> None:
        self._greenlet.parent.switch()

    def abandon(self, hurried: Callable[[], bool]) -> None:
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)
        self.finished = True


class ThreadTask(Task):
    """Host code of a rank, in a thread of its own so that torch's thread-local state is per rank."""

    _thread: threading.Thread | None = None
    _leaving = False

    def resume(self) -> None:
        if self._thread is None:
            self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
            self._thread = threading.Thread(target=self._main, name=f"weft {self.label}", daemon=True)
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()

    def _main(self) -> None:
        self.run()
        self._back.release()

    def pause(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self._leaving:
            raise Abandoned

    def abandon(self, hurried: Callable[[], bool]) -> None:
        self._leaving = True
        while self._thread is not None and not self.finished:
            self._turn.release()
            while not self._back.acquire(timeout=_HURRY_AFTER):
                if hurried():
                    return  # it ends when it comes to its next pause
        self.finished = True

    @property
    def is_here(self) -> bool:
        """True if the calling thread runs this host code."""
        return self._thread is threading.current_thread()


class Scheduler:
    """Scheduler of all tasks. ``slow``: rank -> factor by which it is chosen less often."""

    def __init__(self, seed: int, slow: Mapping[int, float] | None = None) -> None:
        self._random = random.Random(seed)
        self._slow = dict(slow or {})
        self._ready: list[Task] = []
        self._blocked: list[Task] = []
        self._chosen: Task | None = None
        self._fruitless = 0.0
        self.current: Task | None = None
        self.failed: Task | None = None  # the first that raised
        self.steps = 0
        # Replaces the uniform choice; and called when no task can go on, True if it changed memory.
        self.strategy: Any = None
        self.when_stuck: Callable[[], bool] = lambda: False
        self.interrupts = Interrupts(Scheduler.loop, Task.run)

    # --- called by tasks ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Scheduling point: any other task may run here."""
        self.steps += 1
        task = self.current
        self._chosen = self._pick()
        if self._chosen is not task or self._hopeless():
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
        if self.strategy is not None and not plain:
            self.strategy.polled(self.current)

    def written(self, low: int, high: int) -> None:
        """Wake tasks that wait for bytes ``low .. high - 1``, which were written."""
        self._fruitless = 0.0
        if self._blocked:
            self._wake(lambda w: w.low is not None and w.low < high and low < w.high)

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
        left = [*self._ready, *self._blocked]
        if self.current in left:  # interrupted in its turn: host code still runs, so it must come to its pause first
            left.remove(self.current)
            left.insert(0, self.current)
        for task in left:
            self.current = task
            task.abandon(lambda: self.interrupts.held > 0)
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
        if self.strategy is not None:
            return self.strategy.choose(self._ready, self.steps)
        while True:
            task = self._ready[int(self._random.random() * len(self._ready))]
            factor = self._slow.get(task.rank, 1.0)
            if factor <= 1.0 or self._random.random() * factor < 1.0:
                return task
            if all(other.rank == task.rank for other in self._ready):
                return task

    def _wake(self, concerns: Callable[[Waiting], bool]) -> None:
        woken = [task for task in self._blocked if concerns(task.waiting) and task.waiting.done()]
        for task in woken:
            task.waiting = None
            self._blocked.remove(task)
            self._ready.append(task)
            self._fruitless = 0.0

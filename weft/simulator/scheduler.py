"""Tasks, and the one that runs next.

Host code of a rank is a thread, a program instance or a stream operation is a greenlet; exactly one of them runs at any
time. Whoever runs comes to ``step()`` before each access to memory, and there a seeded generator picks who goes on: a run is
a function of its seed. A blocked task names what it waits for, so that the moment nobody can run there is a report.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from greenlet import GreenletExit, greenlet

from weft.simulator.interrupts import Interrupts

# Fruitless polls (loads or atomics that changed nothing) for each task that could run, after which nobody is believed to
# be able to go on: kernels may spin with raw atomics, and a spinning task never blocks.
_POLLS_PER_TASK = 1000
# Plain loads outside of loops that poll count less: a long inner loop reads much before it writes.
_PLAIN_LOAD = 0.02
# Seconds between two looks whether to go on waiting for host code whose simulation ends early.
_HURRY_AFTER = 0.1
# What counts as spent already once something has come to help those who have polled for so long.
_PATIENCE_SPENT = 0.75


class Abandoned(BaseException):
    """Thrown into host threads that are left when a simulation ends early. Not an Exception: users must not catch it."""


@dataclass(slots=True)
class Waiting:
    """What a blocked task waits for. ``low``/``high``: the bytes whose change can end it; None for anything else."""

    done: Callable[[], bool]
    describe: Callable[[], str]
    low: int | None = None
    high: int | None = None


class Task:
    """One thread of control of one rank."""

    def __init__(self, scheduler: Scheduler, rank: int, label: str, body: Callable[[], Any]) -> None:
        self.scheduler, self.rank, self.label, self.body = scheduler, rank, label, body
        self.waiting: Waiting | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.on_finish: Callable[[], None] | None = None
        # What it will access when it goes on, and from which line; filled in for a strategy that explores.
        self.next: tuple[tuple[int, int, bool], ...] | None = None
        self.next_line: Any = None
        self.looking: Any = None  # of a program: what it has looked at since it last changed memory

    def run(self) -> None:
        """The body; its result or error is kept."""
        try:
            self.result = self.body()
        except (GreenletExit, Abandoned):
            pass
        except BaseException as error:  # kept and raised again by whoever waits for this task
            self.error = error
            self.scheduler.failed = self.scheduler.failed or self
        finally:
            self.finished = True

    def resume(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        """Called by the task itself: back to the scheduler until it is resumed."""
        raise NotImplementedError

    def abandon(self, hurried: Callable[[], bool]) -> None:
        """End the task. ``hurried()``: do not wait for host code that does not come back."""
        raise NotImplementedError


class GreenletTask(Task):
    """A program instance or a stream operation. Its greenlet lives in the scheduler's thread."""

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
    """A rank's host code. A thread of its own, so that torch's thread-local state stays the rank's own."""

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
        """True where the calling thread is the one that runs this host code."""
        return self._thread is threading.current_thread()


class Scheduler:
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
        # In the place of the uniform choice; and what may still change memory when nobody can go on.
        self.strategy: Any = None
        self.when_stuck: Callable[[], bool] = lambda: False
        self.interrupts = Interrupts(Scheduler.loop, Task.run)

    # --- called by tasks ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A point at which any other task may run."""
        self.steps += 1
        task = self.current
        self._chosen = self._pick()
        if self._chosen is not task or self._hopeless():
            task.pause()

    def block(self, waiting: Waiting) -> None:
        """The calling task goes on once ``waiting.done()``. What ends it must change its bytes or call ``recheck``."""
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
        """Something happened that a spinning task may be spinning for."""
        self._fruitless = 0.0

    def polled(self, plain: bool, new: bool = False) -> None:
        """A load, or an atomic that changed nothing; ``new``: of what the task has not looked at before, which is progress."""
        self._fruitless = 0.0 if new else self._fruitless + (_PLAIN_LOAD if plain else 1.0)
        if self.strategy is not None and not plain:
            self.strategy.polled(self.current)

    def written(self, low: int, high: int) -> None:
        """Bytes ``low .. high - 1`` were written: wake who waits for them."""
        self._fruitless = 0.0
        if self._blocked:
            self._wake(lambda w: w.low is not None and w.low < high and low < w.high)

    def recheck(self) -> None:
        """Wake those who wait for something other than memory."""
        self._wake(lambda w: w.low is None)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, stuck: Callable[[], BaseException]) -> None:
        """Run until every task has finished. Raises ``stuck()`` when none can go on, and what a task raised unobserved."""
        try:
            self.loop(stuck)
        finally:
            self.interrupts.leaving = True
            self._abandon_all()

    def loop(self, stuck: Callable[[], BaseException]) -> None:
        """The part of ``run`` that an interrupt may end anywhere."""
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
        """Those that block, then those that spin, in the order of their making."""
        return [*self._blocked, *self._ready]

    def _hopeless(self) -> bool:
        """Whether all who could run have only polled for so long that nothing will come of it."""
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

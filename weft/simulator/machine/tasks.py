"""Tasks: threads of control of the ranks, one of which runs at any time.

A rank's host code is a thread; a program instance or a stream operation is a greenlet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from greenlet import GreenletExit, greenlet

from weft.simulator.interpreter.frames import CodeLine
from weft.simulator.machine.polling import ReadHistory

# Seconds between two checks whether to go on waiting for host code when a simulation ends early.
_HURRY_AFTER = 0.1
# Such checks between the first and the second Abandoned thrown into host code, whose cleanup the second would break off. Each
# further interval is twice as long.
_CLEANUP = 20
# Byte ranges of an access: (low, high, may be written).
Footprint = tuple[tuple[int, int, bool], ...]


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

    number: int | None = None  # of a program in its grid
    exact_dots = False  # of a program whose matrix products do not depend on the shapes of their blocks

    def __init__(self, rank: int, label: str, body: Callable[[], object], maker: Task | None = None) -> None:
        """``maker``: the program whose store or copy this task makes."""
        self.rank, self.label, self.body, self.maker = rank, label, body, maker
        self.waiting: Waiting | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.result: object = None
        self.on_finish: Callable[[], None] | None = None
        # Its next access and that access's source line, filled in for a strategy that explores.
        self.next: Footprint | None = None
        self.next_line: CodeLine | None = None
        self.history: ReadHistory | None = None  # of a program: its reads since it last changed memory

    def run(self) -> None:
        """Run the body and keep its result or error."""
        try:
            self.result = self.body()
        except (GreenletExit, Abandoned):
            pass
        except BaseException as error:  # raised again in the task that waits for this one
            self.error = error
        finally:
            self.finished = True

    def resume(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        """Switch from the task, which calls this, to the scheduler until it is resumed."""
        raise NotImplementedError

    def abandon(self, interrupted: bool, hurried: Callable[[], bool]) -> None:
        """End the task.

        ``interrupted``: Ctrl-C came while it ran. ``hurried()``: True to stop waiting for host code that does not return.
        """
        raise NotImplementedError


class GreenletTask(Task):
    """Program instance or stream operation, as a greenlet in the scheduler's thread."""

    _greenlet: greenlet | None = None

    def resume(self) -> None:
        if self._greenlet is None:
            self._greenlet = greenlet(self.run)
        self._greenlet.switch()
        if isinstance(
            self.error, KeyboardInterrupt
        ):  # ends the run; the host code that waits for this task may catch it
            raise self.error

    def pause(self) -> None:
        self._greenlet.parent.switch()

    def abandon(self, interrupted: bool, hurried: Callable[[], bool]) -> None:
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)
        self.finished = True


class ThreadTask(Task):
    """Host code of a rank, in a separate thread, so that torch's thread-local state is per rank."""

    _thread: threading.Thread | None = None
    _turn: SimpleQueue[None]
    _back: SimpleQueue[None]
    _leaving = False

    def __init__(
        self,
        rank: int,
        label: str,
        body: Callable[[], object],
        turn: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        """``turn(rank)``: scope in which the code runs between two pauses."""
        super().__init__(rank, label, body)
        self._turn_of = turn

    def resume(self) -> None:
        with self._turn_of(self.rank):
            self._resume()

    def _resume(self) -> None:
        if self._thread is None:
            # Semaphores; those of threading are written in Python, and a switch took 19 us in place of 12.
            self._turn, self._back = SimpleQueue(), SimpleQueue()
            self._thread = threading.Thread(target=self._main, name=f"weft {self.label}", daemon=True)
            self._thread.start()
        else:
            self._turn.put(None)
        self._back.get()
        if self.finished:
            # Its thread-local variables go only now. Tensors among them would abort a process that is about to exit.
            self._thread.join()

    def _main(self) -> None:
        try:
            self.run()
        except Abandoned:  # thrown into the thread after its body had ended
            self.finished = True
        finally:
            self._back.put(None)

    def pause(self) -> None:
        self._back.put(None)
        self._turn.get()
        if self._leaving:
            raise Abandoned

    def abandon(self, interrupted: bool, hurried: Callable[[], bool]) -> None:
        self._leaving = True
        checks, next_throw, interval = 0, 1, _CLEANUP
        while self._thread is not None and self._thread.is_alive() and not self.finished:
            self._turn.put(None)
            while not self._has_come_back():
                if hurried():
                    return  # it ends when it comes to its next pause
                checks += 1
                if interrupted and checks == next_throw:  # a loop of host code may come to no pause
                    _throw(Abandoned, self._thread)
                    next_throw, interval = checks + interval, 2 * interval
        self.finished = True
        if self._thread is not None:
            self._thread.join()

    def _has_come_back(self) -> bool:
        try:
            self._back.get(timeout=_HURRY_AFTER)
        except Empty:
            return not self._thread.is_alive()
        return True

    @property
    def is_here(self) -> bool:
        """True if the calling thread runs this host code."""
        return self._thread is threading.current_thread()


def _throw(error: type[BaseException], thread: threading.Thread) -> None:
    """Raise ``error`` in another thread as soon as it executes Python code, if it has not ended."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))

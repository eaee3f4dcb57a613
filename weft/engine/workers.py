"""Ranks behind an LLM: a process per GPU, virtual ranks made anew for every call, or the ranks that torchrun has started."""

from __future__ import annotations

import atexit
import os
import queue
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.engine.engine import Engine
from weft.engine.outputs import Piece, Prompt, Stats
from weft.engine.params import SamplingParams
from weft.engine.serve import GO, STOP, receive, serve
from weft.errors import WeftError
from weft.models.checkpoint import Progress
from weft.runtime.codec import encode
from weft.runtime.launch import launch, launch_on_pipes
from weft.runtime.team import init

if TYPE_CHECKING:
    from weft.runtime.team import Team

Requests = tuple[list[Prompt], list[SamplingParams]]
Pieces = Generator[Piece, None, None]
Message = tuple[str, Any]
# Called as make(team, progress=…, warn=…) on every rank; travels to processes, so a partial of Engine.
Make = Callable[..., Engine]
# Takes the statistics of an answer that has been drawn to its end.
Keep = Callable[[Stats], None]


class Pace(NamedTuple):
    """How far ranks in processes may be ahead of their caller.

    every  steps between two verdicts on whether they go on: an answer that is left runs for at most twice as many
    waits  they wait for a caller who falls as far behind
    """

    every: int
    waits: bool


# A decode step of Qwen3-32B takes 5 to 12 ms on H200s, so a stream that is left stops within 0.3 to 0.8 s. `generate` is rarely
# left, and draws all the time: what else its process does must not hold up the GPUs.
STREAM, GENERATE = Pace(32, True), Pace(512, False)


def _llm_closed() -> WeftError:
    return WeftError("this LLM is closed; make a new one")


@dataclass(slots=True, eq=False)
class _Run:
    """Thread of an answer by virtual ranks.

    left   no more pieces are drawn
    ended  its simulation has ended
    """

    thread: threading.Thread
    left: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Let it end with the step that runs, and wait for that. (Python forgets a thread whose `join` was interrupted.)"""
        self.left.set()
        while self.thread.is_alive() and not self.ended.wait(timeout=0.1):
            pass


class VirtualWorkers:
    """Virtual ranks of this process. An engine's tensors belong to one simulation, so every call loads the model again.

    A process has one simulation at a time: the thread that runs it holds `_turn`. So an interrupt of the calling thread, at
    whatever line, lets no second one begin.
    """

    _turn = threading.Lock()
    _latest: _Run | None = None  # of this process

    def __init__(self, world_size: int, make: Make, heap_bytes: int | None, progress: Progress | None) -> None:
        self._world_size, self._make, self._heap_bytes, self._progress = world_size, make, heap_bytes, progress
        self._own: _Run | None = None

        def build(team: Team) -> None:
            make(team)

        with self._turn:
            self._launch(build)  # errors and warnings come now

    def ask(self, requests: Requests, keep: Keep, pace: Pace = STREAM) -> Pieces:
        """Yield the pieces of an answer; `keep` gets its statistics. `pace` is for processes.

        An answer that was not drawn to its end is computed to its end before the next begins. One that was closed ends with the
        step that runs.
        """
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        decisions: list[bool] = []

        def goes_on(done: int) -> bool:
            """Decision after `done` steps. The first rank to ask decides for all; ranks take turns, so it needs no lock."""
            if len(decisions) < done:
                decisions.append(not run.left.is_set())
            return decisions[done - 1]

        def rank(team: Team) -> Stats | None:
            engine = self._make(team, progress=self._progress if team.rank == 0 else None, warn=False)
            for done, pieces in enumerate(engine.answer_in_steps(*requests), 1):
                if team.rank == 0:
                    messages.put(("pieces", pieces))
                if not goes_on(done):
                    return None
            return engine.stats

        def compute() -> None:
            try:
                with VirtualWorkers._turn:
                    stats = None if run.left.is_set() else self._launch(rank)[0]
                last = ("error", _llm_closed()) if stats is None else ("stats", stats)
            except BaseException as error:
                last = ("error", error)
            run.ended.set()  # before the caller goes on: its next simulation may not find this one
            messages.put(last)

        run = _Run(threading.Thread(target=compute, name="weft virtual ranks", daemon=True))
        self._own = VirtualWorkers._latest = run
        try:
            run.thread.start()
            return _pieces(messages.get, run.left.set, keep)
        except BaseException:
            run.left.set()  # the caller has no generator
            raise

    def _launch(self, main: Callable[[Team], Any]) -> list[Any]:
        return launch(main, self._world_size, "sim", heap_bytes=self._heap_bytes)

    def close(self) -> None:
        """End the last call, if it was not drawn to its end, with the step that runs."""
        if self._own is not None:
            self._own.end()

    @classmethod
    def end(cls) -> None:
        """End the latest call of any LLM of this process."""
        if cls._latest is not None:
            cls._latest.end()


# The end of the process would cut off a thread in the middle of torch, which aborts.
atexit.register(VirtualWorkers.end)


@dataclass(slots=True, eq=False, kw_only=True)
class _Answer:
    """Answer that processes compute.

    request   message that asks for it
    messages  those of rank 0 that have arrived
    drawn     messages that the caller has taken
    left      the caller takes no more
    """

    request: bytes
    pace: Pace
    messages: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    drawn: int = 0
    left: bool = False


class ProcessWorkers:
    """A process per GPU, each with its engine, that answers until `close` or the end of this process.

    Only the thread `_talk` reads from the ranks and writes to them. No interrupt reaches it, so a message is read whole, and
    goes to all ranks or to none. Callers only put into queues, as does a garbage collector that drops a stream at any line.
    """

    def __init__(self, world_size: int, make: Make, heap_bytes: int | None, progress: Progress | None) -> None:
        self._asked: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes `_goes_on`
        self._error: BaseException | None = None  # of the processes
        self._failure: BaseException | None = None  # for every further call
        self._closed = False
        self._pipes, theirs = zip(*(Pipe() for _ in range(world_size)), strict=True)

        def run() -> None:
            try:
                launch_on_pipes(serve, theirs, args=(make,), heap_bytes=heap_bytes)
            except BaseException as error:
                self._error = error
            for pipe in theirs:
                pipe.close()

        self._processes = threading.Thread(target=run, name="weft processes", daemon=True)
        self._talker = threading.Thread(target=self._talk, name="weft talker", daemon=True)
        self._processes.start()
        try:
            self._wait_until_loaded(progress)
            self._talker.start()
        except BaseException:
            self.close()
            raise

    def ask(self, requests: Requests, keep: Keep, pace: Pace = STREAM) -> Pieces:
        """Yield the pieces of an answer; `keep` gets its statistics.

        An answer that was not drawn to its end is computed to its end before the next begins, and can still be drawn. One that
        was closed ends with the next verdict.
        """
        answer = _Answer(request=encode(("request", (*requests, pace.every))), pace=pace)

        def take() -> Message:
            if self._closed:
                raise _llm_closed()
            message = answer.messages.get()
            answer.drawn += 1
            if answer.drawn % pace.every == 0:
                self._changed.put(None)
            return message

        def leave() -> None:
            answer.left = True
            self._changed.put(None)

        try:
            self._asked.put(answer)
            self._changed.put(None)
            if self._failure is not None:  # else the talker has still to look what is asked
                raise self._failure
            return _pieces(take, leave, keep)
        except BaseException:
            leave()
            raise

    def close(self) -> None:
        """End the ranks, in the middle of an answer with its next verdict."""
        self._closed = True
        self._asked.put(None)
        self._changed.put(None)
        if self._talker.ident is not None:
            self._talker.join(timeout=30)  # what one rank has been told, all have
        for pipe in self._pipes:
            with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # unlike close(), even while the talker reads
        self._processes.join(timeout=30)

    def _wait_until_loaded(self, progress: Progress | None) -> None:
        try:
            for pipe in self._pipes:  # rank 0 first, which alone reports progress
                while (message := receive(pipe)) != ("loaded", None):
                    if progress is not None:
                        progress(*message[1])
        except (EOFError, OSError):
            raise self._reason() from None

    def _talk(self) -> None:
        answer = None
        with suppress(EOFError, OSError):
            while (answer := self._asked.get()) is not None:
                self._exchange(answer)
        self._failure = self._reason()
        self._asked.put(None)
        for unanswered in (answer, *iter(self._asked.get, None)):
            if unanswered is not None:
                unanswered.messages.put(("error", self._failure))

    def _exchange(self, answer: _Answer) -> None:
        self._tell(answer.request)
        for received in count(1):
            message = receive(self._pipes[0])
            answer.messages.put(message)
            if message[0] != "pieces":
                return
            verdict = self._verdict(answer, received) if received % answer.pace.every == 0 else None
            if self._closed:
                raise EOFError
            if verdict is not None:
                self._tell(verdict)

    def _verdict(self, answer: _Answer, received: int) -> bytes:
        """Verdict on an answer of which so many steps have arrived. Waits for its caller, unless another request waits."""
        while answer.pace.waits and not answer.left and answer.drawn < received and self._asked.empty():
            self._changed.get()
        return STOP if answer.left and answer.drawn < received else GO

    def _tell(self, message: bytes) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # a rank that has ended, which ends the others
                pipe.send_bytes(message)

    def _reason(self) -> BaseException:
        """Why there are no ranks any more."""
        if self._closed:
            return _llm_closed()
        self._processes.join(timeout=30)
        return self._error or WeftError("the workers have ended; make a new LLM")


class RankWorkers:
    """This process, one of the ranks that torchrun has started. All of them make the same calls."""

    def __init__(self, make: Make, heap_bytes: int | None, progress: Progress | None) -> None:
        self._team = init(heap_bytes=heap_bytes)
        self._engine = make(self._team, progress=progress if self._team.rank == 0 else None)

    def ask(self, requests: Requests, keep: Keep, pace: Pace = STREAM) -> Pieces:
        """Yield the pieces of an answer, on every rank; `keep` gets its statistics. `pace` is for processes.

        No step runs before its pieces are drawn, so closing an answer frees its slots and pages at once.
        """
        pieces = self._engine.answer(*requests)

        def kept() -> Pieces:
            yield from pieces
            keep(self._engine.stats)

        return kept()

    def close(self) -> None:
        del self._engine
        self._team.close()


def _pieces(take: Callable[[], Message], leave: Callable[[], None], keep: Keep) -> Pieces:
    """Yield pieces until the statistics or an error come. Takes the first message at once, so that the call raises a refusal.

    `leave` is called when no more will be drawn, by a garbage collector at any line of the program.
    """

    def drawn() -> Generator[Piece | None, None, None]:
        try:
            kind, value = take()
            if kind != "error":
                yield None  # drawn below: a generator that has not begun would not notice that it is closed
            while kind == "pieces":
                yield from value
                kind, value = take()
            if kind == "error":
                raise value
            keep(value)
        finally:
            leave()

    pieces = drawn()
    next(pieces)
    return pieces

"""Processes behind an LLM, one per GPU: both sides of the pipes between them and the parent."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from weft.engine.outputs import columns_of, pieces_of_columns
from weft.engine.progress import Watchers
from weft.engine.workers import (
    STREAM,
    Keep,
    Make,
    Message,
    Pace,
    Pieces,
    Requests,
    check_process,
    llm_closed,
    pieces_of,
)
from weft.errors import WeftError
from weft.runtime.codec import decode, encode
from weft.runtime.launch import launch_on_pipes

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.runtime.team.team import Team

GO, STOP = encode(("go", None)), encode(("stop", None))
# Seconds that ranks have to end by themselves: for the step that runs, and for NCCL.
CLOSE_SECONDS = 10.0


class ParentClosed(Exception):
    """The parent has closed its end of the pipe."""


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


class RankProcesses:
    """Processes, one per GPU, and this process's end of a pipe to each, until `close`.

    main   called on every rank as main(team, its end of the pipe, make), or with a tuple of that end and its links
    links  further ends of pipes for each rank, which only the ranks keep
    """

    def __init__(
        self,
        main: Callable[..., None],
        world_size: int,
        make: Make,
        heap_bytes: int | None,
        watchers: Watchers,
        links: Sequence[tuple[Connection, ...]] = (),
    ) -> None:
        self._error: BaseException | None = None  # of the processes
        self._closed = False
        self._owner = os.getpid()
        self._started: list[BaseProcess] = []
        self._pipes, theirs = zip(*(Pipe() for _ in range(world_size)), strict=True)
        given = [(end, *link) for end, link in zip(theirs, links, strict=True)] if links else theirs

        def run() -> None:
            try:
                launch_on_pipes(main, given, self._started, args=(make,), heap_bytes=heap_bytes)
            except BaseException as error:
                self._error = error
            for end in theirs:
                end.close()

        self._processes = threading.Thread(target=run, name="weft processes", daemon=True)
        self._talker = threading.Thread(target=self._talk, name="weft talker", daemon=True)
        self._processes.start()
        try:
            self._wait_until_loaded(watchers)
            for end in chain(*links):  # a rank that ends then closes its links for good
                end.close()
            self._talker.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks, by a kill where they do not end by themselves. A fork of this process ends none."""
        if self._owner != os.getpid():
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        self._closed = True
        self._finish(CLOSE_SECONDS)
        for pipe in self._pipes:
            with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # unlike close(), even while the talker reads
        self._processes.join(timeout=max(0.0, deadline - time.monotonic()))
        for process in self._started if self._processes.is_alive() else ():
            process.kill()  # it is stopped, or hangs
        self._processes.join(timeout=CLOSE_SECONDS)

    def _finish(self, seconds: float) -> None:
        """Send what is still to be sent, before the pipes are closed."""

    def _talk(self) -> None:
        """Read what the ranks tell. No interrupt reaches its thread, so a message is read whole."""
        raise NotImplementedError

    def _wait_until_loaded(self, watchers: Watchers) -> None:
        try:
            for pipe in self._pipes:  # rank 0 first, which alone reports progress
                while (message := receive(pipe)) != ("loaded", None):
                    name, counts = message
                    if name in watchers:
                        watchers[name](*counts)
        except (EOFError, OSError):
            raise self._reason() from None

    def _reason(self) -> BaseException:
        """Why there are no ranks any more."""
        if self._closed:
            return llm_closed()
        self._processes.join(timeout=30)
        return self._error or WeftError("the workers have ended; make a new LLM")


class ProcessWorkers(RankProcesses):
    """A process per GPU, each with its engine, that answers until `close` or the end of this process.

    Only the thread `_talk` reads from the ranks and writes to them. No interrupt reaches it, so a message is read whole, and
    goes to all ranks or to none. Callers only put into queues, as does a garbage collector that drops a stream at any line.
    """

    def __init__(self, world_size: int, make: Make, heap_bytes: int | None, watchers: Watchers) -> None:
        self._asked: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes `_goes_on`
        self._failure: BaseException | None = None  # for every further call
        super().__init__(serve, world_size, make, heap_bytes, watchers)

    def ask(self, requests: Requests, keep: Keep, pace: Pace = STREAM) -> Pieces:
        """Yield the pieces of an answer; `keep` gets its statistics.

        An answer that was not drawn to its end is computed to its end before the next begins, and can still be drawn; a closed
        one ends with the next verdict.
        """
        check_process(self._owner)
        answer = _Answer(request=encode(("request", (*requests, pace.every))), pace=pace)

        def take() -> Message:
            if self._closed:
                raise llm_closed()
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
            if self._failure is not None:  # otherwise the talker will see the request
                raise self._failure
            return pieces_of(take, leave, keep)
        except BaseException:
            leave()
            raise

    def _finish(self, seconds: float) -> None:
        """End the talker, in an answer with its next verdict: what one rank has been told, all have."""
        self._asked.put(None)
        self._changed.put(None)
        if self._talker.ident is not None:
            self._talker.join(timeout=seconds)

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
        """Verdict after `received` steps. Waits for the caller to draw them, unless a request waits."""
        while answer.pace.waits and not answer.left and answer.drawn < received and self._asked.empty():
            self._changed.get()
        return STOP if answer.left and answer.drawn < received else GO

    def _tell(self, message: bytes) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # a rank that has ended; launch ends the others
                pipe.send_bytes(message)


def serve(team: Team, parent: Connection, make: Make) -> None:
    """Answer requests by the engine that `make` builds, until the parent closes its end.

    to all ranks  ("request", (prompts, params, every)), then verdicts: "go" or "stop"
    from rank 0   for a request ("pieces", columns of Piece) after each step, then ("stats", Stats); or ("refused", why)
    from each     ("progress", (bytes read, bytes to read)), ("warm_up_progress", (graphs captured, graphs to capture)) by
                  rank 0, then ("loaded", None)

    After 2 * `every` steps, 3 * `every` and so on a rank waits for the next verdict. All ranks read the same messages, or the
    end of the pipe, at the same steps, so they stop at one step without a collective. Verdicts that an answer has left unread
    are skipped.
    """
    with parent:
        engine = load(team, parent, make)
        with suppress(ParentClosed):
            while True:
                _answer_next(team.rank, engine, parent)


def load(team: Team, parent: Connection, make: Make) -> Engine:
    """Engine of a rank.

    Tells the parent its progress, by rank 0, and then ("loaded", None), as `serve` says.
    """
    if multiprocessing.parent_process() is not None:
        # Ctrl-C reaches every process of a terminal, and the parent decides when ranks end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(name: str, *counts: int) -> None:
        if parent.poll():  # no request comes before "loaded": this is the end of the pipe
            raise ParentClosed
        if team.rank == 0:
            parent.send_bytes(encode((name, counts)))

    engine = make(team, **{name: partial(tell, name) for name in ("progress", "warm_up_progress")})
    parent.send_bytes(encode(("loaded", None)))
    return engine


def receive(pipe: Connection) -> Message:
    """Next message of a rank, in the parent. EOFError or OSError where there is none any more."""
    kind, value = decode(pipe.recv_bytes())
    if kind == "pieces":
        return kind, pieces_of_columns(value)
    return ("error", ValueError(value)) if kind == "refused" else (kind, value)


def _answer_next(rank: int, engine: Engine, parent: Connection) -> None:
    def hear() -> bytes:
        try:
            return parent.recv_bytes()
        except (EOFError, OSError):  # the latter where pieces were left unread
            raise ParentClosed from None

    def tell(kind: str, value: Any) -> None:
        if rank == 0:
            with suppress(OSError):  # the parent has closed: all ranks find out at the same step
                parent.send_bytes(encode((kind, value)))

    while (message := hear()) in (GO, STOP):
        pass
    prompts, params, every = decode(message)[1]
    try:
        steps = engine.answer_in_steps(prompts, params)
    except ValueError as error:  # the same on every rank, and the next request may be right
        tell("refused", str(error))
        return
    with closing(steps):
        for done, pieces in enumerate(steps, 1):
            tell("pieces", columns_of(pieces))
            if done > every and done % every == 0 and hear() == STOP:
                break
    tell("stats", engine.stats)

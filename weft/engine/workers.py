"""The ranks behind an LLM: processes that stay, one a GPU, or virtual ranks that are made anew for every call."""

from __future__ import annotations

import atexit
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.answers import Piece, Prompt, Stats
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.params import SamplingParams
from weft.engine.serve import Allowance, send_at_once, serve
from weft.errors import WeftError
from weft.models.checkpoint import Progress
from weft.models.loading import ModelConfig
from weft.runtime.launch import launch
from weft.runtime.team import init

if TYPE_CHECKING:
    from weft.runtime.team import Team

Requests = tuple[list[Prompt], list[SamplingParams]]

# Steps that processes on GPUs may be ahead of their caller: after half as many they hear that they may go on. A decoding step
# of Qwen3-32B takes 5 to 12 ms on H200s, so a stream that is left stops within 0.3 to 0.8 s, later where long prompts are
# being read, and a caller may be late by half of that before the GPUs wait for it. `generate` draws all the time, and whatever
# else its process does is not to hold it up.
STREAM_AHEAD = 64
GENERATE_AHEAD = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What each rank's Engine is made of, see there, and its team."""

    model: Path | ModelConfig | None
    config: EngineConfig = EngineConfig()
    heap_bytes: int | None = None

    def build(self, team: Team, progress: Progress | None = None, warn: bool = True) -> Engine:
        return Engine(self.model, team, config=self.config, progress=progress, warn=warn)


@dataclass(slots=True, eq=False, kw_only=True)
class _Run:
    """One answer that virtual ranks compute, in a thread of its own.

    closed  no more pieces will be drawn
    ended   its simulation has ended
    """

    thread: threading.Thread
    closed: threading.Event
    ended: threading.Event

    def end(self) -> None:
        """Let it end with the step that runs, and wait for that. (Python forgets a thread whose `join` was interrupted.)"""
        self.closed.set()
        while self.thread.is_alive() and not self.ended.wait(timeout=0.1):
            pass


class VirtualWorkers:
    """Virtual ranks of this process. An engine's tensors belong to one simulation, so every call loads the model again.

    A process has one simulation at a time: the thread that runs it holds `_turn`. So an interrupt of the calling thread, at
    whatever line, lets no second one begin.
    """

    _turn = threading.Lock()
    _latest: _Run | None = None  # of this process

    def __init__(self, world_size: int, options: EngineOptions, progress: Progress | None) -> None:
        self._world_size, self._options, self._progress = world_size, options, progress
        self._own: _Run | None = None

        def build(team: Team) -> None:
            options.build(team)

        with self._turn:
            self._launch(build)  # says at once what is wrong

    def ask(
        self, requests: Requests, keep: Callable[[Stats], None], ahead: int = STREAM_AHEAD
    ) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come; `keep` gets the statistics at its end. `ahead` is for ranks that stay.

        An answer that was not drawn to its end is computed to its end before the next begins. One that was closed ends with the
        step that runs.
        """
        found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        closed, ended = threading.Event(), threading.Event()
        decisions: list[bool] = []

        def goes_on(done: int) -> bool:
            """After so many steps. The rank that asks first decides for all; they take turns, so it needs no lock."""
            if len(decisions) < done:
                decisions.append(not closed.is_set())
            return decisions[done - 1]

        def rank(team: Team) -> None:
            engine = self._options.build(
                team, self._progress if team.rank == 0 else None, False
            )  # the first has warned
            for done, pieces in enumerate(engine.answer_in_steps(*requests), 1):
                if team.rank == 0:
                    found.put(("pieces", pieces))
                if not goes_on(done):
                    return
            if team.rank == 0:
                found.put(("stats", engine.stats))

        def run() -> None:
            try:
                with VirtualWorkers._turn:
                    if not closed.is_set():
                        self._launch(rank)
            except BaseException as error:
                found.put(("error", error))
            ended.set()
            # Only a caller that draws on after `close` reads this.
            found.put(("error", WeftError("this LLM is closed; make a new one")))

        def receive() -> tuple[str, Any]:
            message = found.get()
            if message[0] != "pieces":
                ended.wait()  # the caller's next simulation may not find this one
            return message

        thread = threading.Thread(target=run, name="weft virtual ranks", daemon=True)
        self._own = VirtualWorkers._latest = _Run(thread=thread, closed=closed, ended=ended)
        try:
            thread.start()
            return _unpacked(receive, keep, closed)
        except BaseException:
            closed.set()  # the caller has no generator
            raise

    def _launch(self, main: Callable[..., Any]) -> None:
        launch(main, self._world_size, "sim", heap_bytes=self._options.heap_bytes)

    def close(self) -> None:
        """They end with every call. The last may not have been drawn to its end: it ends with the step that runs."""
        if self._own is not None:
            self._own.end()

    @classmethod
    def end(cls) -> None:
        """The same for the latest call of any LLM of this process."""
        if cls._latest is not None:
            cls._latest.end()

    @classmethod
    def wait(cls) -> None:
        """Wait for the simulation that runs, if one does."""
        with cls._turn:
            pass


# The end of the process would cut off a thread in the middle of torch, which aborts.
atexit.register(VirtualWorkers.end)


@dataclass(slots=True, eq=False, kw_only=True)
class _Answer:
    """What the parent knows of one that the ranks compute.

    ahead     steps that they may be ahead of those received
    allowed   steps that they may run in all
    received  steps whose pieces have come
    found     what has come and nobody has drawn
    closed    nobody will draw more
    """

    ahead: int
    allowed: int
    received: int = 0
    found: deque[tuple[str, Any]] = field(default_factory=deque)
    closed: threading.Event = field(default_factory=threading.Event)


class ProcessWorkers:
    """A process per GPU (weft.launch), each with its engine, that answers until `close` or the end of this process.

    The ranks run a limited number of steps ahead of what has been drawn. So closing an answer takes no message, which a
    garbage collector could not send in the right order: they come to a stand by themselves, and the next call tells them.
    """

    def __init__(self, world_size: int, options: EngineOptions, progress: Progress | None) -> None:
        self._key = secrets.token_bytes(32)
        self._error: BaseException | None = None
        self._ranks: dict[int, Connection] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._latest: _Answer | None = None  # of which more is to come
        self._closed = False
        self._lock = threading.Lock()
        server = socket.create_server(("127.0.0.1", 0), backlog=world_size)
        arguments = (server.getsockname(), self._key, options)
        self._thread = threading.Thread(
            target=self._run, args=(world_size, arguments, options.heap_bytes), name="weft workers", daemon=True
        )
        self._thread.start()
        self._sender = threading.Thread(target=self._send, name="weft sender", daemon=True)
        self._sender.start()
        try:
            with server:
                self._accept(server, world_size)
            self._wait_until_loaded(progress)
        except BaseException:
            self.close()
            raise

    def ask(
        self, requests: Requests, keep: Callable[[Stats], None], ahead: int = STREAM_AHEAD
    ) -> Generator[Piece, None, None]:
        """As of VirtualWorkers, but the ranks run at most `ahead` steps more than have been drawn, and then wait.

        What is left of the last answer is read now, and stays its own; one that was closed ends where the ranks may go by now.
        """
        answer = _Answer(ahead=ahead, allowed=ahead)
        message = _pickled((requests, Allowance(steps=ahead, last=False)))

        def receive() -> tuple[str, Any]:
            with self._lock:
                if not answer.found:
                    self._receive()
                return answer.found.popleft()

        try:
            with self._lock:
                self._end_latest()
                if not self._thread.is_alive():
                    raise self._failure()
                # No call between these two, behind which an interrupt might come: what is asked is known, and the reverse.
                self._latest = answer
                self._outbox.put(message)
            return _unpacked(receive, keep, answer.closed)
        except BaseException:
            answer.closed.set()  # nobody has it
            raise

    def close(self) -> None:
        self._closed = True
        self._outbox.put(None)
        self._sender.join(timeout=30)  # what one rank has been told, all have
        for pipe in list(self._ranks.values()):
            pipe.close()  # a rank that reads from it ends
        self._ranks = {}
        self._thread.join(timeout=30)

    def _run(self, world_size: int, arguments: tuple, heap_bytes: int | None) -> None:
        try:
            launch(serve, world_size, "cuda", args=arguments, heap_bytes=heap_bytes)
        except BaseException as error:
            self._error = error

    def _accept(self, server: socket.socket, world_size: int) -> None:
        server.settimeout(0.05)
        while len(self._ranks) < world_size:
            if not self._thread.is_alive():
                raise self._failure()
            with suppress(TimeoutError):
                pipe = Connection(server.accept()[0].detach())
                threading.Thread(target=self._meet, args=(pipe,), name="weft caller", daemon=True).start()

    def _meet(self, pipe: Connection) -> None:
        """A rank, or a stranger who tries ports and may say nothing for ever: nobody waits for one."""
        try:
            deliver_challenge(pipe, self._key)
            answer_challenge(pipe, self._key)
            send_at_once(pipe)
            self._ranks[pipe.recv()] = pipe
        except (EOFError, OSError, AuthenticationError):
            pipe.close()
        if self._closed:  # meanwhile, perhaps without this one
            pipe.close()

    def _wait_until_loaded(self, progress: Progress | None) -> None:
        for rank in range(len(self._ranks)):  # rank 0 first: it alone says how far it is
            while (message := self._receive_from(self._ranks[rank])) != ("loaded", None):
                if progress is not None:
                    progress(*message[1])

    def _send(self) -> None:
        """What a thread of its own does, which no interrupt reaches: every message goes to all ranks, or to none."""
        while (message := self._outbox.get()) is not None:
            for pipe in self._ranks.values():
                with suppress(OSError):  # a rank that has ended: who reads from rank 0 hears of it
                    pipe.send_bytes(message)

    def _end_latest(self) -> None:
        """Reads it to its end, which is near if it is closed."""
        told = False
        while (answer := self._latest) is not None:
            if answer.closed.is_set() and not told:
                self._outbox.put(_pickled(Allowance(steps=answer.allowed, last=True)))
                told = True
            self._receive()

    def _receive(self) -> None:
        """The next message of the latest answer."""
        if not self._ranks:
            raise WeftError("this LLM is closed; make a new one")
        answer = self._latest
        message = self._receive_from(self._ranks[0])
        answer.found.append(message)
        if message[0] != "pieces":
            self._latest = None
            return
        answer.received += 1
        if answer.allowed - answer.received <= answer.ahead // 2 and not answer.closed.is_set():
            allowance = Allowance(steps=answer.received + answer.ahead, last=False)
            self._outbox.put(_pickled(allowance))
            answer.allowed = allowance.steps

    def _receive_from(self, pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._failure() from None
        except TypeError:  # `close`, called by another thread, has taken the pipe away
            if not self._closed:
                raise
            raise self._failure() from None

    def _failure(self) -> BaseException:
        """What ended the workers."""
        self._thread.join(timeout=30)
        return self._error or WeftError("the workers have ended; make a new LLM")


class RankWorkers:
    """This process, one of the ranks that torchrun has started. All of them make the same calls."""

    def __init__(self, options: EngineOptions, progress: Progress | None) -> None:
        self._team = init(heap_bytes=options.heap_bytes)
        self._engine = options.build(self._team, progress if self._team.rank == 0 else None)

    def ask(
        self, requests: Requests, keep: Callable[[Stats], None], ahead: int = STREAM_AHEAD
    ) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come, on every rank; `keep` gets the statistics at its end.

        No step runs before its pieces are drawn, whatever `ahead` is, so closing an answer frees its seats and pages at once.
        """
        pieces = self._engine.answer(*requests)

        def kept() -> Generator[Piece, None, None]:
            yield from pieces
            keep(self._engine.stats)

        return kept()

    def close(self) -> None:
        del self._engine
        self._team.close()


def _pickled(message: Any) -> bytes:
    """As `Connection.recv` reads it."""
    return bytes(ForkingPickler.dumps(message))


def _unpacked(
    receive: Callable[[], tuple[str, Any]], keep: Callable[[Stats], None], closed: threading.Event
) -> Generator[Piece, None, None]:
    """Pieces until the statistics or an error come. Reads the first at once, so that a refusal is raised by the call.

    `closed` is set when no more will be drawn; nothing else is done then, since a garbage collector may do it anywhere.
    """

    def drawn() -> Generator[Piece | None, None, None]:
        try:
            kind, value = receive()
            if kind != "error":
                yield None  # drawn below: a generator that has not begun would not notice that it is closed
            while kind == "pieces":
                yield from value
                kind, value = receive()
            if kind == "error":
                raise value
            keep(value)
        finally:
            closed.set()

    pieces = drawn()
    next(pieces)
    return pieces

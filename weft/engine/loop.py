"""Request loop of a rank, for LLM, AsyncLLM and the server, and processes that run it.

Before each step all ranks take the same commands, so they submit, cancel and stop at the same step without a collective.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from weft.engine.answers import Load, Piece, columns_of, pieces_of_columns
from weft.engine.config import Watchers
from weft.errors import PeerFailed, WeftError
from weft.runtime import logs
from weft.runtime.codec import decode, encode
from weft.runtime.launch import launch_on_pipes

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.params import Prompt, SamplingParams
    from weft.runtime.early import EarlyProcesses
    from weft.runtime.team.team import Team

# ("submit", number, prompt, SamplingParams); ("call", number, prompts, [SamplingParams]); ("cancel", number) of either; from a
# rank to all ranks ("prepared", number) and ("capture", 0). Numbers are chosen by the caller.
Command = tuple[Any, ...]
notices = logs.logger_of(logs.NOTICES)
logger = logs.logger_of(__name__)
# Seconds between two looks at grammars that are compiled while nothing else is done.
PREPARING_SECONDS = 1e-3
# Share of the time for captures of graphs beside requests: each holds up all streams, for a fifth of a second or so.
CAPTURE_SHARE = 0.05
# Takes what rank 0 tells, on the thread of the ranks; ("error", why) comes last, once.
Take = Callable[[str, Any], None]
# hear(wait, commands): commands before a step, the same on every rank: all that have arrived, and `commands` of one rank.
# Waits for one up to `wait` seconds; None: until there is one. ParentClosed: there will be no more.
Hear = Callable[[float | None, list[Command]], list[Command]]
# Called as make(team, progress=…, warm_up_progress=…, warn=…) on every rank; travels to processes, so a partial of Engine.
Make = Callable[..., "Engine"]


class ParentClosed(Exception):
    """The caller has closed its ranks."""


class RequestLoop:
    """Loop that answers requests by an engine, until `hear` raises ParentClosed. Collective.

    A submitted request joins the batch at once; one with a grammar once this is compiled on the rank whose commands all ranks
    take, and the other ranks then wait for theirs. A call is computed to its end, or to its cancellation, before the next
    call begins.

    tell  ("accepted", [number, ...]) and ("rejected", (number, why)) for requests and calls; after a step ("pieces",
          [Piece, ...]), whose `prompt` is a request's number, or the index in the call that was accepted last; ("ended", Stats)
          of the call; ("load", Load) when it has changed, beside requests
    """

    def __init__(self, engine: Engine, hear: Hear, tell: Take) -> None:
        self._engine, self._hear, self._tell = engine, hear, tell
        # The same on every rank: requests whose grammars are compiled, and calls that wait.
        self._preparing: dict[int, tuple[Prompt, SamplingParams, Future[Any] | None]] = {}
        self._waiting: dict[int, tuple[list[Prompt], list[SamplingParams]]] = {}
        self._call: tuple[int, Generator[list[Piece], None, None]] | None = None  # the one that is computed
        self._load: Load | None = None
        self._next_capture = 0.0  # by time.monotonic, of the rank whose commands all ranks take

    def run(self) -> None:
        try:
            while True:
                done = [number for number, (*_, future) in self._preparing.items() if future is None or future.done()]
                busy = self._engine.has_work or self._call or self._waiting
                wait = 0.0 if busy else PREPARING_SECONDS if self._preparing else None
                commands: list[Command] = [("prepared", number) for number in done]
                if self._engine.captures_left and (not busy or time.monotonic() >= self._next_capture):
                    commands.append(("capture", 0))
                self._obey(self._hear(wait, commands))
                self._step()
        except ParentClosed:
            if self._call is not None:
                self._cancel(self._call[0])
            self._engine.settle()
            for line in self._engine.against_plan():
                notices.info(line)

    def _obey(self, commands: list[Command]) -> None:
        accepted: list[int] = []
        for kind, number, *what in commands:
            if kind == "capture":
                self._capture()
            elif kind == "call":
                self._waiting[number] = tuple(what)
            elif kind == "cancel":
                self._cancel(number)
            elif kind == "submit" and what[1].structured_outputs is not None:
                self._preparing[number] = (*what, self._engine.prepare(what[1]))
            elif kind == "submit" or number in self._preparing:  # otherwise it was cancelled
                prompt, params, *_ = what or self._preparing.pop(number)
                try:
                    accepted.append(self._engine.submit(prompt, params, number=number))
                except ValueError as error:  # the same on every rank
                    self._tell("rejected", (number, str(error)))
        if accepted:
            self._tell("accepted", accepted)

    def _capture(self) -> None:
        """Capture a graph that was left for later, and wait with the next one while there are requests."""
        begin = time.monotonic()
        self._engine.capture_next()
        now = time.monotonic()
        self._next_capture = now + (now - begin) * (1 / CAPTURE_SHARE - 1)

    def _cancel(self, number: int) -> None:
        self._preparing.pop(number, None)
        self._waiting.pop(number, None)
        if self._call is not None and self._call[0] == number:
            self._call[1].close()
            self._call = None
        self._engine.cancel(number)

    def _step(self) -> None:
        """Run a step, if there is work, and tell its pieces."""
        if self._call is None and self._waiting:
            number = next(iter(self._waiting))
            try:
                self._call = number, self._engine.answer_in_steps(*self._waiting.pop(number), agreed=True)
            except ValueError as error:  # the same on every rank, and the next call may be right
                return self._tell("rejected", (number, str(error)))
            self._tell("accepted", [number])
        if self._call is not None:
            if (pieces := next(self._call[1], None)) is None:
                self._call = None
                return self._tell("ended", self._engine.stats)
        else:
            pieces = self._engine.step() if self._engine.has_work else []
        if pieces:
            self._tell("pieces", pieces)
        if self._call is None and _without_counts(load := self._engine.load) != self._load:
            self._load = _without_counts(load)
            self._tell("load", load)


def _without_counts(load: Load) -> Load:
    """The load without counts of drafts: they change with every step, and are told with the rest."""
    return load._replace(speculation=None)


def llm_closed() -> WeftError:
    return WeftError("this LLM is closed; make a new one")


def check_process(owner: int) -> None:
    """WeftError in a fork of the process `owner`, whose threads a fork does not have."""
    if (number := os.getpid()) != owner:
        raise WeftError(
            f"this LLM is at work for process {owner}, and process {number} is a fork of it; make another LLM here, or "
            f"have process {owner} ask"
        )


# Seconds that ranks have to end by themselves: for the step that runs, and for NCCL.
CLOSE_SECONDS = 10.0


class Processes:
    """A process per GPU, each with its engine, and this process's end of a pipe to each, until `close`.

    Before each step rank 0 reads the commands that have arrived and sends them to the other ranks, over a pipe to each. So all
    ranks take the same commands at the same step, and this process, which may be busy, is not asked. Only the thread `_talk`
    reads from the ranks, and only `_send` writes to them. No interrupt reaches these, so a message is whole. Callers only put
    into a queue, as does a garbage collector that drops a stream at any line.
    """

    def __init__(
        self,
        world_size: int,
        make: Make,
        heap_bytes: int | None,
        watchers: Watchers,
        take: Take,
        *,
        early: EarlyProcesses | None = None,
    ) -> None:
        self._take = take
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # of the processes
        self._over = threading.Event()  # they have ended, or failed and are being ended
        self._closed = False
        self._owner = os.getpid()
        self._started: list[BaseProcess] = []
        self._pipes, theirs = zip(*(Pipe() for _ in range(world_size)), strict=True)
        first, second = zip(*(Pipe() for _ in range(1, world_size)), strict=True) if world_size > 1 else ((), ())
        links = [first, *((end,) for end in second)]
        given = [(end, *link) for end, link in zip(theirs, links, strict=True)]

        def run() -> None:
            try:
                options = {"failed": self._fail, "early": early, "heap_bytes": heap_bytes}
                launch_on_pipes(serve, given, self._started, args=(make,), **options)
            except BaseException as error:
                self._error = self._error or error
            self._over.set()
            for end in theirs:
                end.close()

        self._processes = threading.Thread(target=run, name="weft processes", daemon=True)
        self._talker = threading.Thread(target=self._talk, name="weft talker", daemon=True)
        self._sender = threading.Thread(target=self._send, name="weft sender", daemon=True)
        self._processes.start()
        try:
            self._wait_until_loaded(watchers)
            for end in chain(*links):  # a rank that ends then closes its links for good
                end.close()
            self._talker.start()
            self._sender.start()
        except BaseException:
            self.close()
            raise

    def put(self, command: Command) -> None:
        """Send a command; from any thread, without waiting. NotExchangeable for one that cannot be sent."""
        check_process(self._owner)
        self._commands.put(encode(command))

    def close(self) -> None:
        """End the ranks with the step that runs, by a kill where they do not end.

        A fork of this process ends none.
        """
        if self._owner != os.getpid():
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        self._closed = True
        self._commands.put(None)
        self._shut()
        self._processes.join(timeout=max(0.0, deadline - time.monotonic()))
        for process in self._started if self._processes.is_alive() else ():
            process.kill()  # it is stopped, or hangs
        self._processes.join(timeout=CLOSE_SECONDS)
        if self._talker.ident is not None:
            self._talker.join(timeout=30)

    def _fail(self, error: BaseException) -> None:
        """Have the talker tell the error now: ranks that wait on their GPUs take seconds to be ended."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._shut()

    def _shut(self) -> None:
        """Shut this process's ends of the pipes to the ranks."""
        for pipe in self._pipes:
            with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # unlike close(), even while the talker reads

    def _send(self) -> None:
        with suppress(OSError):  # the ranks have ended, which `_talk` reports
            for command in iter(self._commands.get, None):
                self._pipes[0].send_bytes(command)

    def _talk(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._take(*receive(self._pipes[0]))
        self._commands.put(None)
        self._take("error", self._reason())

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
        self._over.wait(timeout=30)
        return self._error or WeftError("the workers have ended; make a new LLM")


def serve(team: Team, pipes: tuple[Connection, ...], make: Make) -> None:
    """Answer requests on one rank, by the engine that `make` builds, until the parent closes its end.

    pipes  to the parent, and after it rank 0's to the other ranks, or theirs to rank 0
    """
    parent, *links = pipes

    def hear(wait: float | None, commands: list[Command]) -> list[Command]:
        if team.rank == 0:
            told = [*_arrived(parent, 0.0 if commands else wait), *map(encode, commands)]
            for peer, link in enumerate(links, 1):
                try:
                    link.send_bytes(encode(told))
                except OSError:
                    raise PeerFailed(0, peer, "its process has ended") from None
        else:
            try:
                told = decode(links[0].recv_bytes())
            except (EOFError, OSError):  # rank 0 has ended
                raise ParentClosed from None
        return [decode(command) for command in told]

    def tell(kind: str, value: Any) -> None:
        if team.rank == 0:
            value = columns_of(value) if kind == "pieces" else value
            with suppress(OSError):  # the parent has closed: `hear` finds out
                parent.send_bytes(encode((kind, value)))

    with ExitStack() as ends:
        for end in pipes:
            ends.enter_context(end)
        RequestLoop(load(team, parent, make), hear, tell).run()


def load(team: Team, parent: Connection, make: Make) -> Engine:
    """Engine of a rank. Tells the parent its progress, by rank 0, and then ("loaded", None)."""
    if multiprocessing.parent_process() is not None:
        # Ctrl-C reaches every process of a terminal, and the parent decides when ranks end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(name: str, *counts: int) -> None:
        if parent.poll():  # no request comes before "loaded": this is the end of the pipe
            raise ParentClosed
        if team.rank == 0:
            parent.send_bytes(encode((name, counts)))

    engine = make(team, **{name: partial(tell, name) for name in ("progress", "warm_up_progress")})
    logger.debug("start: rank %d has its engine", team.rank)
    parent.send_bytes(encode(("loaded", None)))
    return engine


def receive(pipe: Connection) -> tuple[str, Any]:
    """Next message of a rank, in the parent. EOFError or OSError where there is none any more."""
    kind, value = decode(pipe.recv_bytes())
    return kind, pieces_of_columns(value) if kind == "pieces" else value


def _arrived(pipe: Connection, wait: float | None) -> list[bytes]:
    """Messages that have arrived, after up to `wait` seconds; None: at least one."""
    arrived: list[bytes] = []
    try:
        while pipe.poll(0.0 if arrived else wait):
            arrived.append(pipe.recv_bytes())
    except (EOFError, OSError):
        raise ParentClosed from None
    return arrived

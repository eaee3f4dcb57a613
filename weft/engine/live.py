"""Requests that come and go while a batch runs: the loop of a rank, and the ranks behind an AsyncLLM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from weft.engine.outputs import columns_of
from weft.engine.processes import ParentClosed, RankProcesses, load, receive
from weft.engine.progress import Watchers
from weft.engine.workers import Make, Message, VirtualRun, VirtualWorkers, check_process, llm_closed
from weft.errors import PeerFailed
from weft.runtime.codec import decode, encode

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.params import Prompt, SamplingParams
    from weft.runtime.team.team import Team

# ("submit", id, prompt, SamplingParams), ("cancel", id); from a rank to all ("prepared", id)
Command = tuple[Any, ...]
# Seconds between two looks at grammars that are compiled while nothing else is done.
PREPARING_SECONDS = 1e-3
# Takes what rank 0 tells, on the thread of the ranks; ("error", why) comes last, once.
Take = Callable[[str, Any], None]
Hear = Callable[[float | None, list[Command]], list[Command]]


def answer_requests(engine: Engine, hear: Hear, tell: Take) -> None:
    """Answer requests as they come, until `hear` raises ParentClosed. Collective.

    A request with a grammar is submitted once this is compiled on the rank whose commands all ranks take; the others wait for
    theirs then.

    hear  hear(wait, commands): commands before a step, the same on every rank: those that have arrived, and `commands` of one
          of the ranks. Waits for one up to `wait` seconds; None: until there is one
    tell  ("accepted", [id, ...]) and ("rejected", (id, why)) for submitted requests, ("pieces", [Piece, ...]), with the id as
          `prompt`, after a step, ("load", Load) when it has changed
    """
    last = None
    # Requests whose grammars are compiled, the same on every rank.
    preparing: dict[int, tuple[Prompt, SamplingParams, Future[Any] | None]] = {}
    while True:
        accepted = []
        done = [request for request, (*_, future) in preparing.items() if future is None or future.done()]
        prepared = [("prepared", request) for request in done]
        wait = 0.0 if engine.has_work else PREPARING_SECONDS if preparing else None
        try:
            commands = hear(wait, prepared)
        except ParentClosed:
            engine.settle()
            raise
        for kind, request, *what in commands:
            if kind == "submit" and what[1].structured_outputs is not None:
                preparing[request] = (*what, engine.prepare(what[1]))
            elif kind == "cancel":
                engine.cancel(request)
                preparing.pop(request, None)
            elif kind == "submit" or request in preparing:  # otherwise it was cancelled
                prompt, params, *_ = what or preparing.pop(request)
                try:
                    accepted.append(engine.submit(prompt, params, number=request))
                except ValueError as error:  # the same on every rank
                    tell("rejected", (request, str(error)))
        if accepted:
            tell("accepted", accepted)
        if engine.has_work:
            pieces = engine.step()
            if pieces:
                tell("pieces", pieces)
        if (load := engine.load) != last:
            last = load
            tell("load", load)


class LiveProcesses(RankProcesses):
    """A process per GPU that answers requests as they come.

    Before each step rank 0 reads the commands that have arrived and sends them to the other ranks, over a pipe to each. So all
    ranks take the same commands at the same step, and this process, which may be busy, is not asked.
    """

    def __init__(self, world_size: int, make: Make, heap_bytes: int | None, watchers: Watchers, take: Take) -> None:
        self._take = take
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="weft sender", daemon=True)
        first, others = zip(*(Pipe() for _ in range(1, world_size)), strict=True) if world_size > 1 else ((), ())
        super().__init__(serve_live, world_size, make, heap_bytes, watchers, [first, *((end,) for end in others)])
        self._sender.start()

    def put(self, command: Command) -> None:
        """Send a command; from any thread, without waiting. NotExchangeable for one that cannot be sent."""
        check_process(self._owner)
        self._commands.put(encode(command))

    def close(self) -> None:
        """End the ranks with the step that runs."""
        super().close()
        if self._talker.ident is not None:
            self._talker.join(timeout=30)

    def _finish(self, seconds: float) -> None:
        self._commands.put(None)

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


def serve_live(team: Team, pipes: tuple[Connection, ...], make: Make) -> None:
    """Answer requests on one rank, by the engine that `make` builds, until the parent closes its end.

    pipes  to the parent, and behind it rank 0's to the others, or theirs to rank 0
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
        engine = load(team, parent, make)
        with suppress(ParentClosed):
            answer_requests(engine, hear, tell)


def _arrived(pipe: Connection, wait: float | None) -> list[bytes]:
    """Messages that have arrived, after up to `wait` seconds; None: at least one."""
    found: list[bytes] = []
    try:
        while pipe.poll(0.0 if found else wait):
            found.append(pipe.recv_bytes())
    except (EOFError, OSError):
        raise ParentClosed from None
    return found


class LiveVirtualRanks:
    """Virtual ranks of this process that answer requests as they come, on a thread of their own."""

    def __init__(self, world_size: int, make: Make, heap_bytes: int | None, watchers: Watchers, take: Take) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._drawn: dict[int, tuple[list[Command | None], int]] = {}  # of a step: commands, and ranks that have them
        loaded: queue.SimpleQueue[Message] = queue.SimpleQueue()

        def rank(team: Team) -> None:
            engine = make(team, **(watchers if team.rank == 0 else {}))
            if team.rank == 0:
                loaded.put(("loaded", None))
            steps = 0

            def hear(wait: float | None, commands: list[Command]) -> list[Command]:
                nonlocal steps
                if wait != 0.0:
                    team.barrier()  # a rank that waits for a command holds up the others, so it is the last to have work
                steps += 1
                return self._commands_of(steps, wait, commands, team.size)

            with suppress(ParentClosed):
                answer_requests(engine, hear, take if team.rank == 0 else lambda kind, value: None)

        def run() -> None:
            error: BaseException = llm_closed()
            try:
                VirtualWorkers.run_alone(self._run, rank, world_size, heap_bytes)
            except BaseException as caught:
                error = caught
            self._run.ended.set()
            loaded.put(("error", error))
            take("error", error)

        self._run = VirtualRun(
            threading.Thread(target=run, name="weft virtual ranks", daemon=True),
            serving=True,
            wake=lambda: self._commands.put(None),
        )
        VirtualWorkers.begin(self._run)
        try:
            kind, error = loaded.get()
            if kind == "error":
                raise error
        except BaseException:
            self.close()
            raise

    def put(self, command: Command) -> None:
        """Send a command; from any thread, without waiting."""
        check_process(self._run.owner)
        self._commands.put(command)

    def close(self) -> None:
        """End the ranks with the step that runs."""
        self._run.end()

    def _commands_of(self, step: int, wait: float | None, commands: list[Command], ranks: int) -> list[Command]:
        """Commands before a step, drawn by the first rank that asks, with its own. Ranks take turns: no lock."""
        commands, have = self._drawn.pop(step, None) or (self._draw(0.0 if commands else wait) + commands, 0)
        if have + 1 < ranks:
            self._drawn[step] = commands, have + 1
        if None in commands:
            raise ParentClosed
        return commands

    def _draw(self, wait: float | None) -> list[Command | None]:
        found = []
        with suppress(queue.Empty):
            if wait != 0.0:
                found.append(self._commands.get(timeout=wait))
            while True:
                found.append(self._commands.get_nowait())
        return found

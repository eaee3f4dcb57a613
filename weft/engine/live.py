"""Requests that come and go while a batch runs: the loop of a rank, and the ranks behind an AsyncLLM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from weft.engine.outputs import columns_of
from weft.engine.processes import ParentClosed, RankProcesses, load, receive
from weft.engine.progress import Watchers
from weft.engine.workers import Make, Message, VirtualRun, VirtualWorkers, llm_closed
from weft.errors import PeerFailed
from weft.runtime.codec import decode, encode

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.runtime.team.team import Team

# ("submit", id, prompt, SamplingParams), ("cancel", id)
Command = tuple[Any, ...]
# Takes what rank 0 tells, on the thread of the ranks; ("error", why) comes last, once.
Take = Callable[[str, Any], None]


def answer_requests(engine: Engine, hear: Callable[[bool], list[Command]], tell: Take) -> None:
    """Answer requests as they come, until `hear` raises ParentClosed. Collective.

    hear  hear(idle): commands before a step, the same on every rank; if idle, waits until there is one
    tell  ("accepted", [id, ...]) and ("rejected", (id, why)) for submitted requests, ("pieces", [Piece, ...]), with the id as
          `prompt`, after a step, ("load", Load) when it has changed
    """
    last = None
    while True:
        accepted = []
        for kind, request, *what in hear(not engine.has_work):
            if kind == "submit":
                try:
                    accepted.append(engine.submit(*what, number=request))
                except ValueError as error:  # the same on every rank
                    tell("rejected", (request, str(error)))
            else:
                engine.cancel(request)
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
        self._commands.put(encode(command))

    def close(self) -> None:
        """End the ranks with the step that runs."""
        self._commands.put(None)
        super().close()
        if self._talker.ident is not None:
            self._talker.join(timeout=30)

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

    def hear(idle: bool) -> list[Command]:
        if team.rank == 0:
            told = _arrived(parent, idle)
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


def _arrived(pipe: Connection, wait: bool) -> list[bytes]:
    """Messages that have arrived; with `wait` at least one."""
    found: list[bytes] = []
    try:
        while pipe.poll(None if wait and not found else 0):
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

            def hear(idle: bool) -> list[Command]:
                nonlocal steps
                if idle:
                    team.barrier()  # a rank that waits for a command holds up the others, so it is the last to have work
                steps += 1
                return self._commands_of(steps, idle, team.size)

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
        self._commands.put(command)

    def close(self) -> None:
        """End the ranks with the step that runs."""
        self._run.end()

    def _commands_of(self, step: int, wait: bool, ranks: int) -> list[Command]:
        """Commands before a step, drawn by the first rank that asks. Ranks take turns: no lock."""
        commands, have = self._drawn.pop(step, None) or (self._draw(wait), 0)
        if have + 1 < ranks:
            self._drawn[step] = commands, have + 1
        if None in commands:
            raise ParentClosed
        return commands

    def _draw(self, wait: bool) -> list[Command | None]:
        found = [self._commands.get()] if wait else []
        with suppress(queue.Empty):
            while True:
                found.append(self._commands.get_nowait())
        return found

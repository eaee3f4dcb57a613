"""What a rank's process does for the LLM that has started it: it answers, as far as it is allowed to run ahead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from contextlib import closing, suppress
from multiprocessing.connection import Client, Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.workers import EngineOptions
    from weft.runtime.team import Team


class Allowance(NamedTuple):
    """From the parent to all ranks alike: how many steps of this answer they may run in all, and whether it ends there.

    A rank reads the next one when it has run them, so all read it at the same step, and agree. One that ends the answer may
    name fewer than they have run: it ends where they are.
    """

    steps: int
    last: bool


def serve(team: Team, address: tuple[str, int], key: bytes, options: EngineOptions) -> None:
    """What each rank's process runs: it answers what the parent sends to all ranks alike. Rank 0 sends the pieces.

    That the parent has closed, all ranks learn where they read from it, at the same step; rank 0 goes on with them until then.
    """
    if (process := multiprocessing.parent_process()) is not None:
        # Ctrl-C reaches every process of a terminal, and the parent decides when ranks end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(process.sentinel,), name="weft parent watch", daemon=True).start()
    with Client(address, authkey=key) as parent:

        def loading(*bytes_read: int) -> None:
            if parent.poll():  # nothing is asked of ranks that load: this is the end of the pipe
                raise _ParentClosed
            if team.rank == 0:
                parent.send(("progress", bytes_read))

        send_at_once(parent)
        parent.send(team.rank)
        engine = options.build(team, loading)
        parent.send(("loaded", None))
        with suppress(_ParentClosed):
            while True:
                _answer_next(team.rank, engine, parent)


class _ParentClosed(Exception):
    pass


def _answer_next(rank: int, engine: Engine, parent: Connection) -> None:
    def hear() -> Any:
        try:
            return parent.recv()
        except (EOFError, OSError):  # the latter where pieces were left unread
            raise _ParentClosed from None

    def tell(*message: Any) -> None:
        if rank == 0:
            with suppress(OSError):
                parent.send(message)

    while isinstance(message := hear(), Allowance):
        pass  # of an answer that has ended meanwhile
    requests, allowance = message
    try:
        steps = engine.answer_in_steps(*requests)
    except ValueError as error:  # the same on every rank, and the next request may be right
        tell("error", error)
        return
    with closing(steps):
        for done, pieces in enumerate(steps, 1):
            tell("pieces", pieces)
            while done == allowance.steps and not allowance.last:
                allowance = hear()
            if done >= allowance.steps:
                break
    tell("stats", engine.stats)


def send_at_once(pipe: Connection) -> None:
    """A message does not wait until the one before has been acknowledged (Nagle's algorithm), which may take 40 ms."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _end_with(sentinel: int) -> None:
    """A rank whose parent was killed may be waiting on the GPU for another that has noticed already: nobody else ends it."""
    wait([sentinel])
    os._exit(1)

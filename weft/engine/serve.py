"""Loop of a rank's process behind an LLM: requests come in through a pipe, and rank 0 sends back what it generates."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from weft.engine.outputs import Piece
from weft.runtime.codec import decode, encode

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.runtime.team import Team

GO, STOP = encode(("go", None)), encode(("stop", None))


class ParentClosed(Exception):
    """The parent has closed its end of the pipe."""


def serve(team: Team, parent: Connection, make: Callable[..., Engine]) -> None:
    """Answer requests by the engine that `make` builds, until the parent closes its end.

    to all ranks  ("request", (prompts, params, every)), then verdicts: "go" or "stop"
    from rank 0   for a request ("pieces", columns of Piece) after each step, then ("stats", Stats); or ("refused", why)
    from each     ("progress", (bytes read, bytes to read)) by rank 0, then ("loaded", None)

    After 2 * `every` steps, 3 * `every` and so on a rank waits for the next verdict. All ranks read the same messages, or the
    end of the pipe, at the same steps, so they stop at one step without a collective. Verdicts that an answer has left unread
    are skipped.
    """
    if multiprocessing.parent_process() is not None:
        # Ctrl-C reaches every process of a terminal, and the parent decides when ranks end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def progress(*read: int) -> None:
        if parent.poll():  # no request comes before "loaded": this is the end of the pipe
            raise ParentClosed
        if team.rank == 0:
            parent.send_bytes(encode(("progress", read)))

    with parent:
        engine = make(team, progress=progress)
        parent.send_bytes(encode(("loaded", None)))
        with suppress(ParentClosed):
            while True:
                _answer_next(team.rank, engine, parent)


def receive(pipe: Connection) -> tuple[str, Any]:
    """Next message of a rank, in the parent. EOFError or OSError where there is none any more."""
    kind, value = decode(pipe.recv_bytes())
    if kind == "pieces":
        return kind, [Piece(*fields) for fields in zip(*value, strict=True)]
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
            tell("pieces", [list(column) for column in zip(*pieces, strict=True)])
            if done > every and done % every == 0 and hear() == STOP:
                break
    tell("stats", engine.stats)

"""Request loop of a rank, for LLM, AsyncLLM and the server: requests come and go while a batch runs.

Before each step all ranks take the same commands, so they submit, cancel and stop at the same step without a collective.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from weft.arguments import check_callable, check_optional
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.engine.answers import Load, Piece
    from weft.engine.engine import Engine
    from weft.engine.params import Prompt, SamplingParams
    from weft.models.checkpoint import Progress

# Engine's progress and warm_up_progress by these names, called in the caller's process.
Watchers = Mapping[str, Callable[[int, int], None]]
logger = logging.getLogger("weft.engine")


def watchers_of(progress: Progress | None, warm_up_progress: Progress | None) -> Watchers:
    """The functions that are given, by name; in place of a missing `warm_up_progress` one that logs."""
    check_optional(check_callable, "progress", progress, "progress(bytes read, bytes to read)")
    check_optional(check_callable, "warm_up_progress", warm_up_progress, "warm_up_progress(captured, to capture)")
    given = {"progress": progress, "warm_up_progress": warm_up_progress or every_tenth(logger.info)}
    return {name: function for name, function in given.items() if function is not None}


def every_tenth(say: Callable[[str], None]) -> Progress:
    """A `warm_up_progress` that says a line for each tenth of the graphs."""

    def progress(captured: int, total: int) -> None:
        if captured * 10 // total > (captured - 1) * 10 // total:
            say(f"captured {captured} of {total} CUDA graphs")

    return progress


# ("submit", number, prompt, SamplingParams); ("call", number, prompts, [SamplingParams]); ("cancel", number) of either; from a
# rank to all ranks ("prepared", number). Numbers are chosen by the caller.
Command = tuple[Any, ...]
# Seconds between two looks at grammars that are compiled while nothing else is done.
PREPARING_SECONDS = 1e-3
# Takes what rank 0 tells, on the thread of the ranks; ("error", why) comes last, once.
Take = Callable[[str, Any], None]
# hear(wait, commands): commands before a step, the same on every rank: those that have arrived, and `commands` of one of the
# ranks. Waits for one up to `wait` seconds; None: until there is one. ParentClosed: there will be no more.
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

    def run(self) -> None:
        try:
            while True:
                done = [number for number, (*_, future) in self._preparing.items() if future is None or future.done()]
                busy = self._engine.has_work or self._call or self._waiting
                wait = 0.0 if busy else PREPARING_SECONDS if self._preparing else None
                self._obey(self._hear(wait, [("prepared", number) for number in done]))
                self._step()
        except ParentClosed:
            if self._call is not None:
                self._cancel(self._call[0])
            self._engine.settle()

    def _obey(self, commands: list[Command]) -> None:
        accepted: list[int] = []
        for kind, number, *what in commands:
            if kind == "call":
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
                self._call = number, self._engine.answer_in_steps(*self._waiting.pop(number))
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
        if self._call is None and (load := self._engine.load) != self._load:
            self._load = load
            self._tell("load", load)


def llm_closed() -> WeftError:
    return WeftError("this LLM is closed; make a new one")


def check_process(owner: int) -> None:
    """WeftError in a fork of the process `owner`, whose threads a fork does not have."""
    if (number := os.getpid()) != owner:
        raise WeftError(
            f"this LLM is at work for process {owner}, and process {number} is a fork of it; make an LLM of its own here, or "
            f"have process {owner} ask"
        )

"""Ranks behind an LLM: virtual ranks, the ranks of torchrun, and what both share with processes."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.engine.engine import Engine
from weft.engine.outputs import Piece, Stats
from weft.engine.params import Prompt, SamplingParams
from weft.engine.progress import Watchers
from weft.errors import WeftError
from weft.runtime.launch import launch
from weft.runtime.team.team import init

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

Requests = tuple[list[Prompt], list[SamplingParams]]
Pieces = Generator[Piece, None, None]
Message = tuple[str, Any]
# Called as make(team, progress=…, warm_up_progress=…, warn=…) on every rank; travels to processes, so a partial of Engine.
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


def llm_closed() -> WeftError:
    return WeftError("this LLM is closed; make a new one")


def check_process(owner: int) -> None:
    """WeftError in a fork of the process `owner`, whose threads a fork does not have."""
    if (number := os.getpid()) != owner:
        raise WeftError(
            f"this LLM is at work for process {owner}, and process {number} is a fork of it; make an LLM of its own here, or "
            f"have process {owner} ask"
        )


@dataclass(slots=True, eq=False)
class VirtualRun:
    """Thread in which virtual ranks compute an answer, or serve requests.

    left     no more pieces are drawn
    ended    its simulation has ended
    serving  it goes on until `end`
    wake     called by `end`, for ranks that wait for requests
    owner    id of the process that has the thread
    """

    thread: threading.Thread
    serving: bool = False
    wake: Callable[[], None] = field(default=lambda: None)
    left: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    owner: int = field(default_factory=os.getpid)

    def end(self) -> None:
        """End it with the step that runs, and wait until its thread is gone."""
        self.left.set()
        self.wake()
        # Not `join`: Python forgets a thread whose `join` was interrupted.
        while self.thread.is_alive():
            if self.ended.wait(timeout=0.1):
                time.sleep(1e-3)  # it is about to go


class VirtualWorkers:
    """Virtual ranks of this process, made anew for every call.

    An engine's tensors belong to one simulation, so every call loads the model again. A process has one simulation at a time:
    the thread that runs it holds `_turn`. So no second one begins, wherever the calling thread is interrupted.
    """

    _turn = threading.Lock()
    _latest: VirtualRun | None = None  # in this process

    def __init__(self, world_size: int, make: Make, heap_bytes: int | None, watchers: Watchers) -> None:
        self._world_size, self._make, self._heap_bytes, self._watchers = world_size, make, heap_bytes, watchers
        self._own: VirtualRun | None = None

        def build(team: Team) -> None:
            make(team)

        self._check_free()
        with self._turn:
            self._launch(build)  # errors and warnings come now

    def ask(self, requests: Requests, keep: Keep, pace: Pace = STREAM) -> Pieces:
        """Yield the pieces of an answer; `keep` gets its statistics. `pace` is for processes.

        An answer that was not drawn to its end is computed to its end before the next begins; a closed one ends with the step
        that runs.
        """
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        decisions: list[bool] = []

        def goes_on(done: int) -> bool:
            """Decision after `done` steps, made by the first rank to ask. Ranks take turns: no lock."""
            if len(decisions) < done:
                decisions.append(not run.left.is_set())
            return decisions[done - 1]

        def rank(team: Team) -> Stats | None:
            engine = self._make(team, **(self._watchers if team.rank == 0 else {}), warn=False)
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
                last = ("error", llm_closed()) if stats is None else ("stats", stats)
            except BaseException as error:
                last = ("error", error)
            run.ended.set()  # before the caller goes on: its next simulation may not find this one
            messages.put(last)

        run = VirtualRun(threading.Thread(target=compute, name="weft virtual ranks", daemon=True))
        self._own = run
        try:
            self.begin(run)
            return pieces_of(messages.get, run.left.set, keep)
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
    def begin(cls, run: VirtualRun) -> None:
        """Start the thread of a run. WeftError while another one serves requests."""
        cls._check_free()
        cls._latest = run
        run.thread.start()

    @classmethod
    def run_alone(cls, run: VirtualRun, main: Callable[[Team], Any], world_size: int, heap_bytes: int | None) -> None:
        """Run main(team) on virtual ranks after the simulation before, unless `run` was left meanwhile."""
        with cls._turn:
            if not run.left.is_set():
                launch(main, world_size, "sim", heap_bytes=heap_bytes)

    @classmethod
    def _check_free(cls) -> None:
        if cls._latest is None or cls._latest.ended.is_set():
            return
        check_process(cls._latest.owner)
        if cls._latest.serving:
            raise WeftError("the virtual ranks of this process serve an AsyncLLM; close it first")

    @classmethod
    def end(cls) -> None:
        """End the latest call of any LLM of this process, which ends. A further interrupt ends it at once."""
        if cls._latest is not None:
            try:
                cls._latest.end()
            except KeyboardInterrupt:
                os._exit(130)


# The end of the process would cut off a thread in the middle of torch, which aborts.
atexit.register(VirtualWorkers.end)


class RankWorkers:
    """This process, one of the ranks that torchrun has started. All of them make the same calls."""

    def __init__(self, make: Make, heap_bytes: int | None, watchers: Watchers) -> None:
        self._team = init(heap_bytes=heap_bytes)
        self._engine = make(self._team, **(watchers if self._team.rank == 0 else {}))

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


def pieces_of(take: Callable[[], Message], leave: Callable[[], None], keep: Keep) -> Pieces:
    """Yield pieces until the statistics or an error arrive.

    Takes the first message at once, so that the call raises a refusal. Calls `leave` when no more will be drawn: a garbage
    collector may do so at any line of the program.
    """

    owner = os.getpid()

    def drawn() -> Generator[Piece | None, None, None]:
        try:
            kind, value = take()
            if kind != "error":
                yield None  # drawn below: a generator that has not begun would not notice that it is closed
            while kind == "pieces":
                yield from value
                check_process(owner)
                kind, value = take()
            if kind == "error":
                raise value
            keep(value)
        finally:
            leave()

    pieces = drawn()
    next(pieces)
    return pieces

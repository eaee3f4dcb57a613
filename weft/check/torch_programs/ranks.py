"""State of one virtual rank of a torch program, and of the program on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.check.torch_programs.processes import Process
from weft.errors import NotInterpretable
from weft.simulator.machine.tasks import Waiting
from weft.triton_api import driver

if TYPE_CHECKING:
    from weft.simulator.machine.machine import Machine


@dataclass(slots=True, eq=False)
class Rank:
    """State of a rank.

    stream   current side stream; None: the main stream
    scopes   the current streams outside the scopes of ``with stream:``, innermost last
    streams  number of side streams made so far
    world    its group of all ranks; None before ``init_process_group``
    numbers  counts of calls, by what is called, for names that agree on all ranks
    """

    rank: int
    process: Process
    stream: Any = None
    scopes: list[Any] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)
    world: Any = None
    numbers: dict[str, int] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)

    def number(self, what: str) -> int:
        self.numbers[what] = self.numbers.get(what, 0) + 1
        return self.numbers[what]


@dataclass(slots=True, eq=False)
class Meeting:
    """Arrivals of streams at one meeting: what each knows and brings, by rank."""

    known: dict[int, Any] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)


def ranks_if_running() -> Ranks | None:
    """Ranks of the torch program that runs now, which the stand-in for Triton's driver names."""
    return getattr(driver._active, "ranks", None)


def running_ranks() -> Ranks:
    """Ranks of the torch program that runs now. RuntimeError outside a run."""
    ranks = ranks_if_running()
    if ranks is None:
        raise RuntimeError(
            "a module imported this stand-in for a GPU's function within weft check; it works only there"
        )
    return ranks


class Ranks:
    """Ranks of a torch program on a machine: ``Machine.hosts`` while it runs."""

    def __init__(self, machine: Machine, patches: Callable[[Ranks], AbstractContextManager[None]]) -> None:
        """``patches``: scope in which torch's functions act on these ranks."""
        self.machine, self._patches = machine, patches
        size = machine.world_size
        self.ranks = [Rank(rank, Process(rank, size)) for rank in range(size)]
        self.meetings: dict[str, Meeting] = {}
        self._shared: set[str] = set()
        # Operators: custom ones by name, ranks that define one, kernels of ranks, libraries that end with the run.
        self.operators: dict[str, Any] = {}
        self.defined: dict[str, set[int]] = {}
        self.kernels: dict[tuple[str, str], dict[int, Any]] = {}
        self.libraries: list[Any] = []
        self.stand_ins: dict[tuple[object, str], Any] = {}  # for members of modules, by module and name
        self._stack = ExitStack()
        # External functions of kernels by symbol; ``patches`` gives them.
        self.functions: Callable[[str], Callable[..., int] | None] = lambda symbol: None

    @property
    def here(self) -> Rank:
        """The rank whose task runs."""
        return self.ranks[self.machine.rank]

    def __enter__(self) -> Ranks:
        self._stack.enter_context(self._patches(self))
        self._shared = set(sys.modules)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def turn(self, rank: int) -> AbstractContextManager[None]:
        return self.ranks[rank].process.turn(self._shared)

    def launching(self, kernel: str) -> None:
        if self.here.stream is not None:
            raise self.refuse(f"kernel {kernel} on a side stream", "launch it on the main stream")

    def external(self, symbol: str) -> Callable[..., int] | None:
        return self.functions(symbol)

    def refuse(self, what: str, instead: str = "") -> NotInterpretable:
        return NotInterpretable(f"{what} is not simulated{f'; {instead}' if instead else ''}")

    # --- order between streams ---------------------------------------------------------------------------------------

    def meet(self, name: str, members: list[int], item: object = None) -> list[Any]:
        """Meeting of the streams that run this on all ``members``; the items in their order. In any task."""
        machine = self.machine
        rank = machine.rank
        meeting = self.meetings.setdefault(name, Meeting())
        meeting.known[rank], meeting.items[rank] = machine.observer.published(), item
        machine.scheduler.recheck()

        def absent() -> str:
            return f"waits in {name} for rank {', '.join(str(m) for m in members if m not in meeting.known)}"

        machine.scheduler.block(Waiting(lambda: len(meeting.known) == len(members), absent))
        for member in members:
            if member != rank:
                machine.observer.learned(meeting.known[member])
        return [meeting.items[member] for member in members]

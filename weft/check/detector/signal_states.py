"""State of a signal: what its value publishes, who wrote it, and who waits for one value of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from weft.check.detector.thread_clocks import Access, Note, Notes, ThreadClock, Write
from weft.check.detector.vector_clocks import joined
from weft.simulator.machine.memory import signed

_WRITES = 32  # latest writes kept of a signal


@dataclass(slots=True)
class OneValue:
    """Wait until a signal equals ``wanted`` (None: a value that a raw loop's condition does not show).

    end   time of its thread's slot when it ended, or at its last poll for a value not known; None until then
    seen  the last value of such a poll
    """

    thread: ThreadClock
    wanted: int | None
    code: tuple | None
    end: int | None = None
    seen: int | None = None


@dataclass(slots=True)
class Signal:
    """Signal: the clocks that the release sequence of its present value publishes, and its history.

    by_all   to acquires at system scope
    by_rank  rank -> to that rank's acquires, at GPU scope too
    """

    address: int
    itemsize: int
    by_all: np.ndarray | None = None
    by_rank: dict[int, np.ndarray] = field(default_factory=dict)
    writers: list[Write] = field(default_factory=list)  # the latest
    # Writers whose stores an acquire does not make visible.
    unreleased: dict[ThreadClock, Note] = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)  # of the writers themselves
    wanted: int = 0
    added: int = 0
    notify_launches: set[int] = field(default_factory=set)
    wait_launches: set[int] = field(default_factory=set)
    for_one_value: dict[int, OneValue] = field(default_factory=dict)  # by slot
    # Waits that may miss their values, with a function that reports it, by slot, line and value.
    missed: dict[tuple, tuple[OneValue, Callable[[], None]]] = field(default_factory=dict)
    initial: int = 0  # value before the first write
    fell: bool = False  # a write has decreased it
    early_release: tuple[np.ndarray, tuple | None] | None = None  # as in ThreadClock
    back: tuple[str, Access] | None = None  # a notify that decreased it, reported if a program relies on its growth
    is_to_grow: bool = False

    def forget(self) -> None:
        """End the release sequence, as a plain or relaxed store does."""
        self.by_all = None
        self.by_rank = {}
        self.unreleased = {}
        self.notes = {}

    def release(self, rank: int, clock: np.ndarray, scope: str) -> None:
        if scope == "sys":
            self.by_all = clock.copy() if self.by_all is None else joined(self.by_all, clock)
        if scope != "cta":
            known = self.by_rank.get(rank)
            self.by_rank[rank] = clock.copy() if known is None else joined(known, clock)

    def all_released(self) -> list[np.ndarray]:
        """Clocks of all releases, whatever their scopes."""
        return [*self.by_rank.values(), *([self.by_all] if self.by_all is not None else [])]

    def visible(self, rank: int, scope: str) -> list[np.ndarray]:
        """Clocks that an acquire by a task of ``rank`` at ``scope`` learns."""
        of_rank = [self.by_rank[rank]] if rank in self.by_rank and scope != "cta" else []
        return [*of_rank, self.by_all] if scope == "sys" and self.by_all is not None else of_rank

    def wrote(self, write: Write) -> None:
        if not self.writers:
            self.initial = write.old
        self.fell = self.fell or signed(write.value - write.old, self.itemsize) < 0
        self.writers.append(write)
        del self.writers[:-_WRITES]

"""What the race detector keeps for each line of program order: its clock, and how far its accesses are published.

main    a rank's main stream: host-side tensor operations and kernel launches
stream  a side stream (the copy engine)
program a program instance. Its threads are not one: a release by one thread covers what all threads did before the last
        CTA barrier, and its own; tensor-descriptor stores are covered once they are drained, before such a barrier

What a program does is of several kinds, with a slot each: ``SCALAR`` by one thread; ``BLOCK`` by all, but for plain loads,
which are ``LOADED``: behind a CTA barrier they have their values, so that even a relaxed write makes them known; ``ASYNC`` by
the asynchronous proxy; of copies that ``quiet`` completes, ``DELIVERY`` the stores of puts, which a fence orders, and
``COPYING`` all else; ``FLAGGED`` Lamport stores; ``AWAITED`` loads whose value the program has had before it went on (Lamport
and volatile ones), and its own Lamport stores that such a load has found in memory. A Lamport word tells its reader of what
was awaited, and of all else up to the last fence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.simulator.vector_clocks import HEARD, TOLD, Slots, fit, joined

BLOCK, SCALAR, LOADED, ASYNC, FLAGGED, AWAITED = "block", "scalar", "loaded", "async", "flagged", "awaited"
DELIVERY, COPYING = "delivery", "copying"
# Kinds whose accesses the program itself does not see in order.
_LATE = (ASYNC, DELIVERY, COPYING)


@dataclass(slots=True)
class Sync:
    """The last synchronisation of a thread, put into words when it is reported."""

    verb: str
    address: int | None = None
    code: tuple | None = None


@dataclass(slots=True, eq=False)
class Access:
    """One access as it is remembered: ``time`` of ``slot``; ``seq`` is the program's count of releases by then."""

    number: int
    thread: ThreadClock
    kind: str
    slot: int
    time: int
    seq: int
    verb: str
    code: tuple | None
    scope: str | None
    sync: Sync
    message: np.ndarray | None = None
    resets: bool = False  # it set a signal back
    launches: int | None = None  # of a copy: kernels that its rank had launched when it was given


class ThreadClock:
    def __init__(self, slots: Slots, rank: int, label: str, name: object, clock: np.ndarray) -> None:
        self.slots, self.rank, self.label = slots, rank, label
        self.sync = Sync("start of " + label)
        self.accesses: dict[tuple, Access] = {}
        self.code: tuple | None = None  # of host code and streams: the line that gave the operation
        # Whose writes an acquire did not make visible, and why: thread -> (kind, sentence).
        self.notes: dict[ThreadClock, tuple[str, str]] = {}
        # Of the last release acquired, if its program had not waited for the kernel before: what it did not cover, and where.
        self.hasty: tuple[np.ndarray, tuple | None] | None = None
        self.grid: Any = None  # of a program
        self.slot = slots.of(rank, name)
        self.clock = fit(clock, self.slot)
        self.tick()

    def tick(self) -> None:
        """What comes after is not known to those who know what came before."""
        self.clock[:, self.slot] = self.slots.tick(self.slot)
        self.accesses.clear()

    def stamp(self, kind: str) -> tuple[int, int, int]:
        """(slot, its time, count of releases) for an access of ``kind``."""
        return self.slot, self.slots.time[self.slot], 0

    def learn(self, clock: np.ndarray) -> None:
        self.clock = joined(self.clock, clock)

    def publish(self) -> np.ndarray:
        """A clock that covers all of this thread so far."""
        known = self.clock.copy()
        self.tick()
        return known


@dataclass(slots=True)
class Release:
    count: int
    code: tuple | None
    address: int


@dataclass(slots=True)
class _Stamps:
    """Stamps of one kind of access: what a release covers, what was fenced, and whether anything came since."""

    slot: int
    published: int
    drained: int
    fenced: int
    dirty: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """Where the elements of a block lie. ``mask``: those that are accessed."""

    addresses: np.ndarray
    mask: np.ndarray
    itemsize: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self.addresses.shape if size != 1)

    def touches_threads_of(self, other: Block) -> tuple[int, int] | None:
        """Bytes (low, high) of both that one thread has in this block and another one, for all that is known, in ``other``.

        A thread has the same elements of two blocks of equal sizes, by the layout that Triton gives them as a rule. Of a
        scalar, all threads load it and one stores it."""
        mine, others = np.flatnonzero(self.mask), np.flatnonzero(other.mask)
        here, there = self.addresses.ravel()[mine], other.addresses.ravel()[others]
        if self.itemsize != other.itemsize:
            low = max(int(here.min()), int(there.min()))
            high = min(int(here.max()) + self.itemsize, int(there.max()) + other.itemsize)
            return (low, high) if low < high else None
        common, at, of = np.intersect1d(here, there, return_indices=True)
        if self.sizes == other.sizes != ():
            common = common[mine[at] != others[of]]
        return (int(common.min()), int(common.max()) + self.itemsize) if common.size else None


class ProgramClock(ThreadClock):
    def __init__(self, slots: Slots, rank: int, label: str, index: object, clock: np.ndarray) -> None:
        super().__init__(slots, rank, label, ("program", index, SCALAR), clock)
        self._index = index
        # What it will know once it has waited for the kernel before; None of what starts when that has ended.
        self.ahead: np.ndarray | None = None
        self._stamps: dict[str, _Stamps] = {}
        # Plain stores since the last CTA barrier: number of the access -> its last blocks.
        self.stores: dict[int, deque[Block]] = {}
        self._fenced_scalars = self.slots.time[self.slot] - 1
        self.releases: list[Release] = []
        self.fenced: np.ndarray | None = None
        self.seen: np.ndarray | None = None
        self.proxy = self.clock.copy()
        self.proxy[:, self.slot] -= 1
        self.begun = self.proxy.copy()  # what a kernel that begins knows, as if behind a fence

    def follow(self) -> None:
        """The kernel before has ended, and all threads and the asynchronous proxy see what it did."""
        assert self.ahead is not None
        self.learn(self.ahead)
        self.proxy = joined(self.proxy, self.ahead)
        self.begun = joined(self.begun, self.ahead)
        self.ahead = None

    def _of(self, kind: str) -> _Stamps:
        stamps = self._stamps.get(kind)
        if stamps is None:
            slot = self.slots.of(self.rank, ("program", self._index, kind))
            self.clock = fit(self.clock, slot)
            before = self.slots.time[slot]
            now = self.slots.tick(slot)
            # A program sees its own plain stores at once, its descriptor stores when drained, its copies when complete.
            self.clock[:, slot] = before if kind in _LATE else now
            stamps = self._stamps[kind] = _Stamps(slot, before, before, before)
        return stamps

    def stamp(self, kind: str) -> tuple[int, int, int]:
        count = self.slots.time[self.slot]
        if kind is SCALAR:
            return self.slot, count, count
        stamps = self._of(kind)
        stamps.dirty = True
        return stamps.slot, self.slots.time[stamps.slot], count

    def barrier(self) -> None:
        """A CTA barrier: what all threads did is covered by the releases to come."""
        self.stores.clear()
        for kind, stamps in self._stamps.items():
            if kind is ASYNC:
                stamps.published = stamps.drained
            elif stamps.dirty and kind not in _LATE:
                stamps.published = self._next(stamps)

    def drain(self) -> None:
        """Descriptor stores so far have landed, as every thread knows of its own."""
        stores = self._stamps.get(ASYNC)
        if stores is not None and stores.dirty:
            stores.drained = self._next(stores)
            self.clock[:, stores.slot] = stores.drained

    def deliver(self) -> None:
        """The puts so far are delivered before what follows; to this program they are not over."""
        puts = self._stamps.get(DELIVERY)
        if puts is not None and puts.dirty:
            puts.published = self._next(puts)

    def delivered(self, access: Access) -> bool:
        """True if ``access`` is of a put that is delivered before what this program stores now."""
        return access.kind is DELIVERY and access.time <= self._stamps[DELIVERY].published

    def complete(self) -> None:
        """All copies so far are over, as every thread knows."""
        for kind in (DELIVERY, COPYING):
            copies = self._stamps.get(kind)
            if copies is not None:
                if copies.dirty:
                    copies.published = self._next(copies)
                self.clock[:, copies.slot] = copies.published

    def _next(self, stamps: _Stamps) -> int:
        before = self.slots.time[stamps.slot]
        now = self.slots.tick(stamps.slot)
        stamps.dirty = False
        if not any(stamps is self._stamps.get(kind) for kind in _LATE):
            self.clock[:, stamps.slot] = now
        self.accesses.clear()
        return before

    def covered(self) -> np.ndarray:
        """The clock that a release by one thread makes known."""
        known = self.clock.copy()
        for stamps in self._stamps.values():
            known[:, stamps.slot] = stamps.published
        return known

    def publish(self) -> np.ndarray:
        known = self.covered()
        self.tick()
        return known

    def relaxed(self) -> np.ndarray:
        """The clock that a relaxed write makes known: of the last fence or the kernel's begin, and loads that are over."""
        known = self.begun if self.fenced is None else self.fenced
        for kind in (LOADED, AWAITED):
            if kind in self._stamps:
                stamps = self._stamps[kind]
                known = fit(known.copy(), stamps.slot)
                known[:, stamps.slot] = stamps.published
        return known

    def fence_proxy(self) -> None:
        self.proxy = self.clock.copy()
        self.step()

    def step(self) -> None:
        """What comes after is not known to those who know the clock so far. Publishes nothing."""
        for kind, stamps in self._stamps.items():
            if kind not in _LATE and stamps.dirty:
                self._next(stamps)
                stamps.dirty = True
        self.tick()

    def message(self) -> np.ndarray:
        """What a Lamport word that is stored now tells its reader. What comes after is not in it."""
        known = self.clock.copy()
        known[TOLD, self.slot] = self._fenced_scalars
        for kind, stamps in self._stamps.items():
            if kind is not AWAITED:
                known[TOLD, stamps.slot] = stamps.fenced
            if kind in _LATE:
                known[HEARD, stamps.slot] = stamps.fenced
        self.step()
        return known

    def fence(self) -> None:
        """A fence in every thread: covers later relaxed stores, and makes acquires of earlier relaxed loads."""
        self._fenced_scalars = self.slots.time[self.slot]
        self.deliver()
        self.fenced = self.publish()
        for stamps in self._stamps.values():
            stamps.fenced = stamps.published
        if self.seen is not None:
            self.learn(self.seen)

    def saw(self, clock: np.ndarray) -> None:
        self.seen = joined(clock.copy(), self.seen) if self.seen is not None else clock.copy()

    def finish(self) -> np.ndarray:
        """The clock at the program's end: all of it has landed, and its relaxed reads are as behind a fence."""
        known = self.clock if self.seen is None else joined(self.clock, self.seen)
        for stamps in self._stamps.values():
            known[:, stamps.slot] = self.slots.time[stamps.slot]
        return known


@dataclass(slots=True)
class Signal:
    """A signal: what its present value's release sequence makes known, and its story.

    by_all   to acquires at system scope;  by_rank  rank -> to acquires of that rank at GPU scope too
    """

    address: int
    itemsize: int
    by_all: np.ndarray | None = None
    by_rank: dict[int, np.ndarray] = field(default_factory=dict)
    writers: list[tuple[ThreadClock, tuple | None, str, int]] = field(default_factory=list)
    # Writers whose stores an acquire does not make visible, (kind, sentence) of why, and within which scope it does.
    unreleased: dict[ThreadClock, tuple[str, str, str]] = field(default_factory=dict)
    # What the releasers themselves had missed.
    notes: dict[ThreadClock, tuple[str, str]] = field(default_factory=dict)
    wanted: int = 0
    added: int = 0
    notify_launches: set[int] = field(default_factory=set)
    wait_launches: set[int] = field(default_factory=set)
    equality: tuple[ThreadClock, tuple] | None = None
    values: set[int] = field(default_factory=set)
    hasty: tuple[np.ndarray, tuple | None] | None = None  # as of a thread
    back: tuple[str, Access] | None = None  # a notify that set it back, to be reported if a program waits for it

    def forget(self) -> None:
        """A plain or relaxed store ends the release sequence."""
        self.by_all = None
        self.by_rank = {}
        self.unreleased = {}
        self.notes = {}

    def release(self, rank: int, clock: np.ndarray, scope: str) -> None:
        if scope == "sys":
            self.by_all = clock.copy() if self.by_all is None else joined(self.by_all, clock)
        if scope != "cta":
            mine = self.by_rank.get(rank)
            self.by_rank[rank] = clock.copy() if mine is None else joined(mine, clock)

    def visible(self, rank: int, scope: str) -> list[np.ndarray]:
        """What an acquire by a task of ``rank`` at ``scope`` learns."""
        mine = [self.by_rank[rank]] if rank in self.by_rank and scope != "cta" else []
        return [*mine, self.by_all] if scope == "sys" and self.by_all is not None else mine

    def wrote(self, thread: ThreadClock, code: tuple | None, verb: str, value: int) -> None:
        self.writers.append((thread, code, verb, value))
        del self.writers[:-8]

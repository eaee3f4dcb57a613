"""Clocks of threads of execution: the vector clock of each, and how far its accesses are published.

A thread of execution is one of:

main     a rank's main stream: host-side tensor operations and kernel launches
stream   a side stream (the copy engine)
program  a program instance, whose CUDA threads count separately: a release by one thread covers that thread's accesses and what
         all did before the last CTA barrier. Tensor-descriptor stores are covered if they were drained before that barrier

A program's accesses are of several kinds, each with a slot:

SCALAR    by one CUDA thread
BLOCK     by all threads, except plain loads
LOADED    plain loads: after a CTA barrier they have their values, so that even a relaxed write publishes them
ASYNC     by the asynchronous proxy
DELIVERY  stores of puts that ``quiet`` completes, which a fence orders
COPYING   all other accesses of such copies
FLAGGED   Lamport stores
AWAITED   loads whose value the program had before it went on (Lamport and volatile ones), and the program's own Lamport
          stores that such a load has found in memory

A Lamport word publishes to its reader what was awaited, and all other accesses up to the last fence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from weft.check.detector.vector_clocks import LAMPORT, UNFENCED_LAMPORT, Slots, at, fit, joined
from weft.simulator.machine.grids import Grid
from weft.simulator.places import Places

BLOCK, SCALAR, LOADED, ASYNC, FLAGGED, AWAITED = "block", "scalar", "loaded", "async", "flagged", "awaited"
DELIVERY, COPYING = "delivery", "copying"
# Kinds whose accesses are not in program order even for the program itself.
_LATE = (ASYNC, DELIVERY, COPYING)


@dataclass(slots=True)
class Sync:
    """Last synchronisation of a thread, described in text only when it is reported."""

    verb: str
    address: int | None = None
    code: tuple | None = None
    write: Write | None = None  # that an acquire has read, the last one of its release sequence


@dataclass(slots=True, eq=False)
class Access:
    """Recorded access: at ``time`` of ``slot``, with ``seq`` releases of its program before it."""

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
    words: np.ndarray | None = (
        None  # of a plain store of words that volatile loads may poll: what a fence had published
    )
    resets: bool = False  # it decreased a signal
    launches: int | None = None  # of a copy: kernels that its rank had launched when it was enqueued
    issued: int | None = None  # of a copy or host code: number in the order in which its rank has issued them

    @classmethod
    def of(cls, thread: ThreadClock, verb: str, code: tuple | None = None, scope: str | None = None) -> Access:
        """Side of a finding that is no access to memory."""
        return cls(0, thread, SCALAR, 0, 0, 0, verb, code, scope, thread.sync)


@dataclass(slots=True)
class Write:
    """Write of a signal, which ``access`` took from ``old`` to ``value``."""

    access: Access
    old: int
    value: int


class ThreadClock:
    """Clock of a thread of execution: a main stream or a side stream."""

    def __init__(self, slots: Slots, rank: int, label: str, name: object, clock: np.ndarray) -> None:
        self.slots, self.rank, self.label = slots, rank, label
        self.stream = name if isinstance(name, str) else ""  # "main", "copy engine", "rail"; of no program
        self.sync = Sync("start of " + label)
        self.accesses: dict[tuple, Access] = {}
        self.code: tuple | None = None  # of host code and streams: the line that issued the operation
        self.notes: Notes = {}
        # The last acquired release, if its program had not yet waited for the kernel before: what it did not cover, and its
        # line.
        self.early_release: tuple[np.ndarray, tuple | None] | None = None
        self.grid: Grid | None = None  # of a program
        self.issued: int | None = None  # of a stream's running operation
        self.launch = (
            0  # kernels that the rank had launched: of a program with its kernel, of a copy when it was enqueued
        )
        self.waits: tuple[int, tuple | None] | None = None  # address that it waits for or has waited for last, line
        self.reached: set[tuple[int, int]] = set()  # of a program: heaps to which it may have pointers
        self.slot = slots.of(rank, name)
        self.clock = fit(clock, self.slot)
        self.tick()

    def tick(self) -> None:
        """Advance the slot's time: later accesses are unknown to threads that know the earlier ones."""
        self.clock[:, self.slot] = self.slots.tick(self.slot)
        self.accesses.clear()

    def stamp(self, kind: str) -> tuple[int, int, int]:
        """(slot, its time, count of releases) for an access of ``kind``."""
        return self.slot, self.slots.time[self.slot], 0

    def learn(self, clock: np.ndarray) -> None:
        self.clock = joined(self.clock, clock)

    def publish(self) -> np.ndarray:
        """Clock that covers all accesses of this thread so far."""
        known = self.clock.copy()
        self.tick()
        return known

    def so_far(self) -> np.ndarray:
        """Clock of all accesses of this thread so far, covered by a release or not."""
        return self.publish()

    def note_for(self, access: Access) -> Note | None:
        """The missing release or acquire that would have ordered ``access`` before this thread's next one."""
        return next((note for note in self.notes.values() if at(note.clock, access.slot) >= access.time), None)


@dataclass(frozen=True, slots=True)
class Note:
    """Missing release or acquire, and the clock that it would have passed on.

    kind, sentence  of a finding
    within          scope within which the release does pass it on, "" if nowhere
    """

    kind: str
    sentence: str
    clock: np.ndarray
    within: str = ""


# By kind and line; the first sentence of each.
Notes = dict[tuple, Note]


def add_notes(notes: Notes, more: Notes) -> None:
    for key, note in more.items():
        known = notes.get(key)
        notes[key] = note if known is None else replace(known, clock=joined(known.clock.copy(), note.clock))


@dataclass(slots=True)
class Release:
    count: int
    code: tuple | None
    address: int


@dataclass(slots=True)
class _Stamps:
    """Times of one kind of access: covered by releases, drained, fenced. ``dirty``: accesses came since."""

    slot: int
    published: int
    drained: int
    fenced: int
    dirty: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """Places that a block of a kernel's elements has accessed."""

    places: Places

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self.places.shape if size != 1)

    def touches_threads_of(self, other: Block) -> tuple[int, int] | None:
        """Common bytes (low, high) that may belong to different threads in the two blocks; None without any.

        A thread has the same elements of two blocks of equal sizes, by the layout that Triton usually gives them. A scalar is
        loaded by all threads and stored by one.
        """
        here, there = self.places, other.places
        if here.itemsize != there.itemsize:
            low, high = max(here.low, there.low), min(here.high, there.high)
            return (low, high) if low < high else None
        common, at, of = np.intersect1d(here.active, there.active, return_indices=True)
        if self.sizes == other.sizes != ():
            common = common[np.flatnonzero(here.mask)[at] != np.flatnonzero(there.mask)[of]]
        return (int(common.min()), int(common.max()) + here.itemsize) if common.size else None


class ProgramClock(ThreadClock):
    """Clock of a program instance, with the times of each kind of access."""

    def __init__(self, slots: Slots, rank: int, label: str, index: object, clock: np.ndarray) -> None:
        super().__init__(slots, rank, label, ("program", index, SCALAR), clock)
        self._index = index
        # Clock it learns by waiting for the kernel before; None for a program that starts after that kernel's end.
        self.ahead: np.ndarray | None = None
        self._stamps: dict[str, _Stamps] = {}
        # Plain stores since the last CTA barrier: number of the access -> its latest blocks.
        self.stores: dict[int, deque[Block]] = {}
        self._fenced_scalars = self.slots.time[self.slot] - 1
        self.releases: list[Release] = []
        self.fenced: np.ndarray | None = None
        self.seen: np.ndarray | None = None
        self.acquired_alone: np.ndarray | None = None  # knowledge of single threads, until the next CTA barrier
        # The same of fences within the GPU, and of what this GPU's programs have released.
        self.fenced_in_gpu: np.ndarray | None = None
        self.seen_in_gpu: np.ndarray | None = None
        self.proxy = self.clock.copy()
        self.proxy[:, self.slot] -= 1
        self.begun = self.proxy.copy()  # knowledge at the kernel's start, as if after a fence

    def follow(self) -> None:
        """Note the end of the kernel before, whose accesses all threads and the asynchronous proxy now see."""
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
            # A program sees its plain stores at once, descriptor stores when drained, copies when complete.
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
        """CTA barrier: later releases cover what all threads did so far."""
        self.stores.clear()
        if self.acquired_alone is not None:
            self.learn(self.acquired_alone)
            self.acquired_alone = None
        for kind, stamps in self._stamps.items():
            if kind is ASYNC:
                stamps.published = stamps.drained
                self.clock[:, stamps.slot] = stamps.drained
            elif stamps.dirty and kind not in _LATE:
                stamps.published = self._next(stamps)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Scope of accesses by single threads, which keep what they acquire until the next CTA barrier."""
        before = self.clock
        self.clock = before.copy() if self.acquired_alone is None else joined(before.copy(), self.acquired_alone)
        try:
            yield
        finally:
            known, own = self.clock, [self.slot, *(stamps.slot for stamps in self._stamps.values())]
            self.clock = fit(before, max(own))
            self.clock[:, own] = known[:, own]
            self.acquired_alone = known

    def drain(self, by_all: bool) -> None:
        """Note that descriptor stores so far have landed.

        ``by_all``: all threads know it, also before the next CTA barrier.
        """
        stores = self._stamps.get(ASYNC)
        if stores is not None and stores.dirty:
            stores.drained = self._next(stores)
        if stores is not None and by_all:
            self.clock[:, stores.slot] = stores.drained

    def deliver(self) -> None:
        """Order later stores after the puts so far, which are not yet complete for this program itself."""
        puts = self._stamps.get(DELIVERY)
        if puts is not None and puts.dirty:
            puts.published = self._next(puts)

    def delivered(self, access: Access) -> bool:
        """True if ``access`` is of a put that is delivered before this program's stores from now on."""
        return access.kind is DELIVERY and access.time <= self._stamps[DELIVERY].published

    def complete(self) -> None:
        """Note that all copies so far are complete, known to every thread."""
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
        """Clock that a release by one thread publishes."""
        known = self.clock.copy()
        for stamps in self._stamps.values():
            known[:, stamps.slot] = stamps.published
        return known

    def publish(self) -> np.ndarray:
        known = self.covered()
        self.tick()
        return known

    def relaxed(self) -> np.ndarray:
        """Clock that a relaxed write publishes: the last fence's or the kernel's start, and completed loads."""
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

    def so_far(self) -> np.ndarray:
        known = self.clock.copy()
        for stamps in self._stamps.values():
            known = fit(known, stamps.slot)
            known[:, stamps.slot] = self.slots.time[stamps.slot]
        self.step()
        return known

    def step(self) -> None:
        """Advance all times without publishing: threads that know the clock so far miss later accesses."""
        for kind, stamps in self._stamps.items():
            if kind not in _LATE and stamps.dirty:
                self._next(stamps)
                stamps.dirty = True
        self.tick()

    def message(self) -> np.ndarray:
        """Clock that a Lamport word stored now carries to its reader, without later accesses."""
        known = self.clock.copy()
        known[LAMPORT, self.slot] = self._fenced_scalars
        for kind, stamps in self._stamps.items():
            if kind is not AWAITED:
                known[LAMPORT, stamps.slot] = stamps.fenced
            if kind in _LATE:
                known[UNFENCED_LAMPORT, stamps.slot] = stamps.fenced
        self.step()
        return known

    def fence(self) -> None:
        """Fence in every thread: makes releases of later relaxed stores and acquires of earlier relaxed loads."""
        self._fenced_scalars = self.slots.time[self.slot]
        self.deliver()
        self.fenced = self.publish()
        for stamps in self._stamps.values():
            stamps.fenced = stamps.published
        if self.seen is not None:
            self.learn(self.seen)

    def fence_in_gpu(self) -> None:
        """Fence at GPU scope: as ``fence``, for the programs of this GPU alone."""
        self.fenced_in_gpu = self.publish()
        if self.seen_in_gpu is not None:
            self.learn(self.seen_in_gpu)

    def saw_in_gpu(self, clock: np.ndarray) -> None:
        known = self.seen_in_gpu
        self.seen_in_gpu = clock.copy() if known is None else joined(clock.copy(), known)

    def saw(self, clock: np.ndarray) -> None:
        self.seen = joined(clock.copy(), self.seen) if self.seen is not None else clock.copy()

    def finish(self) -> np.ndarray:
        """Clock at the program's end: all accesses have landed, and relaxed reads count as fenced."""
        known = self.clock if self.seen is None else joined(self.clock, self.seen)
        known = known if self.acquired_alone is None else joined(known, self.acquired_alone)
        for stamps in self._stamps.values():
            known[:, stamps.slot] = self.slots.time[stamps.slot]
        # Records of its accesses keep this object until the run's end, without what only a running program needs.
        self.accesses, self.stores, self.proxy, self.begun = {}, {}, known, known
        return known

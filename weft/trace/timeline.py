"""A timeline: events of all ranks on one clock, and arrows from notifies to waits."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.runtime.codec import exchangeable

# Kinds of events, and the order of events that begin at once: longer ones contain shorter ones.
KINDS = ("kernel", "tile", "gemm", "copy", "put", "wait", "notify")
VIRTUAL, MEASURED = "virtual", "GPU"


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Change of a signal by a notify, or the value that a wait asks of it; or the place of a put's data.

    place  rank that owns the signal or the data, None for all ranks but the sender, and the place in that rank's heap
    value  signed value that was set, or that the wait asked for (``>=``); None for one that was added or copied by an engine,
           and for data
    """

    place: tuple[int | None, int]
    value: int | None
    bits: int = 32


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Slice of a track.

    track       "SM 3", "copy engine", "stream 0"
    kind        one of KINDS
    start, end  nanoseconds
    kernel      of a program's event: the kernel's name, on GPUs with the line
    cause       of a wait, a notify or a put: name of the signal or the data
    nbytes      of a copy or a put
    """

    rank: int
    track: str
    kind: str
    name: str
    start: int
    end: int
    program: int | None = None
    kernel: str = ""
    cause: str = ""
    nbytes: int = 0
    signal: Signal | None = None

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """The notify, or put of Lamport words, that released a wait, by their numbers among the events."""

    notify: int
    wait: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All ranks' events in order of their start, and the arrows between them.

    clock        VIRTUAL or MEASURED
    residual_ns  uncertainty of the offset between two ranks' clocks
    streams_ns   uncertainty of the times of copies and cuBLAS GEMMs, which come from CUDA events
    lost         records that a ring had no room for
    """

    world_size: int
    clock: str
    events: tuple[Event, ...]
    arrows: tuple[Arrow, ...]
    residual_ns: int = 0
    streams_ns: int = 0
    lost: int = 0


def make_timeline(
    world_size: int, clock: str, events: Iterable[Event], residual_ns: int = 0, streams_ns: int = 0, lost: int = 0
) -> Timeline:
    """Timeline that starts at 0, with its arrows."""
    ordered = sorted(events, key=lambda e: (e.start, KINDS.index(e.kind), e.rank, e.track, e.name))
    first = ordered[0].start if ordered else 0
    from_zero = tuple(_earlier(event, first) for event in ordered)
    return Timeline(
        world_size=world_size, clock=clock, events=from_zero, arrows=tuple(arrows_of(from_zero, residual_ns + streams_ns)),
        residual_ns=residual_ns, streams_ns=streams_ns, lost=lost,
    )  # fmt: skip


def _earlier(event: Event, by: int) -> Event:
    return replace(event, start=event.start - by, end=event.end - by)


def span_name(kind: str, address: int, peer: int, rank: int) -> str:
    """Name of a tile or a put of ``rank``, as kernels record them (``lowering/tracing.py``)."""
    if kind == "tile":
        return f"tile {address & 0xFFFFFFFF},{address >> 32}"
    return "put to all others" if peer == rank else f"put to rank {peer}"


# By place of the signal: (end, number, signal) of each notify.
Notifies = dict[tuple[int | None, int], list[tuple[int, int, Signal]]]


def arrows_of(events: Sequence[Event], slack: int) -> list[Arrow]:
    """Arrow to each wait from the first notify of its signal that is enough and ended before it did.

    slack  nanoseconds by which a notify may seem to end after the wait that it released. Where the value that a notify led to
           is not known, as of one that adds, and of data, the last one before the end of the wait has released it.
    """
    notifies: Notifies = defaultdict(list)
    for number, event in enumerate(events):
        if event.kind in ("notify", "put") and event.signal is not None:
            notifies[event.signal.place].append((event.end, number, event.signal))
    for sent in notifies.values():
        sent.sort(key=lambda entry: entry[:2])
    arrows = []
    for number, event in enumerate(events):
        if event.kind == "wait" and event.signal is not None:
            notify = _releasing(event, event.signal, events, notifies, slack)
            if notify is not None:
                arrows.append(Arrow(notify=notify, wait=number))
    return arrows


def _releasing(wait: Event, awaited: Signal, events: Sequence[Event], notifies: Notifies, slack: int) -> int | None:
    """Number of the notify that released the wait."""
    sent = notifies.get(awaited.place, [])
    if to_all := notifies.get((None, awaited.place[1])):
        # Of puts that end at once the next rank's is the first, so that in virtual time no rank seems to be the straggler.
        after = {number: (events[number].rank - wait.rank) % (1 << 16) for _, number, _ in to_all}
        to_here = [one for one in to_all if after[one[1]] > 0]
        sent = sorted((*sent, *to_here), key=lambda one: (one[0], after.get(one[1], 0)))
    before = sent[: bisect_right(sent, wait.end + slack, key=lambda entry: entry[0])]
    for _, number, signal in before:
        if _reaches(signal, awaited):
            return number
    return next((number for _, number, signal in reversed(before) if signal.value is None), None)


def _reaches(notified: Signal, awaited: Signal) -> bool:
    if notified.value is None or awaited.value is None:
        return False
    # As in a GPU's registers: the signed difference, modulo the signal's width.
    return (notified.value - awaited.value) & (1 << awaited.bits) - 1 < 1 << awaited.bits - 1

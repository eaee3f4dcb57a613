"""Summary of a timeline: exposed communication by cause, stragglers, overlap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.trace.timeline import VIRTUAL, Event, Timeline

# Cause of a wait: the signal, and the rank whose notify released it; None if the trace has no such notify.
Cause = tuple[str, int | None]
# Causes that are listed.
_MOST_CAUSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """Times of one rank in nanoseconds.

    time     from its first event to its last
    start    of its first event, after that of the earliest rank
    gemm     matrix products: of tiles by SM, of a cuBLAS GEMM by all SMs
    wire     copies of its copy engine, and puts by SM
    exposed  by cause: waits while SMs compute no tile, weighted by the share of such SMs
    waits    their number by cause
    awaited  waits of other ranks that its notifies have ended
    """

    rank: int
    time: int
    start: int
    gemm: float
    wire: float
    exposed: dict[Cause, float]
    waits: Counter[Cause]
    awaited: int

    @property
    def bound(self) -> float:
        """Time that no overlap can go below: the longer of GEMM and wire."""
        return max(self.gemm, self.wire)


def summarize(timeline: Timeline) -> list[OfRank]:
    """Times of each rank that has events."""
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(timeline.events):
        by_rank[event.rank].append(number)
    released = {arrow.wait: timeline.events[arrow.notify].rank for arrow in timeline.arrows}
    awaited: defaultdict[int, int] = defaultdict(int)
    for wait, rank in released.items():
        if timeline.events[wait].rank != rank:
            awaited[rank] += timeline.events[wait].duration
    earliest = min((event.start for event in timeline.events), default=0)
    sums = []
    for rank, numbers in sorted(by_rank.items()):
        events = [timeline.events[number] for number in numbers]
        sms = _sms(events)
        start = min(event.start for event in events)
        sums.append(
            OfRank(
                rank=rank, time=max(event.end for event in events) - start, start=start - earliest,
                gemm=_by_sm(events, "tile", sms) + _union(e for e in events if e.kind == "gemm"),
                wire=_by_sm(events, "put", sms) + _union(e for e in events if e.kind == "copy"),
                exposed=_exposed(timeline, numbers, released, sms), awaited=awaited[rank],
                waits=Counter((e.cause, released.get(n)) for n, e in zip(numbers, events, strict=True) if e.kind == "wait"),
            )
        )  # fmt: skip
    return sums


def summary(timeline: Timeline) -> str:
    """Text of ``weft trace summary``."""
    ranks = summarize(timeline)
    if not ranks:
        return "The trace has no events: nothing of this team ran meanwhile.\n"
    clock = "virtual time" if timeline.clock == VIRTUAL else f"clocks agree to {timeline.residual_ns / 1e3:.2f} us"
    lines = [
        f"{len(timeline.events):,} events and {len(timeline.arrows):,} arrows of {timeline.world_size} ranks, {clock}; "
        f"times in us",
        *([f"{timeline.lost:,} records lost: the first ones of programs that wrote too many"] if timeline.lost else []),
        "",
    ]
    header = ("rank", "start", "time", "GEMM", "wire", "overlap", "exposed", "others waited for it")
    rows = [
        (
            str(one.rank), _us(one.start), _us(one.time), _us(one.gemm), _us(one.wire), f"{one.bound / one.time:.0%}",
            _us(sum(one.exposed.values())), _us(one.awaited),
        )
        for one in ranks
        if one.time
    ]  # fmt: skip
    lines += _table(header, rows)
    lines += ["", "overlap = max(GEMM, wire) / time; 100% hides one behind the other, and nothing else takes time"]
    causes = {
        cause: sum(one.exposed.get(cause, 0.0) for one in ranks) / len(ranks) for one in ranks for cause in one.waits
    }
    if causes:
        listed = sorted(causes.items(), key=lambda entry: -entry[1])
        lines += ["", "exposed communication by cause: waits of all ranks, and mean time of a rank"]
        lines += _table(
            ("signal or data", "of rank", "waits", "us"),
            [
                (cause[0], "?" if cause[1] is None else str(cause[1]), f"{sum(one.waits[cause] for one in ranks):,}", _us(time))
                for cause, time in listed[:_MOST_CAUSES]
            ],
        )  # fmt: skip
        if len(listed) > _MOST_CAUSES:
            lines.append(f"and {len(listed) - _MOST_CAUSES} more")
    if straggler := _straggler(ranks):
        lines += ["", straggler]
    return "\n".join(lines) + "\n"


def _straggler(ranks: Sequence[OfRank]) -> str:
    """Line that names the rank for which its peers waited longest; empty if none stands out."""
    longest = max(ranks, key=lambda one: one.awaited)
    awaited = [one.awaited for one in ranks if one is not longest]
    if not awaited or longest.awaited < 1.5 * max(awaited) or longest.awaited == 0:
        return ""
    late = f", and began {_us(longest.start)} us after the first one" if longest.start else ""
    mean = sum(awaited) / len(awaited)
    return f"straggler: the others waited {_us(longest.awaited)} us for rank {longest.rank}, for another rank {_us(mean)}{late}"


def _sms(events: Sequence[Event]) -> int:
    """Number of SMs that computed tiles, else that did anything."""
    for kinds in (("tile",), ("kernel", "wait", "notify", "put")):
        if tracks := {event.track for event in events if event.kind in kinds}:
            return len(tracks)
    return 1


def _by_sm(events: Iterable[Event], kind: str, sms: int) -> float:
    return sum(event.duration for event in events if event.kind == kind) / sms


def _union(events: Iterable[Event]) -> int:
    """Time in which at least one of ``events`` lasts."""
    total, reached = 0, None
    for event in sorted(events, key=lambda e: e.start):
        begin = event.start if reached is None else max(event.start, reached)
        total += max(event.end - begin, 0)
        reached = event.end if reached is None else max(reached, event.end)
    return total


def _exposed(timeline: Timeline, numbers: Sequence[int], released: dict[int, int], sms: int) -> dict[Cause, float]:
    """Time by cause in which waits last, weighted by the share of SMs that compute nothing meanwhile."""
    changes: list[tuple[int, int, float, Cause | None]] = []
    for number in numbers:
        event = timeline.events[number]
        if event.kind in ("tile", "gemm"):
            share = 1.0 if event.kind == "gemm" else 1 / sms
            changes += [(event.start, 1, share, None), (event.end, -1, share, None)]
        elif event.kind == "wait":
            cause = event.cause, released.get(number)
            changes += [(event.start, 1, 0.0, cause), (event.end, -1, 0.0, cause)]
    changes.sort(key=lambda change: change[:2])
    blamed: defaultdict[Cause, float] = defaultdict(float)
    waiting: defaultdict[Cause, int] = defaultdict(int)
    computing, before = 0.0, 0
    for time, step, share, cause in changes:
        idle = (1 - min(computing, 1.0)) * (time - before)
        if idle > 0 and (total := sum(waiting.values())):
            for name, count in waiting.items():
                blamed[name] += idle * count / total
        before = time
        if cause is None:
            computing += step * share
        else:
            waiting[cause] += step
            if not waiting[cause]:
                del waiting[cause]
    return dict(blamed)


def _us(ns: float) -> str:
    return f"{ns / 1e3:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        first, *rest = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines

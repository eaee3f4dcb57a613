"""Meters, which time one provider. Meters are replayed round by round, alternating between providers.

GraphMeter   one CUDA graph of n times [prepare, barrier, event, op, event]: single calls, all ranks released at once
ChainMeter   one CUDA graph of [prepare all, barrier, event, op, op, …, event]: calls in a row, time divided by their number.
             The first call costs more than later ones, since no earlier work hides its launch and the ranks leave the
             barrier apart: on an H200 a 1 KiB all-reduce takes 3 µs in a row and 8 µs alone. `calls_in_a_row` keeps that
             share small.
AroundMeter  if events cannot be recorded inside a graph: a graph of [prepare all, barrier, op, op, …] minus one of
             [prepare all, barrier], timed from outside and divided
EagerMeter   like GraphMeter without a graph, so it includes the host's launches
EagerRow     like ChainMeter without a graph, and the host's time in which it submits a call
HostMeter    the simulator: the host's clock, which means nothing
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from weft.bench.harness.provider import Prepared, Result
from weft.errors import WeftError
from weft.ops import barrier
from weft.runtime import graphs
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.bench.harness.report import Report
    from weft.runtime.team.team import Team

# Seconds after which a round counts as stuck; the longest round takes well under one.
PATIENCE_SECONDS = 20.0
# Calls that take less than LONG_US alone are also timed in a row: as many as fill ROW_US, between FEW_CALLS and MANY_CALLS.
# They share the first one's extra 5 µs.
LONG_US, ROW_US = 2000.0, 4000.0
# Calls in a row without a graph: no more than the GPU's queue holds launches of (about 1,000), or the host would wait for it.
# Rounds before the clock, in which what is kept from call to call comes to be.
EAGER_CALLS, EAGER_ROUNDS = 16, 4
FEW_CALLS, MANY_CALLS = 8, 64
OVERRUN = 1.4


class Stuck(WeftError):
    """Error: a provider's GPU work does not end. Nothing more can be measured in these processes."""

    def __init__(self, rank: int, what: str, seconds: float) -> None:
        super().__init__(
            f"rank {rank}: {what} did not end within {seconds:g} s, so nothing after it was measured; leave it out "
            f"with --providers, or find the wait that does not end by weft.launch(..., debug=True)"
        )
        self.rank, self.what, self.seconds = rank, what, seconds
        self.reports: list[Report] = []  # results so far


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Microseconds of one rank."""

    median: float
    p10: float
    p90: float
    samples: int


class Meter(Protocol):
    """Meter of one provider. ``out``: result of the last call of a round, on set 0."""

    out: Result | None

    def replay(self) -> None:
        """Submit one round of work to the GPU."""

    def samples(self) -> list[float]:
        """Microseconds per call of the last round, once it has ended."""


def spread(samples: Sequence[float]) -> Spread:
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return Spread(median=statistics.median(ordered), p10=at(0.1), p90=at(0.9), samples=len(ordered))


def finish(team: Team, what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for this rank's GPU work, with a time limit (Stuck). All ranks have submitted theirs before."""
    if team.device.type == "cuda":
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + seconds
        pause = 0.0
        while not done.query():
            if time.monotonic() > deadline:
                raise Stuck(team.rank, what, seconds)
            time.sleep(pause)
            pause = min(0.0005, pause + 0.00002)
    team.synchronize()


def spoil(x: torch.Tensor) -> None:
    """Fill a result before it is computed again, so that elements that are not written show."""
    x.fill_(math.nan if x.is_floating_point() else 99)


def calls_in_a_row(single_us: float) -> int:
    """Number of calls in a row for an op that takes this long alone."""
    return max(FEW_CALLS, min(MANY_CALLS, int(ROW_US / single_us)))


def order(sets: int, replicas: int) -> list[int]:
    """Set used by each replica, in turn; the last one uses set 0, whose answer is known."""
    return [(replicas - 1 - place) % sets for place in range(replicas)]


def in_turn(count: int, round: int) -> list[int]:
    """Order of ``count`` meters in a round.

    Over `balanced_rounds` each comes equally often directly after each other one and in each place (the design of Williams,
    1949), since the previous meter is worth a microsecond of a small all-reduce.
    """
    first = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    row = [(step + round) % count for step in first]
    return row[::-1] if round // count % 2 and count % 2 else row


def balanced_rounds(count: int) -> int:
    """Number of rounds whose multiples balance the neighbours of ``count`` meters."""
    return 1 if count == 1 else count * (1 + count % 2)


def event(external: bool) -> torch.cuda.Event:
    """Event for timing. ``external``: it may be recorded inside a CUDA graph."""
    return torch.cuda.Event(enable_timing=True, external=external)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Scope that records work into ``graph``, on a stream that is ordered with the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with graphs.capturing(graph, stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)


def _prepare(prepared: Prepared, numbers: Sequence[int]) -> None:
    """Prepare all inputs. Calls that share a buffer get the last one's input."""
    if prepared.prepare is not None:
        for number in numbers:
            prepared.prepare(number)


class EagerMeter:
    """Single calls, each after a barrier, timed by events on the stream."""

    external = False

    def __init__(self, team: Team, prepared: Prepared, numbers: Sequence[int]) -> None:
        self._team, self._prepared, self._numbers = team, prepared, numbers
        self._pairs = [(event(self.external), event(self.external)) for _ in numbers]
        self.out: Result | None = None

    def replay(self) -> None:
        for number, (start, end) in zip(self._numbers, self._pairs, strict=True):
            _prepare(self._prepared, [number])
            barrier(self._team)
            start.record()
            self.out = self._prepared.run(number)
            end.record()

    def samples(self) -> list[float]:
        return [start.elapsed_time(end) * 1e3 for start, end in self._pairs]


class GraphMeter(EagerMeter):
    """The same work in one CUDA graph."""

    external = True

    def __init__(self, team: Team, prepared: Prepared, numbers: Sequence[int]) -> None:
        super().__init__(team, prepared, numbers)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            super().replay()

    def replay(self) -> None:
        self._graph.replay()


class ChainMeter:
    def __init__(self, team: Team, prepared: Prepared, numbers: Sequence[int]) -> None:
        self._graph, self._count = torch.cuda.CUDAGraph(), len(numbers)
        self._start, self._end = event(True), event(True)
        self.out: Result | None = None
        with capturing(self._graph):
            _prepare(prepared, sorted(set(numbers), reverse=True))
            barrier(team)
            self._start.record()
            for number in numbers:
                self.out = prepared.run(number)
            self._end.record()

    def replay(self) -> None:
        self._graph.replay()

    def samples(self) -> list[float]:
        return [self._start.elapsed_time(self._end) * 1e3 / self._count]


class EagerRow:
    """Calls in a row as a program makes them: time of a call, and of the host to submit it."""

    def __init__(self, team: Team, prepared: Prepared, numbers: Sequence[int]) -> None:
        self._team, self._prepared, self._numbers = team, prepared, list(numbers)
        self._start, self._end = event(False), event(False)
        self._host_us: list[float] = []
        self.out: Result | None = None

    def replay(self) -> None:
        _prepare(self._prepared, sorted(set(self._numbers), reverse=True))
        # Not timed: a program's allocator is in a steady state, and here other meters have used it.
        for number in 2 * self._numbers:
            self.out = self._prepared.run(number)
        finish(self._team, "the work before a row of calls")  # otherwise earlier work would hide the host's
        barrier(self._team)
        self._start.record()
        begin = time.perf_counter()
        for number in self._numbers:
            self.out = self._prepared.run(number)
        self._host_us.append((time.perf_counter() - begin) * 1e6 / len(self._numbers))
        self._end.record()

    def warm_up(self) -> None:
        for _ in range(EAGER_ROUNDS):
            self.replay()
        self._host_us.clear()

    def samples(self) -> list[float]:
        return [self._start.elapsed_time(self._end) * 1e3 / len(self._numbers)]

    def host_us(self) -> float:
        """Median of the host's microseconds of a call in all rounds."""
        return statistics.median(self._host_us)


class AroundMeter:
    def __init__(self, team: Team, prepared: Prepared, numbers: Sequence[int]) -> None:
        self._count = len(numbers)
        self._graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        self._pairs = [(event(False), event(False)) for _ in self._graphs]
        self.out: Result | None = None
        for graph, with_op in zip(self._graphs, (False, True), strict=True):
            with capturing(graph):
                _prepare(prepared, sorted(set(numbers), reverse=True))
                barrier(team)
                for number in numbers if with_op else ():
                    self.out = prepared.run(number)

    def replay(self) -> None:
        for graph, (start, end) in zip(self._graphs, self._pairs, strict=True):
            start.record()
            graph.replay()
            end.record()

    def samples(self) -> list[float]:
        without, whole = (start.elapsed_time(end) * 1e3 for start, end in self._pairs)
        return [(whole - without) / self._count]


class HostMeter:
    def __init__(self, team: Team, prepared: Prepared, numbers: Sequence[int]) -> None:
        self._team, self._prepared, self._numbers = team, prepared, numbers
        self._samples: list[float] = []
        self.out: Result | None = None

    def replay(self) -> None:
        self._samples = []
        for number in self._numbers:
            _prepare(self._prepared, [number])
            self._team.barrier()
            started = time.perf_counter()
            self.out = self._prepared.run(number)
            self._samples.append((time.perf_counter() - started) * 1e6)

    def samples(self) -> list[float]:
        return self._samples


def events_in_graphs(team: Team) -> float | None:
    """Microseconds between two adjacent events inside a graph; None if they return nonsense."""
    if team.device.type != "cuda":
        return None
    x = torch.zeros(1 << 20, device=team.device).add_(1)
    empty: list[float] = []
    try:
        graph, marks = torch.cuda.CUDAGraph(), [event(True) for _ in range(3)]
        with capturing(graph):
            marks[0].record()
            marks[1].record()
            x.add_(1)
            marks[2].record()
        for _ in range(10):
            graph.replay()
            finish(team, "the first CUDA graph")
            if not 0 < marks[1].elapsed_time(marks[2]) < 10:
                return None
            empty.append(marks[0].elapsed_time(marks[1]) * 1e3)
    except (RuntimeError, TypeError, ValueError):
        return None
    return statistics.median(empty)


def rounds_for(seconds_a_round: float, quick: bool, count: int) -> int:
    """Number of rounds of ``count`` meters for about 1.2 s of GPU time per shape (0.35 s if quick).

    It is increased until neighbours are balanced, or reduced if that would take more than OVERRUN times the time, or left
    unbalanced if too few rounds would remain.
    """
    budget, fewest, most = (0.35, 3, 12) if quick else (1.2, 6, 50)
    affordable = max(fewest, int(budget / max(seconds_a_round, 1e-6)))
    rounds, balanced = min(most, affordable), balanced_rounds(count)
    more, fewer = -(-rounds // balanced) * balanced, rounds // balanced * balanced
    if more <= OVERRUN * affordable:
        return more
    return fewer if fewer >= fewest else rounds

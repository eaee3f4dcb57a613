"""Discrete-event execution of tiles on one GPU. All ranks do the same, so one stands for all."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Slots:
    """SMs that take tiles as they become free, as with cuBLAS GEMMs on several streams."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def run(self, tiles: int, each: float, ready: float) -> float:
        """End of the last of ``tiles`` tiles, each of which takes ``each`` and may begin at ``ready``."""
        free = sorted(max(time, ready) for time in self._free)
        end = ready
        if free[-1] - free[0] < each:  # every SM takes one tile a round, in the order in which they are free
            rounds, tiles = divmod(tiles, len(free))
            free = [time + rounds * each for time in free]
            end = free[-1] if rounds else ready
        for _ in range(tiles):
            last = heapq.heappop(free) + each
            heapq.heappush(free, last)
            end = max(end, last)
        self._free = free
        return end


class CopyEngine:
    """Copy engine that makes one copy after the other, a flag after each."""

    def __init__(self, start: float, link: float, flag: float, begin: float) -> None:
        """``link``: bytes per microsecond."""
        self._start, self._link, self._flag, self._clock = start, link, flag, begin

    def send(self, nbytes: float, ready: float) -> float:
        """Time at which the flag of a copy that may begin at ``ready`` has arrived."""
        self._clock = max(self._clock, ready) + self._start + nbytes / self._link + self._flag
        return self._clock


def arrivals(engine: CopyEngine, pieces: Sequence[float], ready: float) -> list[float]:
    return [engine.send(nbytes, ready) for nbytes in pieces]

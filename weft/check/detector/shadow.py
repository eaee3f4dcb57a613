"""Shadow memory: for each element its last write and the reads since.

A write is stored as the number of an access (``thread_clocks.Access``), readers as the number of a set of accesses. A tile is
usually accessed as a whole, so its elements share their numbers and a check is one comparison; otherwise it is one per
distinct number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from weft.simulator.machine.memory import Extent

UNWRITTEN, INITIAL = 0, 1
Cells = slice | np.ndarray


class Shadow:
    """Shadow of one extent. Its cells are as large as the smallest element it was accessed with."""

    def __init__(self, extent: Extent, initial: int) -> None:
        self.extent, self._initial, self.unit = extent, initial, 0
        self.writes = self.reads = np.zeros(0, np.int32)

    def cells(self, offsets: np.ndarray, itemsize: int) -> Cells:
        """Cells of elements of ``itemsize`` bytes at byte ``offsets`` (one-dimensional)."""
        self._refine(itemsize)
        unit = self.unit
        if offsets.size == 1:
            first = int(offsets[0]) // unit
            return slice(first, first + itemsize // unit)
        span = int(offsets[-1]) - int(offsets[0])
        steps = offsets.size - 1
        if span == steps * itemsize and np.count_nonzero(offsets[1:] - offsets[:-1] == itemsize) == steps:
            first = int(offsets[0]) // unit
            return slice(first, first + offsets.size * itemsize // unit)
        at = offsets // unit
        return at if itemsize == unit else (at[:, None] + np.arange(itemsize // unit)).ravel()

    def elements(self, cells: np.ndarray) -> tuple[int, int]:
        """First and last index of the tensor's own elements among ``cells``."""
        low, high = int(cells.min()) * self.unit, int(cells.max()) * self.unit
        return low // self.extent.itemsize, high // self.extent.itemsize

    def _refine(self, itemsize: int) -> None:
        if self.unit == 0:
            self.unit = itemsize
            count = -(-self.extent.size // itemsize)
            self.writes = np.full(count, self._initial, np.int32)
            self.reads = np.zeros(count, np.int32)
        elif itemsize < self.unit:
            self.writes = np.repeat(self.writes, self.unit // itemsize)
            self.reads = np.repeat(self.reads, self.unit // itemsize)
            self.unit = itemsize


def distinct(numbers: np.ndarray) -> list[int]:
    """Distinct numbers of an array, fast if there is only one."""
    first = int(numbers[0])
    if numbers.size == 1 or np.count_nonzero(numbers == first) == numbers.size:
        return [first]
    return np.unique(numbers).tolist()


def mapped(numbers: np.ndarray, function: Callable[[int], int]) -> np.ndarray | int:
    """Array of ``function(number)`` for every number; a scalar if they are all equal."""
    old = distinct(numbers)
    if len(old) == 1:
        return function(old[0])
    new = np.array([function(n) for n in old], np.int32)
    return new[np.searchsorted(np.array(old, np.int32), numbers)]


def where(cells: Cells, mask: np.ndarray) -> np.ndarray:
    """Indices of the cells for which ``mask`` holds."""
    return np.flatnonzero(mask) + cells.start if isinstance(cells, slice) else cells[mask]


class ReadSets:
    """Sets of accesses by number; number 0 is the empty set. Equal sets have equal numbers."""

    def __init__(self) -> None:
        self._sets: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._sets[number]

    def number(self, members: tuple[int, ...]) -> int:
        known = self._numbers.get(members)
        if known is None:
            known = self._numbers[members] = len(self._sets)
            self._sets.append(members)
        return known


def extents_of(find: Callable[[int], Extent | None], addresses: np.ndarray) -> Iterator[tuple[Extent, np.ndarray]]:
    """(extent, byte offsets of the addresses in it) for addresses that lie in known extents."""
    while addresses.size:
        extent = find(int(addresses[0]))
        if extent is None:
            return
        offsets = addresses - np.uint64(extent.base)  # of lower addresses great numbers
        if np.maximum.reduce(offsets) < extent.size:
            yield extent, offsets.view(np.int64)
            return
        inside = offsets < np.uint64(extent.size)
        yield extent, offsets[inside].view(np.int64)
        addresses = addresses[~inside]

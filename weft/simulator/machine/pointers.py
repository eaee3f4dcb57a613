"""Provenance of pointers: the tensor's number in the address's upper bits.

A process's addresses lie below 2**48, and pointer arithmetic leaves the upper bits unchanged. An access through a pointer
must stay in the pointer's tensor, or in the same symmetric tensor of a peer. Without the number, an index past the end of a
tensor that the next one adjoins would go unnoticed, and so would an access to a freed tensor whose bytes are in use again.
Pointers that a kernel makes from integers have no number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch

from weft.errors import InvalidAccess
from weft.simulator.machine.memory import Extent, Memory
from weft.simulator.places import Places

_SHIFT = 48
ADDRESS = (1 << _SHIFT) - 1  # the bits of a pointer that are its address
_NUMBERS = 1 << 15  # so that an address stays positive as an int64


class Pointers:
    """Numbers of tensors, and checks of pointers that carry them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._extents: dict[int, Extent] = {}  # by number; removed ones too, until their number is reused
        self._numbers: dict[Extent, int] = {}
        self._twins: set[tuple[int, int]] = set()
        self._last = 0
        self._freed: dict[
            int, tuple[weakref.ref, Extent]
        ] = {}  # tensors by id: their bytes may belong to another tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Note that a symmetric tensor is about to be freed."""
        extent = self._memory.find(tensor.data_ptr())
        if extent is not None:
            self._freed[id(tensor)] = weakref.ref(tensor), extent

    def freed(self, tensor: torch.Tensor) -> Extent | None:
        """Extent that a freed tensor had; None if it was not freed."""
        kept, extent = self._freed.get(id(tensor), (None, None))
        return extent if kept is not None and kept() is tensor else None

    def of(self, tensor: torch.Tensor) -> int:
        """Pointer that a kernel gets for a tensor."""
        address = tensor.data_ptr()
        extent = self.freed(tensor) or self._memory.find(address)
        if extent is None and self._memory.in_heap(address):
            extent = next((e for e in reversed(self._memory.freed) if e.base <= address < e.base + e.size), None)
        return address if extent is None else address | self._number(extent) << _SHIFT

    def origin(self, pointer: int) -> tuple[int, str]:
        """(base, name) of the pointer's tensor; (address, its text) of a pointer made from an integer."""
        address = pointer & ADDRESS
        extent = self._extents.get(pointer >> _SHIFT) or self._memory.find(address)
        return (extent.base, extent.name) if extent is not None else (address, f"{address:#x}")

    def plain(self, places: Places, who: Callable[[], str], verb: str) -> Places:
        """Places without numbers, as from ``Places.masked``.

        InvalidAccess where an unmasked address has left its tensor.
        """
        low, last = places.low, places.last
        if last <= ADDRESS:
            return places
        number, extent = low >> _SHIFT, self._memory.find(low & ADDRESS)
        is_one = extent is not None and (last & ADDRESS) + places.itemsize <= extent.base + extent.size
        if number != last >> _SHIFT or not is_one or not self._reaches(number, extent):
            self._inspect(places.active, places.itemsize, who, verb)
        return places.masked(ADDRESS)

    def _number(self, extent: Extent) -> int:
        known = self._numbers.get(extent)
        if known is None:
            self._last = self._next()
            self._twins = {pair for pair in self._twins if self._last not in pair}
            old = self._extents.pop(self._last, None)
            if old is not None:
                del self._numbers[old]
            known = self._numbers[extent] = self._last
            self._extents[known] = extent
        return known

    def _next(self) -> int:
        """Least recently used number. Known extents keep theirs, since a running kernel may hold it."""
        for step in range(_NUMBERS - 1):
            number = (self._last + step) % (_NUMBERS - 1) + 1
            old = self._extents.get(number)
            if old is None or self._memory.find(old.base) is not old:
                return number
        return self._last % (_NUMBERS - 1) + 1

    def _reaches(self, number: int, extent: Extent) -> bool:
        """True if a pointer of this number may reach ``extent``."""
        own = self._extents.get(number)
        if own is extent or own is None:
            return True
        pair = number, self._number(extent)
        if pair in self._twins:
            return True
        here, there = self._memory.heap_of(own.base), self._memory.heap_of(extent.base)
        if None in (here, there) or here == there:
            return False
        if (own.base - here[0], own.size) != (extent.base - there[0], extent.size):
            return False
        self._twins.add(pair)
        return True

    def _inspect(self, active: np.ndarray, itemsize: int, who: Callable[[], str], verb: str) -> None:
        numbers = active >> np.uint64(_SHIFT)
        for number in np.unique(numbers).tolist():
            left = (active[numbers == number] & np.uint64(ADDRESS)).ravel()
            while number in self._extents and left.size:
                address = int(left.min())
                extent = self._memory.find(address)
                if extent is None or not self._reaches(number, extent):
                    raise InvalidAccess(who(), verb, address, itemsize, self._where(number, address, extent))
                end = np.uint64(extent.base + extent.size - itemsize)
                left = left[left > end]
                if left.size and int(left.min()) < extent.base + extent.size:
                    address = int(left.min())
                    raise InvalidAccess(who(), verb, address, itemsize, self._where(number, address, extent))

    def _where(self, number: int, address: int, there: Extent | None) -> str:
        """Position of ``address`` relative to the pointer's tensor, for messages."""
        home, rank = self._extents[number], self._extents[number].rank
        base = home.base
        heap, own = self._memory.heap_of(address), self._memory.heap_of(base)
        if heap is not None and own is not None:  # the same tensor of the heap's rank
            base, rank = base - own[0] + heap[0], self._memory.heap_rank(heap)
        index, count = (address - base) // home.itemsize, home.size // home.itemsize
        if 0 <= index < count:
            return f"{home.name}[{index}] of rank {rank}, which was freed"
        side = "before its start" if index < 0 else f"past its end (it has {count:,} elements)"
        other = f", in {there.name}" if there is not None and not base <= there.base < base + home.size else ""
        return f"{home.name}[{index}] of rank {rank}, {side}{other}"

"""Memory of the virtual machine: map from addresses to tensors, and raw loads and stores.

Tensors live in ordinary CPU memory and keep its addresses. This module keeps a sorted map of the extents that a kernel may
touch. An access anywhere else is refused, with the nearest tensor's name, before it happens.
"""

from __future__ import annotations

import ctypes
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from weft.errors import InvalidAccess
from weft.simulator.places import UNSIGNED, Places, Scattered, one_place

Who = Callable[[], str]
_GONE = 256  # most removed extents whose names are kept


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Bytes of one tensor of one rank: ``size`` bytes at ``base``."""

    base: int
    size: int
    rank: int
    name: str
    itemsize: int = 1
    _words: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def words(self, itemsize: int) -> np.ndarray:
        """The extent's bytes as unsigned integers of ``itemsize`` bytes, shared with the tensor."""
        if itemsize not in self._words:
            count = self.size // itemsize
            raw = (ctypes.c_uint8 * (count * itemsize)).from_address(self.base)
            self._words[itemsize] = np.frombuffer(raw, UNSIGNED[itemsize])
        return self._words[itemsize]

    def index(self, address: int) -> str:
        return f"{self.name}[{(address - self.base) // self.itemsize}] of rank {self.rank}"


# Indices of some addresses of an access, their places, and the extent that holds them.
Part = tuple[np.ndarray, Scattered, Extent]


class Memory:
    """All known extents. A symmetric heap is known only where a tensor was carved from it."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._extents: dict[int, Extent] = {}
        self._counts: dict[int, int] = {}
        self._heaps: list[tuple[int, int]] = []
        self._heap_ranks: dict[tuple[int, int], int] = {}
        # Called with the byte range (low, high) of a removed extent.
        self.on_remove: Callable[[int, int], None] | None = None
        self.freed: list[Extent] = []
        self._gone: dict[int, Extent] = {}  # removed ones, by base, to describe their addresses in messages

    def add_heap(self, base: int, size: int, rank: int) -> None:
        self._heaps.append((base, base + size))
        self._heap_ranks[base, base + size] = rank

    def in_heap(self, address: int) -> bool:
        return self.heap_of(address) is not None

    def heap_of(self, address: int) -> tuple[int, int] | None:
        for heap in self._heaps:
            if heap[0] <= address < heap[1]:
                return heap
        return None

    def heap_rank(self, heap: tuple[int, int]) -> int:
        return self._heap_ranks[heap]

    def place(self, address: int) -> int:
        """Number of the address that is equal in every run: heaps by rank and order, other tensors by name."""
        for number, heap in enumerate(self._heaps):
            if heap[0] <= address < heap[1]:
                rank = self._heap_ranks[heap]
                order = sum(self._heap_ranks[other] == rank for other in self._heaps[:number])
                return ((rank << 8) + order << 48) + address - heap[0]
        extent = self.find(address)
        if extent is None:
            return address
        return ((1 << 32) + zlib.crc32(f"{extent.rank} {extent.name}".encode()) << 48) + address - extent.base

    def add(self, extent: Extent) -> None:
        """Add an extent. Extents are reference-counted by base: remove one as often as it was added."""
        if extent.size <= 0:
            return
        known = self._extents.get(extent.base)
        if known is None:
            insort(self._bases, extent.base)
            self._extents[extent.base] = extent
            self._counts[extent.base] = 0
        elif extent.size > known.size:
            self._extents[extent.base] = extent
        self._counts[extent.base] += 1

    def remove(self, base: int) -> None:
        if base not in self._counts:
            return
        self._counts[base] -= 1
        if self._counts[base] == 0:
            extent = self._extents.pop(base)
            del self._counts[base]
            self._bases.pop(bisect_right(self._bases, base) - 1)
            self._gone.pop(base, None)
            self._gone[base] = extent
            if len(self._gone) > _GONE:
                del self._gone[next(iter(self._gone))]
            if self.in_heap(base):
                self.freed.append(extent)
            if self.on_remove is not None:
                self.on_remove(extent.base, extent.base + extent.size)

    def add_tensor(self, tensor: torch.Tensor, rank: int, name: str) -> int | None:
        """Add the whole storage of a tensor passed to a kernel, since a view's neighbours are the owner's own.

        Returns the base to ``remove`` later; None for a tensor in a heap (carved tensors are added one by one), and for one
        without elements: its pointer is null, so it would not be known to lie in a heap.
        """
        if tensor.numel() == 0 or self.in_heap(tensor.data_ptr()):
            return None
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        self.add(Extent(base, size, rank, name, tensor.element_size()))
        return base

    def find(self, address: int) -> Extent | None:
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        extent = self._extents[self._bases[at]]
        return extent if address < extent.base + extent.size else None

    def remembered(self, address: int) -> Extent | None:
        """Extent that holds the address, or held it last."""
        gone = (one for one in reversed(self._gone.values()) if one.base <= address < one.base + one.size)
        return self.find(address) or next(gone, None)

    def describe(self, address: int) -> str:
        extent = self.remembered(address)
        return extent.index(address) if extent else f"{address:#x}"

    def read(self, places: Places, who: Who) -> np.ndarray:
        """Raw bits at the places, zeros where masked off. InvalidAccess outside all known extents."""
        if places.is_empty:
            return np.zeros(places.shape, UNSIGNED[places.itemsize])
        extent = self._one_extent(places, who, "load")
        if extent is not None:
            return places.take(extent.words(places.itemsize), extent.base)
        active = places.active
        values = np.empty(active.shape, UNSIGNED[places.itemsize])
        for index, part, extent in self._parts(active, places.itemsize, who, "load"):
            values[index] = part.take(extent.words(places.itemsize), extent.base)
        if places.is_whole:
            return values.reshape(places.shape)
        bits = np.zeros(places.shape, values.dtype)
        bits[places.mask] = values
        return bits

    def write(self, places: Places, bits: np.ndarray, who: Who) -> None:
        """Store raw bits of the places' shape. InvalidAccess outside all known extents."""
        targets = places.targets or self.check(places, who)
        if isinstance(targets, Extent):
            places.put(targets.words(places.itemsize), targets.base, bits)
        elif targets:
            values = bits if places.is_whole else bits[places.mask]
            for index, part, extent in targets:
                part.put(extent.words(places.itemsize), extent.base, values[index])

    def check(self, places: Places, who: Who) -> Extent | list[Part]:
        """Extent that holds the places, or their parts in several. InvalidAccess outside all extents."""
        if places.is_empty:
            return []
        extent = self._one_extent(places, who, "store")
        return extent if extent is not None else list(self._parts(places.active, places.itemsize, who, "store"))

    def read_word(self, address: int, itemsize: int, who: Who) -> int:
        """Unsigned integer of ``itemsize`` bytes at ``address``."""
        extent = self._one_extent(one_place(address, (1,), itemsize), who, "load")
        if extent is None:
            raise InvalidAccess(who(), "load", address, itemsize, self._nearest(address))
        return extent.words(itemsize).item((address - extent.base) // itemsize)

    def _one_extent(self, places: Places, who: Who, verb: str) -> Extent | None:
        """Extent that holds all places, the common case; None if no single one does.

        InvalidAccess if a place is misaligned in it.
        """
        extent = self.find(places.low)
        if extent is None or places.last + places.itemsize > extent.base + extent.size:
            return None
        address = places.misaligned(extent.base)
        if address is not None:
            raise InvalidAccess(who(), f"misaligned {verb}", address, places.itemsize, extent.index(address))
        return extent

    def _parts(self, active: np.ndarray, itemsize: int, who: Who, verb: str) -> Iterator[Part]:
        """(indices into ``active``, places there, extent that holds them), of all extents."""
        left = active
        while left.size:
            address = int(np.minimum.reduce(left, axis=None))
            extent = self.find(address)
            if extent is None or address + itemsize > extent.base + extent.size:
                raise InvalidAccess(who(), verb, address, itemsize, self._nearest(address))
            last = np.uint64(extent.base + extent.size - itemsize)
            # The least address left lies in this extent, so all up to its end do.
            part, left = (active >= np.uint64(extent.base)) & (active <= last), left[left > last]
            places = Scattered(active[part], None, itemsize)
            self._one_extent(places, who, verb)  # for its error
            yield part, places, extent

    def _nearest(self, address: int) -> str:
        for extent in reversed(self.freed):
            if extent.base <= address < extent.base + extent.size:
                return f"{extent.index(address)}, which was freed"
        if not self._bases:
            return "no tensor is known"
        at = bisect_right(self._bases, address)
        near = [self._extents[base] for base in self._bases[max(0, at - 1) : at + 1]]

        def distance(extent: Extent) -> int:
            return extent.base - address if address < extent.base else address - (extent.base + extent.size) + 1

        extent = min(near, key=distance)
        where = "before its start" if address < extent.base else "past its end"
        name = f"{extent.name} of rank {extent.rank} ({extent.size:,} bytes)"
        return f"in no tensor; nearest: {name}, {distance(extent):,} bytes {where}"


def signed(bits: int, itemsize: int) -> int:
    """The two's complement integer with the low 8 * ``itemsize`` bits of ``bits``."""
    width = 8 * itemsize
    value = int(bits) & ((1 << width) - 1)
    return value - (1 << width) if value >> (width - 1) else value


def is_met(word: int, comparison: str, wanted: int, itemsize: int) -> bool:
    """True if a wait for ``comparison`` with ``wanted`` ends at ``word``, by the signed difference."""
    ahead = signed(word - wanted, itemsize)
    return {">=": ahead >= 0, "==": ahead == 0, "!=": ahead != 0}[comparison]

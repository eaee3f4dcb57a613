"""Places in memory that one access reaches: scattered addresses, or a box of a strided tensor.

What the machine needs of either (the range of addresses, the bits) is computed once, here. The addresses and the mask of a box
are made only when an observer or a search asks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}  # of element sizes, to divide by them
_ALL = 2**64 - 1
UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in _SHIFTS}


class Order(NamedTuple):
    """Order of an atomic access.

    sem    "relaxed", "acquire", "release" or "acq_rel"
    scope  "cta", "gpu" or "sys"
    by     "all" threads of a program; "threads": separate ones, which keep what they acquire; "tma": a descriptor's reduction
    """

    sem: str
    scope: str
    by: str = "all"

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")


@cache
def everywhere(shape: tuple[int, ...]) -> np.ndarray:
    """All-true mask, for an access without a mask."""
    mask = np.ones(shape, np.bool_)
    mask.flags.writeable = False
    return mask


@cache
def indices(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Indices along each dimension of a block, shaped to broadcast."""
    rank = len(shape)
    return [
        np.arange(size, dtype=np.int64).reshape([-1 if d == axis else 1 for d in range(rank)])
        for axis, size in enumerate(shape)
    ]


class Places:
    """Block of elements of ``itemsize`` bytes, some of which may be masked off.

    is_whole   no element is masked off
    is_empty   all are masked off
    low, last  least and greatest address that is not masked off; without one 0 and -1
    addresses, mask  of all elements (uint64, bool), in the block's shape
    active     addresses that are not masked off, in the block's order and of any shape
    first      the first such address
    targets    of a store under way: ``Memory.check`` of the addresses
    """

    __slots__ = ("is_empty", "is_whole", "itemsize", "last", "low", "targets")

    shape: tuple[int, ...]
    addresses: np.ndarray
    mask: np.ndarray
    active: np.ndarray
    first: int

    @property
    def high(self) -> int:
        """The byte after the last, unless empty."""
        return self.last + self.itemsize

    def masked(self, bits: int) -> Places:
        """The same places with addresses ``& bits``.

        Changes and returns this object if all addresses that are not masked off are equal in the other bits.
        """
        raise NotImplementedError

    def misaligned(self, base: int) -> int | None:
        """First address that is no multiple of the element size beyond ``base``; None if there is none."""
        raise NotImplementedError

    def take(self, words: np.ndarray, base: int) -> np.ndarray:
        """Bits of the elements in ``words`` at ``base``, as a new array; zeros where masked off."""
        raise NotImplementedError

    def put(self, words: np.ndarray, base: int, bits: np.ndarray) -> None:
        """Store ``bits``, of the block's shape."""
        raise NotImplementedError


class Scattered(Places):
    """Places at any addresses."""

    __slots__ = ("_active", "_addresses", "_bits", "_mask", "_offsets", "_upper")

    def __init__(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        """``mask``: None where no element is masked off."""
        self._addresses, self._mask, self.itemsize, self.targets = addresses, mask, itemsize, None
        self.is_whole = mask is None or np.count_nonzero(mask) == mask.size
        self._active = active = addresses if self.is_whole else addresses[mask]
        # Bits that are left of the arrays' addresses, and what ``masked`` took off each active one: the arrays stay as they
        # are until they are asked for.
        self._bits, self._upper = _ALL, 0
        self._offsets: tuple[int, np.ndarray] | None = None  # base, distances of the active ones from it
        self.is_empty = active.size == 0
        if active.size == 1:
            self.low = self.last = active.item()
        elif active.size:
            self.low, self.last = int(np.minimum.reduce(active, axis=None)), int(np.maximum.reduce(active, axis=None))
        else:
            self.low, self.last = 0, -1

    @property
    def shape(self) -> tuple[int, ...]:
        return self._addresses.shape

    @property
    def addresses(self) -> np.ndarray:
        return self._addresses if self._bits == _ALL else self._addresses & np.uint64(self._bits)

    @property
    def mask(self) -> np.ndarray:
        return everywhere(self.shape) if self._mask is None else self._mask

    @property
    def active(self) -> np.ndarray:
        return self._active if self._bits == _ALL else self._active & np.uint64(self._bits)

    @property
    def first(self) -> int:
        return self._active.item(0) - self._upper

    def masked(self, bits: int) -> Scattered:
        upper = self.low & ~bits
        if upper != self.last & ~bits:  # the active ones differ in it, so their order may change
            return Scattered(self.addresses & np.uint64(bits), None if self.is_whole else self._mask, self.itemsize)
        self._bits, self._upper, self._offsets = bits & self._bits, self._upper + upper, None
        self.low, self.last = self.low - upper, self.last - upper
        return self

    def misaligned(self, base: int) -> int | None:
        if self.itemsize == 1:
            return None
        offsets, wrong = self._beyond(base), np.uint64(self.itemsize - 1)
        if not np.bitwise_or.reduce(offsets, axis=None) & wrong:
            return None
        return self.active.item(int((offsets & wrong).argmax()))

    def take(self, words: np.ndarray, base: int) -> np.ndarray:
        values = words.take(self._indices(base))
        if self.is_whole:
            return values
        bits = np.zeros(self.shape, words.dtype)
        bits[self._mask] = values
        return bits

    def put(self, words: np.ndarray, base: int, bits: np.ndarray) -> None:
        words[self._indices(base)] = bits if self.is_whole else bits[self._mask]

    def _beyond(self, base: int) -> np.ndarray:
        if self._offsets is None or self._offsets[0] != base:
            self._offsets = base, self._active - np.uint64(base + self._upper)
        return self._offsets[1]

    def _indices(self, base: int) -> np.ndarray:
        return (self._beyond(base) >> np.uint64(_SHIFTS[self.itemsize])).view(np.int64)


class Box(Places):
    """Box of a strided tensor: index i along dimension d lies ``i * strides[d]`` bytes beyond ``start``.

    strides  multiples of the element size, not negative
    inside   for each dimension the range of indices that are not masked off; None where no element is
    """

    __slots__ = ("_arrays", "inside", "shape", "start", "strides")

    def __init__(
        self,
        start: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        inside: tuple[tuple[int, int], ...] | None,
        itemsize: int,
    ) -> None:
        self.start, self.shape, self.strides, self.inside, self.itemsize = start, shape, strides, inside, itemsize
        self._arrays: Scattered | None = None
        self.targets = None
        if inside is None:
            self.is_whole, self.is_empty = True, False
            self.low, self.last = start, start + _span(shape, strides)
            return
        low = last = start
        self.is_whole = self.is_empty = False
        for (begin, end), stride in zip(inside, strides, strict=True):
            low, last = low + begin * stride, last + (end - 1) * stride
            if end <= begin:
                self.is_empty = True
        self.low, self.last = (0, -1) if self.is_empty else (low, last)

    @property
    def addresses(self) -> np.ndarray:
        return self._scattered().addresses

    @property
    def mask(self) -> np.ndarray:
        return self._scattered().mask

    @property
    def active(self) -> np.ndarray:
        return self._scattered().active

    @property
    def first(self) -> int:
        return self.low

    def masked(self, bits: int) -> Places:
        upper = self.low & ~bits
        if upper != self.last & ~bits:
            return self._scattered().masked(bits)
        self.start, self.low, self.last, self._arrays = self.start - upper, self.low - upper, self.last - upper, None
        return self

    def misaligned(self, base: int) -> int | None:
        return self.low if (self.low - base) % self.itemsize else None

    def take(self, words: np.ndarray, base: int) -> np.ndarray:
        values = self._view(words, base)
        if self.is_whole:
            return values.copy()
        bits = np.zeros(self.shape, words.dtype)
        bits[self._slices()] = values
        return bits

    def put(self, words: np.ndarray, base: int, bits: np.ndarray) -> None:
        self._view(words, base)[...] = bits if self.is_whole else bits[self._slices()]

    def _view(self, words: np.ndarray, base: int) -> np.ndarray:
        shape = self.shape if self.is_whole else [end - begin for begin, end in self.inside]
        return np.ndarray(shape, words.dtype, words, self.low - base, self.strides)

    def _slices(self) -> tuple[slice, ...]:
        return tuple([slice(begin, end) for begin, end in self.inside])

    def _scattered(self) -> Scattered:
        if self._arrays is None:
            steps = zip(indices(self.shape), self.strides, strict=True)
            addresses = sum(index * stride for index, stride in steps).view(np.uint64) + np.uint64(self.start % 2**64)
            mask = None
            if not self.is_whole:
                mask = np.zeros(self.shape, np.bool_)
                if not self.is_empty:
                    mask[self._slices()] = True
            self._arrays = Scattered(addresses, mask, self.itemsize)
        return self._arrays


def one_place(address: int, shape: tuple[int, ...], itemsize: int) -> Box:
    """Place of one element, of any shape."""
    return Box(address, shape, (0,) * len(shape), None, itemsize)


@cache
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Bytes from a box's first element to its last."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

"""Bookkeeping of the symmetric heap: used and free blocks of one allocation, equal on all ranks."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from weft.errors import HeapExhausted

# TMA needs 128; 256 is cudaMalloc's alignment and keeps tensors on separate L2 lines.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """``size`` bytes at ``offset``, ``used`` bytes by the tensor called ``name``."""

    offset: int
    size: int
    used: int = 0
    name: str = ""


class HeapLayout:
    """First-fit allocator over a sorted list of free blocks, which joins neighbours when one is freed."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._free = [Block(0, size)]
        self._taken: dict[int, Block] = {}

    @property
    def free_bytes(self) -> int:
        return sum(block.size for block in self._free)

    @property
    def largest_free_bytes(self) -> int:
        return max((block.size for block in self._free), default=0)

    def find(self, nbytes: int) -> int | None:
        """Offset that ``take`` would return; None if no free block is large enough."""
        size = _aligned(nbytes)
        return next((block.offset for block in self._free if block.size >= size), None)

    def take(self, nbytes: int, name: str) -> int:
        """Offset of ``nbytes`` fresh bytes. HeapExhausted names the largest tensors."""
        size = _aligned(nbytes)
        for at, block in enumerate(self._free):
            if block.size >= size:
                rest = Block(block.offset + size, block.size - size)
                self._free[at : at + 1] = [rest] if rest.size else []
                self._taken[block.offset] = Block(block.offset, size, nbytes, name)
                return block.offset
        largest = [f"{b.name} ({b.used:,} bytes)" for b in sorted(self._taken.values(), key=lambda b: -b.size)[:3]]
        tail = next((block.size for block in self._free if block.offset + block.size == self.size), 0)
        raise HeapExhausted(self.rank, size, self.free_bytes, self.largest_free_bytes, tail, self.size, largest)

    def give_back(self, offset: int) -> None:
        block = self._taken.pop(offset)
        insort(self._free, Block(block.offset, block.size))
        joined: list[Block] = []
        for free in self._free:
            if joined and joined[-1].offset + joined[-1].size == free.offset:
                joined[-1] = Block(joined[-1].offset, joined[-1].size + free.size)
            else:
                joined.append(free)
        self._free = joined

    def taken_at(self, offset: int) -> Block | None:
        """Used block that begins at ``offset``; None if there is none."""
        return self._taken.get(offset)


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)

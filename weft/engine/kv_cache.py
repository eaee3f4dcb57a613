"""Allocation of the KV cache's pages."""

from __future__ import annotations


class PagePool:
    """Free pages of a PagedCache, without page 0, which is reserved for padding.

    Equal calls give equal pages on every rank.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, 0, -1))  # taken from the end

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Number of pages that a sequence could have alone."""
        return self.pages - 1

    def needed(self, tokens: int) -> int:
        """Number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.free
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Free pages. The next owner's kernels follow in the same stream, so nothing has to be waited for."""
        self._free.extend(reversed(pages))

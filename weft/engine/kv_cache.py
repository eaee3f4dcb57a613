"""Which pages of the KV cache are free."""

from __future__ import annotations


class PagePool:
    """Pages 1 .. pages - 1 of a PagedCache, whose page 0 is nobody's. The same calls give the same pages on every rank."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, 0, -1))  # the end is taken first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that one sequence could have, were it alone."""
        return self.pages - 1

    def needed(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.free
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Their next owner's kernels come after those of the last in the same stream, so nothing need be waited for."""
        self._free.extend(reversed(pages))

"""Pages of the KV cache: allocation, sharing of equal first tokens, and how ranks split the cache."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.config import EngineConfig
from weft.models import DecoderConfig
from weft.parallel.modes import mode_named
from weft.runtime.arithmetic import cdiv


class PagePool:
    """Pages of a PagedCache, without page 0, which is reserved for padding.

    Equal calls give equal pages on every rank.

    window  most tokens that a token attends to in any layer, itself the last; None: all before it. Pages that lie before the
            windows of all tokens to come are given back while their sequence runs

    A full page can be published under the digest of all tokens up to its end. `find` then names it, and sequences that begin
    with these tokens share it; it is not written again. Once no sequence refers to it, it counts as free and can still be
    found, until `take` needs it: the page that was freed first goes first.
    """

    def __init__(self, pages: int, page_size: int, window: int | None = None) -> None:
        self.pages, self.page_size, self.window = pages, page_size, window
        self._free = list(range(pages - 1, 0, -1))  # taken from the end
        self._references = [0] * pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = (
            OrderedDict()
        )  # published pages without a reference, the first freed first

    @property
    def free(self) -> int:
        return len(self._free) + len(self._unused)

    @property
    def capacity(self) -> int:
        """Number of pages that a sequence could have alone."""
        return self.pages - 1

    def needed(self, tokens: int) -> int:
        """Number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def first_needed(self, tokens: int) -> int:
        """Index of the first page that the tokens behind the first `tokens` attend to."""
        return 0 if self.window is None else max(0, tokens + 1 - self.window) // self.page_size

    def needed_at_once(self, tokens: int, chunk: int = 1) -> int:
        """Most pages that a sequence of `tokens` tokens needs at a time, by chunks of up to `chunk`."""
        if self.window is None:
            return self.needed(tokens)
        # A run of n tokens lies in at most ceil((n - 1) / page_size) + 1 pages.
        return min(self.needed(tokens), self.needed(self.window + chunk - 2) + 1)

    def free_without(self, pages: Sequence[int]) -> int:
        """Number of free pages once these have been shared."""
        return self.free - sum(page in self._unused for page in pages)

    def take(self, count: int) -> list[int]:
        """Allocate pages to write to."""
        assert count <= self.free
        pages = [self._free.pop() if self._free else self._forget_oldest() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Refer to published pages, to read them."""
        for page in pages:
            self._unused.pop(page, None)
            self._references[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page.

        The next owner's kernels follow in the same stream, so nothing has to be waited for. The last page is freed first: the
        begin of a sequence is useful to more others than its end.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0
            if self._references[page] == 0:
                if page in self._digest_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find a full page. Without effect where another page has these tokens."""
        if digest not in self._page_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def withdraw(self, pages: Sequence[int]) -> None:
        """Let no sequence find these pages, which are referred to, from now on."""
        for page in pages:
            if (digest := self._digest_of.pop(page, None)) is not None:
                del self._page_of[digest]

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest begin of a sequence of which all that the next token attends to are published.

        0 for those before its window.
        """
        pages = [self._page_of.get(digest, 0) for digest in digests]
        count = run = 0  # `run`: published pages in a row
        for end, page in enumerate(pages, 1):
            run = run + 1 if page else 0
            if run >= end - self.first_needed(end * self.page_size):
                count = end
            elif self.window is None:
                break
        first = self.first_needed(count * self.page_size)
        return [0] * first + pages[first:count]

    def unpublish(self) -> None:
        """Let no page be found: after an error their contents are uncertain."""
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(reversed(self._unused))
        self._unused.clear()

    def _forget_oldest(self) -> int:
        page, _ = self._unused.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page


def digest_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a page's tokens and of all before them, whose digest is `before`: the same on every rank."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


def digest_of_salt(salt: str | None) -> bytes:
    """Digest of what stands before the first page: pages of other salts have other digests."""
    # No page begins with the name, since no token id is as large: otherwise a salt could be made that stands for a page.
    return b"" if salt is None else hashlib.sha256(b"cache_salt " + salt.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Layout of the KV cache and the reason for it. context_parallel: as of weft.models.Decoder."""

    context_parallel: bool
    reason: str

    def __str__(self) -> str:
        how = "spread over the ranks by pages" if self.context_parallel else "split over the ranks by heads"
        return f"{how}: {self.reason}"


def plan_cache(config: EngineConfig, model: DecoderConfig, world_size: int, nodes: int = 1) -> CachePlan:
    """Plan for `config`, whose max_seq_len is known: as asked for, else what makes the cache smaller.

    With fewer KV heads than ranks, a split by heads holds each of them several times.
    """
    if world_size == 1:
        return CachePlan(context_parallel=False, reason="one rank has all")
    if config.context_parallel is not None:
        return CachePlan(context_parallel=config.context_parallel, reason=f"context_parallel={config.context_parallel}")
    if mode_named(config.mode) == "reference":
        return CachePlan(context_parallel=False, reason=f"mode={config.mode!r} knows no other cache")
    if nodes > 1:
        reason = f"{nodes} nodes, between which a spread cache sends in every layer; context_parallel=True spreads it"
        return CachePlan(context_parallel=False, reason=reason)
    heads, page = model.num_key_value_heads, config.page_size
    split = max(1, heads // world_size) * cdiv(config.max_seq_len, page) * page
    spread = heads * cdiv(config.max_seq_len, page * world_size) * page
    fewer, more = sorted((split, spread))
    reason = (
        f"{config.max_seq_len} tokens of {heads} KV heads take {fewer} tokens of a head on each of {world_size} ranks, the "
        f"other way {more}"
    )
    if spread >= split:
        return CachePlan(context_parallel=False, reason=reason)
    return CachePlan(context_parallel=True, reason=f"{reason}; context_parallel=False splits by heads")

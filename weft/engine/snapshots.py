"""Snapshots of states for prefix caching: a sequence's states after its first pages.

    prompt of 150 tokens, pages of 16, interval of 64     read as 0 .. 64, 64 .. 128, 128 .. 144, 144 .. 150
    snapshots after                                       64 tokens, 128, and 144: the end, by pages

Pages hold keys and values of all tokens, but a state stands for all tokens before it. So a prompt begins after the longest run
of cached pages that ends with a snapshot. Prompts are read in chunks that end where a snapshot is due; the last token is always
read, since a pass over it chooses the next one.

While a sequence decodes, it keeps its states after its last full page in one place. When it leaves, that becomes a snapshot
for the next turn of a conversation, or for the sequence itself after a preemption.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.parallel.step import PagedCache

# Snapshots take this part of the bytes of the KV cache, where they are not given their bytes.
SNAPSHOT_SHARE = 1 / 8


@exchangeable
class SnapshotCounts(NamedTuple):
    """Counts of snapshots of states since the engine's start.

    saved, used, dropped  snapshots made, requests that began with one, and snapshots that gave way to newer ones
    held, places          snapshots there are, and may be
    """

    saved: int = 0
    used: int = 0
    dropped: int = 0
    held: int = 0
    places: int = 0


class Copies(NamedTuple):
    """Copies of states that a step makes.

    restored  by batch slot, the snapshot that it begins with, before the step reads prompts
    saved     by snapshot, the batch slot whose states it takes after that
    """

    restored: Mapping[int, int]
    saved: Mapping[int, int]


class Snapshots:
    """Snapshots by the digest of the tokens before, the least recently used first to go.

    Equal calls give equal places on every rank. Copies of a step are launched in the order of the calls, so a place is free for
    the next snapshot as soon as it has been given back.
    """

    def __init__(self, places: int, page_size: int, interval: int) -> None:
        """`interval`: tokens between two snapshots of a sequence, rounded down to pages."""
        self.page_size, self.pages = page_size, max(1, interval // page_size)
        self._free = list(range(places - 1, -1, -1))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._counts, self._reserved = SnapshotCounts(places=places), 0
        self._restored: dict[int, int] = {}
        self._saved: dict[int, int] = {}

    @property
    def counts(self) -> SnapshotCounts:
        return self._counts._replace(held=len(self._place_of))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place_of

    def longest(self, digests: Sequence[bytes]) -> int:
        """Most first pages, of these digests, after which there is a snapshot."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self), 0)

    def due(self, pages: int) -> list[int]:
        """Numbers of pages after which a prompt gets snapshots; `pages`: full ones before its last token."""
        ends = list(range(self.pages, pages, self.pages))
        return [*ends, pages] if pages else []

    def use(self, digest: bytes, slot: int) -> None:
        """Have a batch slot begin with a snapshot."""
        self._place_of.move_to_end(digest)
        self._restored[slot] = self._place_of[digest]
        self._counts = self._counts._replace(used=self._counts.used + 1)

    def save(self, digest: bytes, slot: int) -> None:
        """Take a snapshot of a batch slot, which later steps find."""
        if digest not in self:
            place = self._take()
            self._enter(digest, place)
            self._saved[place] = slot

    def _take(self) -> int:
        """A place to write to."""
        if not self._free:
            self._free.append(self._place_of.popitem(last=False)[1])
            self._counts = self._counts._replace(dropped=self._counts.dropped + 1)
        return self._free.pop()

    def _enter(self, digest: bytes, place: int) -> None:
        self._place_of[digest] = place
        self._counts = self._counts._replace(saved=self._counts.saved + 1)

    def reserve(self) -> int | None:
        """A place for a sequence that decodes; None: such sequences have half of all."""
        if 2 * (self._reserved + 1) > self._counts.places:
            return None
        self._reserved += 1
        return self._take()

    def release(self, place: int, digest: bytes | None) -> None:
        """End a reservation: its states become a snapshot of this digest; None: they are of no use."""
        self._reserved -= 1
        if digest is None or digest in self:
            self._free.append(place)
        else:
            self._enter(digest, place)

    def withdraw(self, digests: Sequence[bytes]) -> None:
        """Forget the snapshots of these digests."""
        self._free += [self._place_of.pop(digest) for digest in digests if digest in self]

    def clear(self) -> None:
        """Forget all, after an error that leaves their contents uncertain."""
        self.withdraw(list(self._place_of))
        self.take_copies()

    def take_copies(self) -> Copies:
        """Copies that have been asked for since the last call."""
        copies = Copies(self._restored, self._saved)
        self._restored, self._saved = {}, {}
        return copies


def places_beside(page: PagedCache, pages: int, given: int | None) -> int:
    """Number of snapshots beside a cache of `pages` pages. ValueError where their bytes hold none.

    page   a cache of one page
    given  bytes for snapshots; None: a share of the cache's
    """
    each = page.states.nbytes_of_one
    if given is None:
        given = max(each, int(page.data.nbytes * pages * SNAPSHOT_SHARE))
    if 0 < given < each:
        raise ValueError(
            f"state_snapshot_bytes={given} holds no state, which has {each} bytes on a rank; raise it, or pass 0 for none"
        )
    return min(given // each, pages - 1)  # a snapshot is at the end of a page

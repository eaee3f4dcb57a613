"""Pages of the KV cache, shared by equal first tokens, and the sequences that hold them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from weft.engine.params import Kind, SamplingParams, joint_kind

if TYPE_CHECKING:
    import torch

    from weft.engine.slots import Adjusted


class PagePool:
    """Pages of a PagedCache, without page 0, which is reserved for padding.

    Equal calls give equal pages on every rank.

    window  most tokens that a token attends to in any layer, itself included; None: all before it. Pages before the windows of
            all tokens to come are given back while their sequence runs

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
        # Published pages without a reference, the first freed first.
        self._unused: OrderedDict[int, None] = OrderedDict()

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
        """Index of the first page that the tokens after the first `tokens` attend to."""
        return 0 if self.window is None else max(0, tokens + 1 - self.window) // self.page_size

    def needed_at_once(self, tokens: int, chunk: int = 1) -> int:
        """Most pages that a sequence of `tokens` tokens needs at a time, by chunks of up to `chunk`."""
        if self.window is None:
            return self.needed(tokens)
        # A run of n tokens lies in at most ceil((n - 1) / page_size) + 1 pages.
        return min(self.needed(tokens), self.needed(self.window + chunk - 2) + 1)

    def free_without(self, pages: abc.Sequence[int]) -> int:
        """Number of free pages once these have been shared."""
        return self.free - sum(page in self._unused for page in pages)

    def take(self, count: int) -> list[int]:
        """Allocate pages to write to."""
        assert count <= self.free
        pages = [self._free.pop() if self._free else self._forget_oldest() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: abc.Sequence[int]) -> None:
        """Refer to published pages, to read them."""
        for page in pages:
            self._unused.pop(page, None)
            self._references[page] += 1

    def give_back(self, pages: abc.Sequence[int]) -> None:
        """Drop a reference to each page.

        The next owner's kernels follow in the same stream, so nothing has to be waited for. The last page is freed first: more
        sequences can use the begin of a sequence than its end.
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
        """Let `find` name a full page. Without effect where another page has these tokens."""
        if digest not in self._page_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def withdraw(self, pages: abc.Sequence[int]) -> None:
        """Let no sequence find these pages, which are referred to, from now on."""
        for page in pages:
            if (digest := self._digest_of.pop(page, None)) is not None:
                del self._page_of[digest]

    def find(self, digests: abc.Sequence[bytes]) -> list[int]:
        """Pages of the longest begin whose pages in the next token's window are published; 0 before it."""
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
        """Let no page be found, after an error that leaves their contents uncertain."""
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(reversed(self._unused))
        self._unused.clear()

    def _forget_oldest(self) -> int:
        page, _ = self._unused.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page


def digest_of(before: bytes, tokens: abc.Sequence[int]) -> bytes:
    """Digest of a page's tokens and of all earlier ones, whose digest is `before`: the same on every rank."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


def first_digest(salt: str | None, lora: str | None) -> bytes:
    """Digest before the first page, so that pages of different salts or adapters have different digests."""
    # No page begins with these bytes, since no token id is as large: a salt cannot stand for a page.
    digest = b"" if salt is None else hashlib.sha256(b"cache_salt " + salt.encode()).digest()
    return digest if lora is None else hashlib.sha256(b"lora " + digest + lora.encode()).digest()


@dataclass(slots=True, eq=False)
class Sequence:
    """State of a request.

    adjusted  changes of logits that it asks for; None: none
    number    index among the engine's requests; -1: not submitted yet
    budget    maximum tokens of the answer, by `params` and by the model
    tokens    answer, as far as the host knows it
    prompt_logprobs  rows of weft.engine.sampling of the prompt's tokens but the first, if asked for, in host memory
    pooled    what its chunks give for the vector of its prompt, if one is asked for, in host memory
    launched  answer tokens whose computation has been launched
    cached    tokens of prompt and answer whose keys are in the cache, or will be once the launched kernels have run
    ahead     drafts of the steps in flight: as many more tokens may be launched and cached
    reads_all  every token of the prompt is read, also a cached one: for its log-probability, or for a mean
    hit_tokens  tokens that it found in the cache when it was first admitted; None: not admitted yet
    digests   of its full pages, as far as they were needed
    published  number of its pages that other sequences can find
    released  number of its first pages that it has given back, or never had: zeros in `pages`
    slot      batch slot; None while it waits
    running   all tokens but the last one are cached: decode steps continue it
    late      submitted while sequences were running
    together  submitted by a call of several prompts, which may be read before they decode
    adapter   number among the engine's; -1: none
    corrupt   its logits were not finite, so keys and values may not be either: no other sequence may share its pages
    kind      of the choice of its tokens
    snapshot  (place, pages): where its states after its last full page are kept while it decodes; None: nowhere
    """

    prompt: list[int]
    params: SamplingParams
    budget: int
    reads_all: bool = False
    adjusted: Adjusted | None = None
    number: int = -1
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[torch.Tensor] = field(default_factory=list)
    pooled: list[torch.Tensor] = field(default_factory=list)
    launched: int = 0
    cached: int = 0
    ahead: int = 0
    pages: list[int] = field(default_factory=list)
    hit_tokens: int | None = None
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    released: int = 0
    slot: int | None = None
    running: bool = False
    late: bool = False
    together: bool = False
    done: bool = False
    corrupt: bool = False
    adapter: int = -1
    kind: Kind = field(init=False)
    snapshot: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.kind = self.params.kind

    @property
    def to_read(self) -> int:
        """Number of tokens that must be cached before the next one can be chosen."""
        return len(self.prompt) + self.launched

    @property
    def last(self) -> int:
        """Index of the last token whose key is cached: the last token of an answer is only chosen."""
        return len(self.prompt) + self.budget - 2

    @property
    def held(self) -> int:
        """Number of pages that it refers to."""
        return len(self.pages) - self.released

    @property
    def in_flight(self) -> int:
        return self.launched - len(self.tokens)


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Tokens start .. start + length of a sequence to read; `last`: then its next token is chosen."""

    sequence: Sequence
    start: int
    length: int
    last: bool


class Decoding:
    """Sequences of a decode step; made anew when a sequence comes, goes or moves to another slot.

    sequences  oldest first
    slots      one per sequence
    size       highest slot + 1
    kind       union of the sequences' kinds
    """

    __slots__ = "kind", "sequences", "size", "slots"

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences, self.slots = sequences, [sequence.slot for sequence in sequences]
        self.size = max(self.slots, default=-1) + 1
        self.kind = joint_kind(sequences)


class Changes(NamedTuple):
    """Changes of batch slots between two decode steps.

    slots      the sequence that begins to decode in a slot; None: the one before has stopped
    new_pages  (slot, index among its pages, page) of sequences that go on; page 0: given back
    """

    slots: dict[int, Sequence | None]
    new_pages: list[tuple[int, int, int]]

"""Scheduling policy of a batch: a function of the requests alone, so that every rank decides the same.

Requests are admitted in order, as batch slots and pages allow. A step reads at most `chunk_tokens` tokens of prompts, of all
sequences together, and then decodes one token of every sequence whose prompt has been read. Pages are allocated when they are
needed. When none is free, the youngest sequence is preempted: it returns its pages, waits, and is read again later together
with its answer so far (recomputation, as in vLLM). So the oldest sequence always advances; a request that would not fit alone
has been refused.

A prompt that arrives while sequences decode is read beside their steps, at most `mixed_chunk_tokens` tokens a step: a chunk
and a decode step bound the time between two tokens of a stream, however long the prompt.

Prompts of one call, which gives them all at once, are read chunk after chunk before the first one decodes, as far as slots and
pages allow: a decode step between two chunks would serve few sequences, and the call waits for the last one's end.

With prefix caching a request starts after the full pages of its first tokens that are in the cache already, from earlier
prompts or answers. At least its last token is read, since only a pass chooses the next one. Pages that a step fills are found
from the next step on; a request that begins with such a page waits for it.

Of models with states a request starts after the longest run of such pages that ends with a snapshot of the states
(weft.engine.snapshots). Chunks end where a snapshot is due, and a request that begins with its tokens waits for it.

Where all layers have windows, a sequence gives back the pages before the windows of all its tokens to come: their entries are
0 from then on. It is admitted once there is room for its window and a chunk, and finds its first tokens in the cache where the
pages of its window are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from weft.engine.kv_cache import Changes, Decoding, PagePool, Sequence, SequenceRange, digest_of, first_digest
from weft.engine.snapshots import Snapshots
from weft.runtime.logs import logger_of

logger = logger_of(__name__)


class Scheduler:
    """Queue of waiting requests, and the active ones with their batch slots and pages."""

    def __init__(
        self,
        pool: PagePool,
        max_batch: int,
        chunk_tokens: int,
        *,
        mixed_chunk_tokens: int | None = None,
        prefix_caching: bool = False,
        most_drafts: int = 0,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`most_drafts`: of a sequence in a decode step.

        snapshots  of states, with prefix caching; None: pages suffice
        """
        self.snapshots = snapshots
        self._full_now: list[Sequence] = []  # their pages are full with the step that `next_decode` has returned
        self.pool, self.max_batch, self.prefix_caching = pool, max_batch, prefix_caching
        self.chunk_tokens, self.most_drafts = chunk_tokens, most_drafts
        self.mixed_chunk_tokens = min(chunk_tokens, mixed_chunk_tokens or chunk_tokens)
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []  # by age
        self.preemptions = self.hit_tokens = 0
        self._free_slots = list(range(max_batch - 1, -1, -1))
        self._unread = 0  # active sequences whose prompts have not been read to the end
        self._has_read = False  # this step reads a chunk of prompts
        self._running: list[Sequence] = []  # sequences that decode, by age
        self._decoding: Decoding | None = None  # of `_running`; None: it has changed
        self._changes = Changes({}, [])

    def check(self, name: str, sequence: Sequence) -> None:
        """ValueError for a sequence that could not run even alone. `name`: the prompt's, for the message."""
        if (needed := self._most_pages(sequence)) > self.pool.capacity:
            raise ValueError(
                f"{name} of {len(sequence.prompt)} tokens and an answer of up to {sequence.budget} need {needed} KV pages "
                f"of {self.pool.page_size} tokens, and there are {self.pool.capacity}; lower max_tokens, shorten the prompt, "
                f"or raise pages= (where it is not given, memory_fraction=)"
            )

    def _most_pages(self, sequence: Sequence) -> int:
        """Pages without which a sequence does not come to its end."""
        # Drafts of this step and of the one in flight lie between the window and the last token.
        return self.pool.needed_at_once(sequence.last + 1, 1 + 2 * self.most_drafts)

    def submit(self, sequence: Sequence) -> None:
        sequence.late = any(other.running for other in self.active)
        self.waiting.append(sequence)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.active

    @property
    def has_prompts(self) -> bool:
        """True if some prompt has not been read to its end."""
        return bool(self.waiting or self._unread)

    @property
    def running(self) -> int:
        """Number of sequences that decode."""
        return len(self._running)

    def mean_context(self) -> float:
        """Mean number of cached tokens of the sequences that decode."""
        return sum(sequence.cached for sequence in self._running) / max(1, len(self._running))

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or is cancelled, waiting or not; its pages are free at once."""
        sequence.done = True
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def next_chunk(self) -> list[SequenceRange]:
        """Choose the prompt tokens of this step, oldest sequence first."""
        self._has_read = False
        if not self.has_prompts:
            return []
        ranges: list[SequenceRange] = []
        left = self._limit()
        for sequence in self.active:
            if left and not sequence.running:
                left -= self._read(sequence, left, ranges)
        self._admit_waiting(left, ranges)
        for part in ranges:
            self._publish(part.sequence)
            self._save(part)
        self._has_read = bool(ranges)
        return ranges

    def _admit_waiting(self, left: int, ranges: list[SequenceRange]) -> None:
        """Admit waiting sequences while slots and pages allow, and add ranges of up to `left` tokens."""
        filling = self._being_filled(ranges)
        growing = sum(map(self._may_grow, self.active)) if left and self.waiting and self._free_slots else 0
        while left and self.waiting and self._free_slots:
            sequence = self.waiting[0]
            findable = 0 if sequence.reads_all else (sequence.to_read - 1) // self.pool.page_size
            digests = self._digests(sequence, findable)
            shared = self._found(digests)
            if self._is_coming(digests[len(shared) :], filling):
                break
            own = self._own_pages(sequence, shared)
            # One page more per sequence that may grow: otherwise this one could be preempted as soon as it has been read.
            if own + growing > self.pool.free_without(shared):
                break
            self.waiting.popleft()
            self._admit(sequence, shared, own)
            left -= self._read(sequence, left, ranges)
            growing += self._may_grow(sequence)
            filling |= self._being_filled(ranges[-1:])

    def _found(self, digests: list[bytes]) -> list[int]:
        """Pages in the cache with which a sequence of these digests begins, as PagePool.find has them."""
        shared = self.pool.find(digests)
        return shared if self.snapshots is None else shared[: self.snapshots.longest(digests[: len(shared)])]

    def _is_coming(self, digests: list[bytes], filling: set[bytes]) -> bool:
        """True if a prompt that is being read will cache these digests, with which a sequence goes on."""
        if self.snapshots is None:
            return bool(digests) and digests[0] in filling
        ends = {digest for one in self.active if not one.running for digest in self._due(one).values()}
        return not ends.isdisjoint(digests)

    def _due(self, sequence: Sequence) -> dict[int, bytes]:
        """Digests of the snapshots that a sequence's prompt is to leave from now on, by number of tokens."""
        size = self.pool.page_size
        digests = self._digests(sequence, (sequence.to_read - 1) // size)
        ends = {pages * size: digests[pages - 1] for pages in self.snapshots.due(len(digests))}
        return {end: digest for end, digest in ends.items() if end >= sequence.cached and digest not in self.snapshots}

    def _save(self, part: SequenceRange) -> None:
        """Take a snapshot after a chunk that ends where one is due."""
        if self.snapshots is not None and not part.last:
            end = part.start + part.length
            if (digest := self._due(part.sequence).get(end)) is not None:
                self.snapshots.save(digest, part.sequence.slot)

    def _may_grow(self, sequence: Sequence) -> bool:
        return sequence.held < self._most_pages(sequence)

    def _limit(self) -> int:
        """Number of prompt tokens that this step may read, by the first of the prompts."""
        unread = self._first_unread
        decoding = any(sequence.launched < sequence.budget for sequence in self._running)
        return self.mixed_chunk_tokens if decoding and unread is not None and unread.late else self.chunk_tokens

    @property
    def _first_unread(self) -> Sequence | None:
        """The first sequence whose prompt has not been read to its end, active or waiting."""
        return next((sequence for sequence in chain(self.active, self.waiting) if not sequence.running), None)

    @property
    def _reads_on(self) -> bool:
        """True if decoding waits for more prompts of the call that all sequences come from.

        Prompts for which there is no room are not read in the next step, which then decodes.
        """
        unread = self._first_unread if self._has_read else None
        return unread is not None and not unread.late and all(one.together for one in (unread, *self._running))

    def _own_pages(self, sequence: Sequence, shared: list[int]) -> int:
        """Number of pages that a sequence is admitted with, beside its shared pages.

        With windows, the pages of a chunk, which each chunk takes anew. In a pool that has fewer, chunks are shorter.
        """
        at_once = self.pool.needed_at_once(sequence.to_read, self.chunk_tokens)
        held = len(shared) - self.pool.first_needed(len(shared) * self.pool.page_size)
        return min(self.pool.needed(sequence.to_read) - len(shared), min(at_once, self.pool.capacity) - held)

    def _admit(self, sequence: Sequence, shared: list[int], own: int) -> None:
        sequence.released = self.pool.first_needed(len(shared) * self.pool.page_size)
        self.pool.share(shared[sequence.released :])
        sequence.slot, sequence.pages = self._free_slots.pop(), shared + self.pool.take(own)
        sequence.cached, sequence.published = len(shared) * self.pool.page_size, len(shared)
        if sequence.hit_tokens is None:
            sequence.hit_tokens = sequence.cached
            self.hit_tokens += sequence.hit_tokens
            if self.prefix_caching:
                logger.debug(
                    "request %d: %d of %d tokens are in the prefix cache",
                    sequence.number, sequence.hit_tokens, sequence.to_read,
                )  # fmt: skip
        if self.snapshots is not None and shared:
            self.snapshots.use(sequence.digests[len(shared) - 1], sequence.slot)
        self.active.append(sequence)
        self._unread += 1

    def _read(self, sequence: Sequence, limit: int, ranges: list[SequenceRange]) -> int:
        """Add a range of at most `limit` tokens; returns how many fewer the next sequences may read.

        With windows pages may be missing, since older sequences share or have taken them. Then it reads what it has pages for,
        if anything, and no further prompt is begun. It is the youngest, so older sequences end, or preempt it.
        """
        start, page_size = sequence.cached, self.pool.page_size
        self._release(sequence, start)
        wanted = min(limit, sequence.to_read - start)
        if self.snapshots is not None:
            wanted = min([wanted, *(end - start for end in self._due(sequence) if end > start)])
        if (missing := self.pool.needed(start + wanted) - len(sequence.pages)) > 0:
            sequence.pages = sequence.pages + self.pool.take(min(missing, self.pool.free))
        length = min(wanted, len(sequence.pages) * page_size - start)
        sequence.cached += length
        last = sequence.cached == sequence.to_read
        if length > 0:
            ranges.append(SequenceRange(sequence, start, length, last))
        if last:
            sequence.launched += 1
            sequence.running = True
            self._unread -= 1
            if sequence.launched < sequence.budget:
                self._running.append(sequence)
                self._decoding, self._changes.slots[sequence.slot] = None, sequence
        return length if length == wanted else limit

    def _digests(self, sequence: Sequence, pages: int) -> list[bytes]:
        """Digests of a sequence's first `pages` pages, which are full; none without prefix caching."""
        if not self.prefix_caching:
            return []
        digests, size = sequence.digests, self.pool.page_size
        if len(digests) < pages:
            tokens = sequence.prompt + sequence.tokens
            for start in range(len(digests) * size, pages * size, size):
                before = digests[-1] if digests else first_digest(sequence.params.cache_salt, sequence.params.lora)
                digests.append(digest_of(before, tokens[start : start + size]))
        return digests[:pages]

    def _being_filled(self, ranges: list[SequenceRange]) -> set[bytes]:
        """Digests of the pages that these ranges fill."""
        return {digest for part in ranges for digest in self._full(part.sequence)[part.sequence.published :]}

    def _full(self, sequence: Sequence) -> list[bytes]:
        """Digests of the pages that are full of tokens that the host knows."""
        known = min(sequence.cached, len(sequence.prompt) + len(sequence.tokens))
        return self._digests(sequence, known // self.pool.page_size)

    def _publish(self, sequence: Sequence) -> None:
        """Let later requests find the full pages of a sequence."""
        digests = self._full(sequence)
        for index in range(max(sequence.published, sequence.released), len(digests)):
            self.pool.publish(sequence.pages[index], digests[index])
        sequence.published = len(digests)

    def _release(self, sequence: Sequence, tokens: int) -> None:
        """Give back the pages that no token after the first `tokens` attends to."""
        if (first := self.pool.first_needed(tokens)) > sequence.released:
            self._publish(sequence)
            self.pool.give_back(sequence.pages[sequence.released : first])
            sequence.pages = [0] * first + sequence.pages[first:]
            if sequence.running:
                self._changes.new_pages.extend((sequence.slot, index, 0) for index in range(sequence.released, first))
            sequence.released = first

    def next_decode(self, drafts: int = 0) -> Decoding | None:
        """Choose the sequences that decode one token, oldest first, and allocate their pages.

        With drafts a step may give as many more tokens: it gets pages for them, and `verified` tells how many there were.
        Preempts the youngest if needed. None: no page is free, and the youngest sequence has tokens in flight: collect
        these, then call again.
        """
        if self._reads_on:
            return Decoding([])
        for sequence in [one for one in self._running if one.launched >= one.budget]:
            self._stop(sequence)
        size = self.pool.page_size

        def reached(sequence: Sequence) -> int:
            """Tokens that the step may cache, and the ones before them."""
            return min(sequence.cached + sequence.ahead + drafts, sequence.last) + 1

        for sequence in [one for one in self._running if one.cached + one.ahead + drafts >= len(one.pages) * size]:
            if sequence.slot is not None:  # None: an older one has preempted it
                self._release(sequence, sequence.cached)
            while sequence.slot is not None and len(sequence.pages) < self.pool.needed(reached(sequence)):
                if self.pool.free:
                    [page] = self.pool.take(1)
                    self._changes.new_pages.append((sequence.slot, len(sequence.pages), page))
                    sequence.pages.append(page)
                    continue
                youngest = self.active[-1]
                if youngest.in_flight:
                    return None
                logger.info("request %d waits again: no page of the KV cache is free", youngest.number)
                self._preempt(youngest)
        for sequence in self._running:
            sequence.cached += 1
            sequence.launched += 1
            sequence.ahead += drafts
        self._full_now = [one for one in self._running if one.cached % size == 0 and self._keeps_states(one)]
        return self.decoding

    def _keeps_states(self, sequence: Sequence) -> bool:
        """True if the states after a decode step are kept: not with drafts, which the host does not know yet."""
        if self.snapshots is None or self.most_drafts:
            return False
        place = self.snapshots.reserve() if sequence.snapshot is None else sequence.snapshot[0]
        sequence.snapshot = None if place is None else (place, sequence.cached // self.pool.page_size)
        return place is not None

    def kept_states(self) -> dict[int, int]:
        """By place, the batch slot whose states go there after the step that `next_decode` has returned."""
        kept, self._full_now = {one.snapshot[0]: one.slot for one in self._full_now if one.snapshot is not None}, []
        return kept

    def _leave_snapshot(self, sequence: Sequence) -> None:
        """Make a snapshot of the states that a sequence has kept, if the host knows all tokens before."""
        if sequence.snapshot is not None:
            (place, pages), sequence.snapshot = sequence.snapshot, None
            digests = [] if sequence.corrupt else self._full(sequence)
            self.snapshots.release(place, digests[pages - 1] if pages <= len(digests) else None)

    def verified(self, sequences: Iterable[Sequence], counts: Iterable[int], drafts: int) -> None:
        """Take note of the numbers of tokens that a step with drafts has given sequences."""
        for sequence, tokens in zip(sequences, counts, strict=True):
            if not sequence.done:
                sequence.cached += tokens - 1
                sequence.launched += tokens - 1
                sequence.ahead -= drafts

    @property
    def decoding(self) -> Decoding:
        """Sequences of the step that `next_decode` has returned, in their slots now."""
        if self._decoding is None:
            self._decoding = Decoding(self._running.copy())
        return self._decoding

    def changes(self) -> Changes:
        """Changes of batch slots since the last call, for the step that `next_decode` has returned."""
        (slots, new_pages), self._changes = self._changes, Changes({}, [])
        return Changes(slots, [one for one in new_pages if one[0] not in slots])

    def _stop(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._decoding, self._changes.slots[sequence.slot] = None, None

    def restart(self) -> None:
        """Make all sequences wait again; they continue after the tokens that the host knows."""
        for sequence in reversed(self.active.copy()):
            sequence.launched, sequence.ahead = len(sequence.tokens), 0
            self._preempt(sequence)
        self.pool.unpublish()
        if self.snapshots is not None:
            self.snapshots.clear()

    def compact(self) -> list[tuple[int, int]]:
        """Move sequences to lower free slots, for a smaller bucket. Returns pairs (from, to)."""
        moves = []
        for sequence in sorted(self.active, key=lambda s: -s.slot):
            lowest = self._free_slots[-1] if self._free_slots else sequence.slot
            if lowest >= sequence.slot:
                break
            moves.append((sequence.slot, lowest))
            self._free_slots.pop()
            self._release_slot(sequence.slot)
            if sequence in self._running:
                self._changes.slots.update({sequence.slot: None, lowest: sequence})
            sequence.slot = lowest
        self._decoding = None
        return moves

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._vacate(sequence)
        sequence.cached, sequence.running = 0, False
        self.waiting.appendleft(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.corrupt:
            self.pool.withdraw(sequence.pages)
            if self.snapshots is not None:
                self.snapshots.withdraw(sequence.digests)
        else:
            self._publish(sequence)
        self._leave_snapshot(sequence)
        self._stop(sequence)
        self._unread -= not sequence.running
        self.pool.give_back(sequence.pages[sequence.released :])
        sequence.pages, sequence.released = [], 0
        self.active.remove(sequence)
        self._release_slot(sequence.slot)
        sequence.slot = None

    def _release_slot(self, slot: int) -> None:
        self._free_slots.append(slot)
        self._free_slots.sort(reverse=True)

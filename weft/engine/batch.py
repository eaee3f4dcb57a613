"""Continuous batch: launches what the scheduler decides, and collects tokens a step later."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.engine.config import EngineConfig
from weft.engine.kv_cache import Decoding, PagePool, Sequence, SequenceRange
from weft.engine.params import Kind
from weft.engine.prefill import PrefillChunk
from weft.engine.runner import Runner
from weft.engine.scheduler import Scheduler
from weft.engine.slots import Entry, SlotState
from weft.engine.snapshots import Snapshots
from weft.engine.speculation.drafting import DraftLength, Speculation, StepTimes
from weft.text.grammars import Guide


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Host memory for the tokens of a pass, pinned on GPUs, and the event after their copy.

    logprobs  for rows of weft.engine.sampling, once a sequence asks for them
    """

    tokens: torch.Tensor
    copied: torch.cuda.Event | None
    logprobs: torch.Tensor | None = None


class PendingTokens(NamedTuple):
    """Tokens of the sequences of `decoding`, in its slots, while they are copied to the host.

    scored  log-probabilities are copied too
    drafts  of each sequence, in a step by weft.engine.speculation.verify; None: a token each
    """

    buffer: HostBuffer
    decoding: Decoding
    scored: bool
    drafts: int | None


class Arrival(NamedTuple):
    """Tokens of a pass that the host has, one per sequence; with drafts several, which follow each other.

    logprobs  a row per token, if a sequence asks for log-probabilities
    """

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[list[float]] | None


class Batch:
    """Scheduled sequences on a runner.

    Collective: every rank makes the same calls, and gets the same tokens. On GPUs the host runs one step ahead: it launches
    the next step before it waits for the tokens of this one. It waits for the first tokens of an answer at once, while the
    GPU runs the decode step that follows, unless more prompts are to be read, which takes the host longer. The tokens of a
    step in flight over stages reach all stages within the next step, or by `settle`.
    """

    def __init__(self, runner: Runner, config: EngineConfig, times: StepTimes | None = None) -> None:
        """`times`: of the runner's buckets, by which draft lengths are chosen; None: as of DraftLength."""
        self.runner, self.team = runner, runner.pipeline.team
        # The whole model's window: all stages of a pipeline have the same pages.
        window = runner.pipeline.model.config.attention.longest_window
        pool = PagePool(runner.cache.pages, runner.entry_tokens, window)
        self.scheduler = Scheduler(
            pool,
            config.max_batch,
            config.chunk_tokens,
            mixed_chunk_tokens=config.mixed_chunk_tokens,
            # Without snapshots a prefix in the cache has keys and values, and no state.
            prefix_caching=config.prefix_caching and (runner.snapshots > 0 or not runner.pipeline.model.has_states),
            most_drafts=0 if config.speculative is None else config.speculative.num_speculative_tokens,
            snapshots=Snapshots(runner.snapshots, runner.entry_tokens, config.state_snapshot_tokens)
            if runner.snapshots > 0
            else None,
        )
        self.draft_length = None if config.speculative is None else DraftLength(config.speculative, times)
        self._drafting: dict[int, Sequence] = {}  # sequences that the drafter has, by slot
        # Steps by which tokens reach the host late. Over stages on virtual ranks too: a step in flight has no tokens yet.
        self._steps_late = 1 if self.team.device.type == "cuda" or runner.pipeline.stages > 1 else 0
        self._pending: deque[list[PendingTokens]] = deque()
        self._flying: Decoding | None = None  # decode step in flight
        # Buffers whose tokens have been read, of a token each and of several.
        self._buffers: dict[bool, list[HostBuffer]] = {False: [], True: []}

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle or bool(self._pending) or self._flying is not None

    @property
    def speculation(self) -> Speculation | None:
        """Counts since the start; None: without speculation."""
        return None if self.draft_length is None else self.draft_length.counts

    def advance(self) -> list[Arrival]:
        """Launch a chunk of the waiting prompts, then a decode step.

        Returns the tokens that have arrived, in order. Before the next step the caller appends each token to its sequence,
        or calls `scheduler.finish`. A sequence that has ended may get one more token, which the caller drops. After an
        error, call `restart`.
        """
        ranges = self.scheduler.next_chunk()
        first = self._read(ranges) if ranges else []
        drafts = 0
        if self.draft_length is not None and self.scheduler.running > 0:
            drafts = self.draft_length.choose(
                self.runner.buckets.of(self.scheduler.running), self.scheduler.mean_context
            )
        decoding = self.scheduler.next_decode(drafts)
        if decoding is None or not decoding.sequences:
            self.settle()
        if decoding is None:  # out of pages: the tokens in flight decide what is preempted
            self._pending.append(first)
            return self._collect(0)
        arrived: list[Arrival] = []
        if decoding.sequences and Kind.GUIDED in decoding.kind:
            self._pending.append(first)
            first = []
        decoded = self._decode(decoding, bool(ranges), arrived, drafts) if decoding.sequences else []
        at_once = first and decoded and not self.scheduler.has_prompts
        launched = [first, decoded] if at_once else [first + decoded]
        self._pending += [tokens for tokens in launched if tokens]
        return arrived + self._collect(self._steps_late if first or decoded else 0)

    def _read(self, ranges: list[SequenceRange]) -> list[PendingTokens]:
        """Read chunks of prompts. Returns the first tokens of the prompts that end."""
        self.settle()
        copies = None if self.scheduler.snapshots is None else self.scheduler.snapshots.take_copies()
        self.runner.prefill([_chunk(part) for part in ranges], copies)
        for part in ranges:
            if (vector := self.runner.prompts.pooled.get(part.sequence.slot)) is not None:
                if part.start == 0:  # of a sequence that was preempted
                    part.sequence.pooled.clear()
                part.sequence.pooled.append(_host_memory_like(vector).copy_(vector, non_blocking=True))
            if (rows := self.runner.prompts.logprobs.get(part.sequence.slot)) is not None:
                part.sequence.prompt_logprobs.append(_host_memory_like(rows).copy_(rows, non_blocking=True))
        return self._copy_to_host(Decoding([part.sequence for part in ranges if part.last]))

    def _decode(self, decoding: Decoding, reads: bool, arrived: list[Arrival], drafts: int) -> list[PendingTokens]:
        """Launch a decode step. Returns its tokens, unless it stays in flight.

        reads    this step reads prompts too
        arrived  gets the tokens of all steps before, with grammars, and where slots move beside steps with drafts
        drafts   of each sequence
        """
        decoding = self._assign_slots(decoding, arrived)

        def compute_masks() -> None:
            # Masks depend on all tokens before. The GPU runs the forward pass while the host waits and computes them.
            arrived.extend(self._collect(0))
            if self.draft_length is not None:
                self._allow_drafts(decoding, drafts)
            elif self.runner.pipeline.is_last:
                self.runner.adjustments.allow({slot: guide.mask() for slot, guide in _guides_of(decoding)})

        between = compute_masks if Kind.GUIDED in decoding.kind else None
        entries = None
        if self.runner.pipeline.stages > 1 and not reads and not self.scheduler.has_prompts:
            entries = sum(sequence.held for sequence in decoding.sequences)
        self.runner.decode(decoding.size, decoding.kind, between, entries=entries, arrived=self._arrived, drafts=drafts)
        if kept := self.scheduler.kept_states():
            self.runner.keep_states(kept)
        if self.runner.in_flight:
            self._flying = decoding
            return []
        return self._copy_to_host(decoding, None if self.draft_length is None else drafts)

    def settle(self) -> None:
        """End a decode step in flight over stages; its tokens arrive with the next `advance`. Collective."""
        self.runner.settle(self._arrived)

    def _arrived(self) -> None:
        """Start to copy the tokens of the step in flight, which have all reached this stage, to the host."""
        self._pending.append(self._copy_to_host(self._flying))
        self._flying = None

    def restart(self) -> None:
        """Discard the tokens in flight after a failed step, and schedule their sequences again."""
        self._pending.clear()
        self._flying = None
        self.runner.settle()
        self.scheduler.restart()
        for sequence in self.scheduler.waiting:
            if not sequence.tokens:
                sequence.prompt_logprobs.clear()
            if (guide := _guide_of(sequence)) is not None:
                guide.begin_again(sequence.tokens)
        self.runner.slots.forget()
        self._drafting.clear()

    def _assign_slots(self, decoding: Decoding, arrived: list[Arrival]) -> Decoding:
        """Tell the device what has changed since the step before. Returns the sequences in their slots."""
        if self.runner.buckets.of(len(self.scheduler.active)) < self.runner.buckets.of(decoding.size):
            self.settle()
            if self.draft_length is not None:  # the positions that slots are filled with depend on them
                arrived.extend(self._collect(0))
            moves = self.scheduler.compact()
            self.runner.move(moves)
            for source, target in moves:
                if (moved := self._drafting.pop(source, None)) is not None:
                    self._drafting[target] = moved
            decoding = self.scheduler.decoding
        changes = self.scheduler.changes()
        if self.draft_length is not None:
            self._tell_drafter(changes.slots)
        states = {slot: None if one is None else _state_of(one) for slot, one in changes.slots.items()}
        self.runner.slots.send(states, changes.new_pages)
        return decoding

    def _allow_drafts(self, decoding: Decoding, drafts: int) -> None:
        """Compute the masks before and after each draft, which the host waits for."""
        proposed = self.runner.verifying.drafts[: decoding.size, :drafts].tolist()
        masks = {slot: guide.masks(proposed[slot]) for slot, guide in _guides_of(decoding)}
        self.runner.verifying.allow(masks)

    def _tell_drafter(self, changed: Mapping[int, Sequence | None]) -> None:
        """Give the drafter the tokens of the sequences that begin to decode."""
        for slot, sequence in changed.items():
            if sequence is not self._drafting.get(slot) and sequence is not None:
                self.runner.verifying.drafter.enter(slot, sequence.prompt + sequence.tokens)
            self._drafting[slot] = sequence

    def _copy_to_host(self, decoding: Decoding, drafts: int | None = None) -> list[PendingTokens]:
        """Start to copy the newest tokens of these sequences to the host; `drafts` as of PendingTokens."""
        if not decoding.sequences:
            return []
        runner, scored, several = self.runner, Kind.LOGPROBS in decoding.kind, drafts is not None
        tokens = runner.verifying.results if several else runner.decoding.tokens
        logprobs = runner.verifying.logprobs if several else runner.decoding.logprobs
        buffers = self._buffers[several]
        buffer = buffers.pop() if buffers else self._new_buffer(tokens)
        buffer.tokens[: decoding.size].copy_(tokens[: decoding.size], non_blocking=True)
        if scored:
            if buffer.logprobs is None:
                buffer.logprobs = _host_memory_like(logprobs)
            buffer.logprobs[: decoding.size].copy_(logprobs[: decoding.size], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        return [PendingTokens(buffer, decoding, scored, drafts)]

    def _new_buffer(self, tokens: torch.Tensor) -> HostBuffer:
        on_gpu = self.team.device.type == "cuda"
        return HostBuffer(_host_memory_like(tokens), torch.cuda.Event() if on_gpu else None)

    def _collect(self, later: int) -> list[Arrival]:
        """Wait for the tokens of all steps in flight except the last `later`."""
        arrived = []
        while len(self._pending) > later:
            arrived += map(self._wait_for, self._pending.popleft())
        return arrived

    def _wait_for(self, pending: PendingTokens) -> Arrival:
        buffer, decoding, rows = pending.buffer, pending.decoding, None
        if buffer.copied is not None:
            try:
                buffer.copied.synchronize()
            except RuntimeError:
                self.team.synchronize()  # names the wait that gave up, where that is why
                raise
        by_slot = buffer.tokens[: decoding.size].tolist()
        tokens = [by_slot[slot] for slot in decoding.slots]
        if pending.scored:
            by_slot = buffer.logprobs[: decoding.size].tolist()
            rows = [by_slot[slot] for slot in decoding.slots]
        self._buffers[pending.drafts is not None].append(buffer)
        if pending.drafts is not None:
            return self._verified(pending, tokens, rows)
        if Kind.GUIDED in decoding.kind:
            token_of = dict(zip(decoding.slots, tokens, strict=True))
            for slot, guide in _guides_of(decoding):
                guide.take(token_of[slot])
        return Arrival(decoding.sequences, tokens, rows)

    def _verified(
        self, pending: PendingTokens, results: list[list[int]], rows: list[list[list[float]]] | None
    ) -> Arrival:
        """Tokens of a step with drafts, from rows of VerifyGraph.results."""
        counts, drafted = ([result[place] for result in results] for place in (-2, -1))
        self.draft_length.note(pending.drafts, drafted, counts)
        self.scheduler.verified(pending.decoding.sequences, counts, pending.drafts)
        sequences, tokens = [], []
        for sequence, result, count in zip(pending.decoding.sequences, results, counts, strict=True):
            if count == 1:  # no draft was accepted
                sequences.append(sequence)
                tokens.append(result[0])
            else:
                sequences += [sequence] * count
                tokens += result[:count]
        if Kind.GUIDED in pending.decoding.kind:
            result_of = dict(zip(pending.decoding.slots, zip(results, counts, strict=True), strict=True))
            for slot, guide in _guides_of(pending.decoding):
                result, count = result_of[slot]
                for token in result[:count]:
                    guide.take(token)
        if rows is not None:
            rows = [row for of_slot, count in zip(rows, counts, strict=True) for row in of_slot[:count]]
        return Arrival(sequences, tokens, rows)


def _host_memory_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for asynchronous copies of `x` to the host."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")


def _state_of(sequence: Sequence) -> SlotState:
    return SlotState(
        position=sequence.cached - 1,
        pages=sequence.pages,
        params=sequence.params,
        last=sequence.last,
        adapter=sequence.adapter,
    )


def _guide_of(sequence: Sequence) -> Guide | None:
    return None if sequence.adjusted is None else sequence.adjusted.guide


def _guides_of(decoding: Decoding) -> list[tuple[int, Guide]]:
    """(slot, guide) of the sequences that have grammars."""
    pairs = zip(decoding.slots, map(_guide_of, decoding.sequences), strict=True)
    return [(slot, guide) for slot, guide in pairs if guide is not None]


def _chunk(part: SequenceRange) -> PrefillChunk:
    sequence = part.sequence
    tokens = sequence.prompt + sequence.tokens
    entry = None
    if part.last and sequence.adjusted is not None:
        entry = Entry(adjusted=sequence.adjusted, prompt=sequence.prompt, answer=sequence.tokens)
    return PrefillChunk(
        slot=sequence.slot,
        tokens=tokens[part.start : part.start + part.length],
        before=part.start,
        pages=sequence.pages,
        params=sequence.params,
        choose=part.last,
        targets=_targets(part),
        pooling=_pooling(part),
        entry=entry,
        following=None if part.last else tokens[part.start + part.length],
        adapter=sequence.adapter,
    )


def _pooling(part: SequenceRange) -> str | None:
    """How this range counts in the vector of its prompt; None: not at all."""
    pooling = part.sequence.params.pooling
    return None if part.sequence.tokens or (pooling == "last" and not part.last) else pooling


def _targets(part: SequenceRange) -> list[int]:
    """Prompt tokens whose log-probabilities this range gives; after a preemption only the missing ones."""
    sequence = part.sequence
    if sequence.params.prompt_logprobs is None:
        return []
    known = sum(map(len, sequence.prompt_logprobs))
    return sequence.prompt[1 + max(part.start, known) : 1 + part.start + part.length]

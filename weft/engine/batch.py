"""Continuous batch: launches what the scheduler decides, and collects tokens a step later."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from weft.engine.adjustments import Entry
from weft.engine.config import EngineConfig
from weft.engine.guided import Guide
from weft.engine.kv_cache import PagePool
from weft.engine.prefill import PrefillChunk
from weft.engine.runner import Runner, SlotState
from weft.engine.scheduler import Scheduler, Sequence, SequenceRange


class PendingTokens(NamedTuple):
    """Tokens of a step while they are copied to the host, with the (slot, sequence) pairs they belong to.

    logprobs  rows of weft.engine.logprobs, if a sequence asks for them
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    copied: torch.cuda.Event | None
    slots: list[tuple[int, Sequence]]


class Arrival(NamedTuple):
    """Token of a sequence that the host has, with its row of log-probabilities if its step has them."""

    sequence: Sequence
    token: int
    logprobs: list[float] | None


class Batch:
    """Scheduled sequences on a runner.

    Collective: every rank makes the same calls, and gets the same tokens. On GPUs the host runs one step ahead: it launches
    the next step before it waits for the tokens of this one. It waits for the first tokens of an answer at once, unless
    more prompts are to be read, which takes the host longer; meanwhile the GPU runs the decode step behind them.
    """

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.runner, self.team = runner, runner.team
        # Of the whole model: all stages of a pipeline have the same pages.
        window = runner.model.config.attention.longest_window
        pool = PagePool(runner.cache.pages, runner.entry_tokens, window)
        self.scheduler = Scheduler(
            pool,
            runner.max_batch,
            config.chunk_tokens,
            mixed_chunk_tokens=config.mixed_chunk_tokens,
            prefix_caching=config.prefix_caching,
        )
        self._steps_behind = 1 if self.team.device.type == "cuda" else 0
        self._pending: deque[list[PendingTokens]] = deque()

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle or bool(self._pending)

    def step(self) -> list[Arrival]:
        """Launch a chunk of the waiting prompts, then a decode step.

        Returns the tokens that have arrived, in order. Before the next step the caller appends each
        token to its sequence, or calls `scheduler.finish`. A sequence that has ended may get one more token, which the
        caller drops. After an error, call `restart`.
        """
        first: list[PendingTokens] = []
        arrived: list[Arrival] = []
        ranges = self.scheduler.next_chunk()
        if ranges:
            self.runner.prefill([_chunk(part) for part in ranges])
            for part in ranges:
                if (rows := self.runner.prompt_logprobs.get(part.sequence.slot)) is not None:
                    part.sequence.prompt_logprobs.append(self._to_host(rows))
            first = self._copy_to_host([part.sequence for part in ranges if part.last])
        decoding = self.scheduler.next_decode()
        if decoding is None:  # out of pages: the tokens in flight decide what is preempted
            self._pending.append(first)
            return self._collect(0)
        next_ones: list[PendingTokens] = []
        if decoding:
            self._assign_slots(decoding)
            if guided := {s.slot: guide for s in decoding if (guide := _guide_of(s)) is not None}:
                # Masks depend on all tokens before. The GPU runs the forward pass while the host waits and computes them.
                self._pending.append(first)
                first = []

                def between() -> None:
                    arrived.extend(self._collect(0))
                    if self.runner.pipeline.is_last:
                        self.runner.adjustments.allow({slot: guide.mask() for slot, guide in guided.items()})

                self.runner.decode(between)
            else:
                self.runner.decode()
            next_ones = self._copy_to_host(decoding)
        at_once = first and next_ones and not self.scheduler.has_prompts
        launched = [first, next_ones] if at_once else [first + next_ones]
        self._pending += [tokens for tokens in launched if tokens]
        return arrived + self._collect(self._steps_behind if first or next_ones else 0)

    def restart(self) -> None:
        """Recover from a failed step: discard the tokens in flight and schedule them again."""
        self._pending.clear()
        self.scheduler.restart()
        for sequence in self.scheduler.waiting:
            if not sequence.tokens:
                sequence.prompt_logprobs.clear()
            if (guide := _guide_of(sequence)) is not None:
                guide.begin_again(sequence.tokens)
        self.runner.forget_slots()

    def _assign_slots(self, sequences: list[Sequence]) -> None:
        highest = max(sequence.slot for sequence in sequences) + 1
        if self.runner.bucket(len(self.scheduler.active)) < self.runner.bucket(highest):
            self.runner.move(self.scheduler.compact())
        self.runner.assign_slots(
            {s.slot: SlotState(position=s.cached - 1, pages=s.pages, params=s.params) for s in sequences}
        )

    def _copy_to_host(self, sequences: list[Sequence]) -> list[PendingTokens]:
        """Start to copy the newest tokens of these sequences to the host."""
        if not sequences:
            return []
        count, logprobs = max(sequence.slot for sequence in sequences) + 1, None
        tokens = self._to_host(self.runner.tokens[:count])
        if any(sequence.params.logprobs is not None for sequence in sequences):
            logprobs = self._to_host(self.runner.logprobs[:count])
        copied = None
        if self.team.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return [PendingTokens(tokens, logprobs, copied, [(sequence.slot, sequence) for sequence in sequences])]

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        """Copy asynchronously; the tokens that are copied next arrive later."""
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
        return there.copy_(x, non_blocking=True)

    def _collect(self, later: int) -> list[Arrival]:
        """Wait for the tokens of all steps in flight except the last `later`."""
        arrived = []
        while len(self._pending) > later:
            for pending in self._pending.popleft():
                arrived += self._wait_for(pending)
        return arrived

    def _wait_for(self, pending: PendingTokens) -> list[Arrival]:
        if pending.copied is not None:
            try:
                pending.copied.synchronize()
            except RuntimeError:
                self.team.synchronize()  # names the wait that gave up, where that is why
                raise
        tokens = pending.tokens.tolist()
        rows = pending.logprobs.tolist() if pending.logprobs is not None else [None] * len(tokens)
        for slot, sequence in pending.slots:
            if (guide := _guide_of(sequence)) is not None:
                guide.take(tokens[slot])
        return [Arrival(sequence, tokens[slot], rows[slot]) for slot, sequence in pending.slots]


def _guide_of(sequence: Sequence) -> Guide | None:
    return None if sequence.adjusted is None else sequence.adjusted.guide


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
        entry=entry,
    )


def _targets(part: SequenceRange) -> list[int]:
    """Prompt tokens whose log-probabilities this range gives; after a preemption those that are missing."""
    sequence = part.sequence
    if sequence.params.prompt_logprobs is None:
        return []
    known = sum(map(len, sequence.prompt_logprobs))
    return sequence.prompt[1 + max(part.start, known) : 1 + part.start + part.length]

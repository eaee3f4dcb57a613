"""Prefill on static tensors, for CUDA graphs: its base, and new prompts padded to one of a few shapes.

A graph saves the host time of launching the kernels of small prompts. Other prompts: weft.engine.ragged_prefill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy
import torch

from weft.engine.adjustments import Adjustments, Entry
from weft.engine.logprobs import WIDTH
from weft.engine.params import Kind, SamplingParams
from weft.engine.pipeline import Pass, Pipeline
from weft.engine.sampling import Choice
from weft.models import Decoder
from weft.ops import SequenceRanges
from weft.parallel.context import GatheredLayout, SpreadPages
from weft.parallel.step import Chunk, PagedCache, Step, cells_of, runs
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import upload

SHORTEST = 16
# Up to this many tokens padding is free, since a pass takes as long as reading the weights.
FREE_TOKENS = 256
# Largest ratio of padded to real tokens above that.
SLACK = 1.25
# Bytes; kernels are compiled for pointers of this alignment.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens of one sequence, after `before` cached ones; `choose`: then its next token is chosen.

    entry    changes of logits that it asks for, if it does and a token is chosen
    targets  prompt tokens whose log-probabilities are asked for, each behind one of the chunk's last tokens; with `choose` none
             is behind the very last
    """

    slot: int
    tokens: list[int]
    before: int
    pages: list[int]
    params: SamplingParams
    choose: bool
    entry: Entry | None = None
    targets: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Metadata of a pass of T tokens of S sequences.

    Padding tokens have id 0, are not cached and attend to nothing; padding sequences have no tokens, and their choice is
    ignored.

    tokens, positions, cache_slots        [T] int64
    table                                 [S, max_pages] int32; over a spread cache of the gathered pages
    entries, gathered_slots               of SpreadPages, [0] without a spread cache
    spans, tiles                          of SequenceRanges
    rows                                  [S] int64: index of each sequence's last token
    lengths                               [S] int64: tokens including cached ones
    seed, temperature, top_p, top_k, min_p  [S]: sampling parameters
    batch_slots                           [S] int64: slots of the sequences, for their adjustments
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cache_slots: torch.Tensor
    table: torch.Tensor
    entries: torch.Tensor
    gathered_slots: torch.Tensor
    spans: torch.Tensor
    tiles: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    batch_slots: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size of one tensor that holds all fields, for one copy to the device."""
        return sum(cdiv(getattr(self, field.name).nbytes, ALIGNMENT) * ALIGNMENT for field in fields(self))

    def views(self, packed: torch.Tensor) -> Inputs:
        """Views of these shapes into `packed` [nbytes] uint8."""
        found, start = {}, 0
        for field in fields(self):
            like = getattr(self, field.name)
            found[field.name] = packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += cdiv(like.nbytes, ALIGNMENT) * ALIGNMENT
        return Inputs(**found)


class StaticPrefill(ABC):
    """Prefill of up to `batch` sequences, up to `tokens` tokens together, on static tensors.

    Call `load`, then `run`, which may be captured; `chosen` and `logprobs` hold the next tokens and theirs.

    max_pages  of a sequence
    entries    of page tables with cached tokens of all sequences, at most; those of a spread cache are gathered
    """

    runs: tuple[Chunk, ...] = ()  # of Step.chunks

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        tokens: int,
        batch: int,
        max_pages: int,
        entries: int = 0,
        *,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.model, self.cache, self.plan = model, cache, model.plan(tokens)
        self.pipeline = pipeline or Pipeline.whole(model)
        self._tokens, self._batch, self._max_pages, self._entries = tokens, batch, max_pages, entries
        device = model.team.device
        self.chosen = torch.zeros(batch, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(batch, WIDTH, dtype=torch.float32, device=device)
        # The fields of its sequence ranges that stay on the host hold for every batch.
        self._ranges = self._ranges_of([])
        like = self._inputs([])
        self._packed = torch.zeros(like.nbytes, dtype=torch.uint8, device=device)
        self._static = like.views(self._packed)

    def load(self, chunks: Sequence[PrefillChunk]) -> None:
        """Copy the batch's metadata to the device asynchronously."""
        inputs = self._inputs(chunks)
        packed = torch.empty(len(self._packed), dtype=torch.uint8)
        there = inputs.views(packed)
        for field in fields(Inputs):
            getattr(there, field.name).numpy()[...] = getattr(inputs, field.name).numpy()
        self._packed.copy_(upload(packed, self._packed.device))

    def run(self, kind: Kind, adjustments: Adjustments | None = None) -> None:
        """Write keys and values into the cache, and the token after each sequence into `chosen`."""
        now, fused, spread = self._static, self.plan.fused, None
        if self.model.context_parallel:
            spread = SpreadPages(
                team=self.model.team, entries=now.entries, slots=now.gathered_slots, pages=self._gathered_pages
            )
        step = Step(
            positions=now.positions,
            slots=now.cache_slots,
            cells=None if fused else cells_of(now.cache_slots, self.cache.page_size),
            pages=now.table,
            angles=self.model.angles,
            plan=self.plan,
            chunks=self.runs,
            spans=replace(self._ranges, spans=now.spans, tiles=now.tiles) if fused else None,
            spread=spread,
        )
        logits = self.pipeline.run(self.model, [Pass(now.tokens, step, now.rows)], self.cache)
        choice = Choice(
            temperature=now.temperature,
            top_p=now.top_p,
            top_k=now.top_k,
            min_p=now.min_p,
            seed=now.seed,
            position=now.lengths,
            adjustments=adjustments,
            rows=now.batch_slots,
        )
        chosen, logprobs = self.pipeline.choose(self.model, logits, choice, kind, fused=fused)
        self.chosen.copy_(chosen)
        if logprobs is not None:
            self.logprobs.copy_(logprobs)

    @abstractmethod
    def _starts(self, chunks: Sequence[PrefillChunk]) -> Iterable[int]:
        """Index of each chunk's first token in the pass."""

    @abstractmethod
    def _ranges_of(self, chunks: Sequence[PrefillChunk]) -> SequenceRanges:
        """Sequence ranges of these chunks in host memory."""

    def _inputs(self, chunks: Sequence[PrefillChunk]) -> Inputs:
        """Metadata of these chunks in host memory, by numpy: torch would start its threads for them."""
        size, table = self.cache.page_size, numpy.zeros((self._batch, self._max_pages), numpy.int32)
        team = self.model.team
        rank, world_size = (team.rank, team.size) if self.model.context_parallel else (0, 1)
        tokens, positions = numpy.zeros((2, self._tokens), numpy.int64)
        cache_slots, rows = numpy.full(self._tokens, -1, numpy.int64), []
        for row, chunk, start in zip(table, chunks, self._starts(chunks), strict=False):
            pages = numpy.array(chunk.pages[: self._max_pages], numpy.int64)
            row[: len(pages)] = pages
            at = numpy.arange(chunk.before, chunk.before + len(chunk.tokens))
            here = slice(start, start + len(at))
            slots = pages[at // (size * world_size)] * size + at % size
            cache_slots[here] = numpy.where(at // size % world_size == rank, slots, -1)
            tokens[here], positions[here] = chunk.tokens, at
            rows.append(start + len(at) - 1)
        entries = gathered_slots = numpy.zeros(0, numpy.int64)
        if self.model.context_parallel:
            table, entries, gathered_slots = self._gathered(chunks, table)
        params, ranges = [chunk.params for chunk in chunks], self._ranges_of(chunks)

        def padded(values: list[float], value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values + [value] * (self._batch - len(values)), dtype=dtype)

        return Inputs(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            cache_slots=torch.from_numpy(cache_slots),
            table=torch.from_numpy(table),
            entries=torch.from_numpy(entries),
            gathered_slots=torch.from_numpy(gathered_slots),
            spans=ranges.spans,
            tiles=ranges.tiles,
            rows=padded(rows, 0),
            lengths=padded([chunk.before + len(chunk.tokens) for chunk in chunks], 1),
            seed=padded([p.seed for p in params], 0),
            temperature=padded([p.temperature for p in params], 0.0, torch.float32),
            top_p=padded([p.top_p for p in params], 1.0, torch.float32),
            top_k=padded([p.top_k for p in params], 0),
            min_p=padded([p.min_p for p in params], 0.0, torch.float32),
            batch_slots=padded([chunk.slot for chunk in chunks], 0),
        )

    def _gathered(
        self, chunks: Sequence[PrefillChunk], table: numpy.ndarray
    ) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """(page table of the gathered pages, their entries, slots of the tokens in them) of a spread cache."""
        world_size, size = self.model.team.size, self.cache.page_size
        layout = GatheredLayout.make(
            [(chunk.before, len(chunk.tokens)) for chunk in chunks],
            size,
            world_size,
            window=self.model.window,
            entries=self._entries,
            tokens=self._tokens,
            starts=list(self._starts(chunks)),
            batch=self._batch,
        )
        self._gathered_pages = layout.pages
        pages = numpy.zeros((self._batch, self._max_pages * world_size), numpy.int32)
        pages[:, : layout.table.shape[1]] = layout.table
        entries = numpy.zeros(self._entries, numpy.int64)
        entries[: len(layout.rows)] = table[layout.rows, layout.columns]
        return pages, entries, layout.slots


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of prompts and tokens per prompt: powers of two."""

    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


def shape_of(chunks: Sequence[PrefillChunk]) -> Shape | None:
    """Shape that the chunks fit with little padding; None: there is none."""
    if any(chunk.before for chunk in chunks):
        return None
    batch = 1 << (len(chunks) - 1).bit_length()
    lengths = [len(chunk.tokens) for chunk in chunks]
    length = max(SHORTEST, 1 << (max(lengths) - 1).bit_length())
    fits = batch * length <= max(FREE_TOKENS, int(SLACK * sum(lengths)))
    return Shape(batch, length) if fits else None


def single_lengths(most: int) -> list[int]:
    """Lengths of the shapes that single new prompts of up to `most` tokens fit."""
    lengths = [SHORTEST]
    while lengths[-1] < most and 2 * lengths[-1] <= max(FREE_TOKENS, int(SLACK * most)):
        lengths.append(2 * lengths[-1])
    return lengths


class PaddedPrefill(StaticPrefill):
    """Prefill of `batch` new prompts of up to `length` tokens. A missing prompt is all padding.

    A prompt's padding follows it, where causal attention does not see it, and is not cached.
    """

    def __init__(
        self, model: Decoder, cache: PagedCache, batch: int, length: int, *, pipeline: Pipeline | None = None
    ) -> None:
        self._length, self._sequences = length, [(0, length)] * batch
        self.runs = runs(self._sequences)
        ranks = model.team.size if model.context_parallel else 1
        max_pages = cdiv(length, cache.page_size * ranks)
        super().__init__(model, cache, batch * length, batch, max_pages, pipeline=pipeline)

    def _starts(self, chunks: Sequence[PrefillChunk]) -> Iterable[int]:
        return range(0, len(chunks) * self._length, self._length)

    def _ranges_of(self, chunks: Sequence[PrefillChunk]) -> SequenceRanges:
        return SequenceRanges.make(self._sequences, self.model.group, self.model.dtype)

"""Prefill: chunks of prompts as they are, kernel by kernel, or on static tensors, for CUDA graphs.

A graph saves host time: to launch the kernels of small prompts may take longer than to run them
(benchmarks/lab/h200-x2-prompts.json: two H200s, 128 tokens, 90 ms, in a graph 12).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from weft.engine.params import Kind, SamplingParams, joint_kind
from weft.engine.pipeline import Pass, Pipeline
from weft.engine.sampling import WIDTH, Choice
from weft.engine.slots import Adjustments, Entry
from weft.models.decoder import Tap
from weft.ops import SequenceChunks, SequenceRanges
from weft.ops.linear_attention.sequence_chunks import CHUNK
from weft.parallel.context import GatheredLayout, SpreadPages
from weft.parallel.step import PagedCache, Step, cells_of, runs
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import to_device, upload

if TYPE_CHECKING:
    from weft.models import Decoder

# Bytes; kernels are compiled for pointers of this alignment.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens of one sequence, after `before` cached ones; `choose`: then its next token is chosen.

    entry    changes of logits that it asks for, if a token is chosen
    following  token after the chunk where that is the prompt's; None: it is to be chosen
    targets  prompt tokens whose log-probabilities are asked for, each after one of the chunk's last tokens; with `choose` none
             follows the very last
    pooling  of the prompt's vector: with "last" of the chunk that ends the prompt alone; None: none is asked for
    adapter  number of the sequence's adapter; -1: none
    """

    slot: int
    tokens: list[int]
    before: int
    pages: list[int]
    params: SamplingParams
    choose: bool
    entry: Entry | None = None
    following: int | None = None
    targets: Sequence[int] = ()
    pooling: str | None = None
    adapter: int = -1

    @property
    def span(self) -> tuple[int, int]:
        """Numbers of tokens before and in the chunk."""
        return self.before, len(self.tokens)

    @property
    def end(self) -> int:
        return self.before + len(self.tokens)


class Prefilled(NamedTuple):
    """Result of chunks of prompts.

    chosen           [n] int64, the next token after each of the n chunks with `choose`
    logprobs         [n, WIDTH] fp32, their log-probabilities; None: none is asked for
    prompt_logprobs  by slot, [targets, WIDTH] fp32 of a chunk's targets
    pooled           by slot, what `pooled` gives
    """

    chosen: torch.Tensor
    logprobs: torch.Tensor | None
    prompt_logprobs: dict[int, torch.Tensor]
    pooled: dict[int, torch.Tensor]


def prefill_eagerly(
    pipeline: Pipeline, cache: PagedCache, chunks: Sequence[PrefillChunk], adjustments: Adjustments | None
) -> Prefilled:
    """Write chunks of prompts into the cache, and choose the next tokens. Collective.

    adjustments  of the slots of chunks with `choose`; None: no logits change
    """
    device = pipeline.team.device
    table = padded_pages(chunks, device)
    tokens = to_device((token for chunk in chunks for token in chunk.tokens), device)
    last, scored = _rows_of(chunks)
    sequences = [chunk.span for chunk in chunks]
    with outputs_of(pipeline.model, any(chunk.pooling for chunk in chunks)) as outputs:
        slots = [chunk.slot for chunk in chunks]
        logits = pipeline.prefill(tokens, sequences, table, cache, last + scored, slots, _adapters_of(pipeline, chunks))
    vectors = pooled(pipeline, [(chunk.slot, len(chunk.tokens), chunk.pooling) for chunk in chunks], outputs)
    prompt_logprobs = {}
    if scored:
        having = [chunk for chunk in chunks if chunk.targets]
        prompt_logprobs = _score(pipeline, having, None if logits is None else logits[len(last) :])
        logits = None if logits is None else logits[: len(last)]
    chosen = _choose(pipeline, [chunk for chunk in chunks if chunk.choose], logits, adjustments)
    return Prefilled(*(chosen or (tokens[:0], None)), prompt_logprobs, vectors)


def _choose(
    pipeline: Pipeline, chunks: Sequence[PrefillChunk], logits: torch.Tensor | None, adjustments: Adjustments | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Next tokens after these chunks, and their log-probabilities if asked for; None without chunks."""
    if not chunks:
        return None
    device, params = pipeline.team.device, [chunk.params for chunk in chunks]
    position = to_device((chunk.end for chunk in chunks), device)
    rows = to_device((chunk.slot for chunk in chunks), device)
    choice = Choice.of_requests(params, position, adjustments=adjustments, rows=rows)
    return pipeline.choose(logits, choice, joint_kind(params))


def _adapters_of(pipeline: Pipeline, chunks: Sequence[PrefillChunk]) -> torch.Tensor | None:
    """Number of each token's adapter [T] int32; None of a model without adapters."""
    if not pipeline.model.adapters:
        return None
    numbers = [chunk.adapter for chunk in chunks for _ in chunk.tokens]
    return to_device(numbers, pipeline.team.device, torch.int32)


def _rows_of(chunks: Sequence[PrefillChunk]) -> tuple[list[int], list[int]]:
    """Rows of a pass after which tokens are chosen, and rows whose logits score the chunks' targets."""
    last, scored, end = [], [], 0
    for chunk in chunks:
        end += len(chunk.tokens)
        if chunk.choose:
            last.append(end - 1)
        # Token i of a prompt is predicted after token i - 1. No target follows the prompt's last token.
        stop = end - chunk.choose
        scored += range(stop - len(chunk.targets), stop)
    return last, scored


def _score(pipeline: Pipeline, chunks: Sequence[PrefillChunk], logits: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Log-probabilities of the chunks' targets under all their logits, by slot."""
    targets = to_device((token for chunk in chunks for token in chunk.targets), pipeline.team.device)
    rows = pipeline.logprobs(logits, targets)
    parts = rows.split([len(chunk.targets) for chunk in chunks])
    return {chunk.slot: part for chunk, part in zip(chunks, parts, strict=True)}


@contextmanager
def outputs_of(model: Decoder, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the last layer's normed output of the passes within, if it is wanted."""
    outputs: list[torch.Tensor] = []
    if not wanted:
        yield outputs
        return
    assert model.tap is None, "drafts by hidden states are refused beside pooling"
    model.tap = Tap((model.config.num_hidden_layers,), lambda rows, step: outputs.extend(rows))
    try:
        yield outputs
    finally:
        model.tap = None


def pooled(
    pipeline: Pipeline, chunks: Sequence[tuple[int, int, str | None]], outputs: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """By slot, [H] fp32 of a chunk with `pooling`: its last token, or its tokens' sum. Collective.

    chunks   (slot, number of tokens, pooling) of each
    outputs  of the passes that read the chunks, one below another, on the last stage
    """
    having = [slot for slot, _, pooling in chunks if pooling is not None]
    if not having:
        return {}
    if pipeline.is_last:
        rows, vectors, end = torch.cat(list(outputs)), [], 0
        for _, tokens, pooling in chunks:
            begin, end = end, end + tokens
            if pooling is not None:
                vectors.append(rows[end - 1].float() if pooling == "last" else rows[begin:end].float().sum(0))
        vectors = torch.stack(vectors)
    else:
        size = len(having), pipeline.model.config.hidden_size
        vectors = torch.empty(size, dtype=torch.float32, device=pipeline.team.device)
    pipeline.share(vectors)
    return dict(zip(having, vectors, strict=True))


def padded_pages(chunks: Sequence[PrefillChunk], device: torch.device) -> torch.Tensor:
    """Page table [chunks, most pages] int32."""
    width = max(len(chunk.pages) for chunk in chunks)
    rows = [chunk.pages + [0] * (width - len(chunk.pages)) for chunk in chunks]
    return upload(torch.tensor(rows, dtype=torch.int32), device)


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
    state_rows, state_slots, state_chunks  of SequenceChunks, in models with states; else empty
    adapters                              [T] int32: number of each token's adapter, -1: none
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
    state_rows: torch.Tensor
    state_slots: torch.Tensor
    state_chunks: torch.Tensor
    adapters: torch.Tensor

    @classmethod
    def views(cls, packed: torch.Tensor, like: Arrays) -> Inputs:
        """Views into ``packed`` [uint8] of the shapes and dtypes of ``like``."""
        parts = {
            name: packed[start:end].view(torch.from_numpy(like[name]).dtype) for name, start, end in places_of(like)
        }
        return cls(**{name: part.view(like[name].shape) for name, part in parts.items()})


# Fields of Inputs in host memory, by name.
Arrays = dict[str, numpy.ndarray]


def places_of(arrays: Arrays) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, end) of each array where all are in one tensor, for one copy to the device."""
    start = 0
    for name, one in arrays.items():
        yield name, start, start + one.nbytes
        start += cdiv(one.nbytes, ALIGNMENT) * ALIGNMENT


def packed_arrays(arrays: Arrays) -> torch.Tensor:
    """All arrays in one tensor [uint8] at ``places_of``."""
    places = list(places_of(arrays))
    packed = numpy.zeros(max(end for *_, end in places), numpy.uint8)
    for name, start, end in places:
        packed[start:end] = arrays[name].reshape(-1).view(numpy.uint8)
    return torch.from_numpy(packed)


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of tokens and of sequences of a pass.

    entries  of page tables that it gathers from a spread cache
    length   of every one of `batch` new prompts, its padding included; None: sequences of any lengths, one after the other
    """

    tokens: int
    batch: int
    entries: int = 0
    length: int | None = None

    @classmethod
    def of_new(cls, batch: int, length: int) -> Shape:
        """Shape of `batch` new prompts of up to `length` tokens each."""
        return cls(batch * length, batch, length=length)


class StaticPrefill:
    """Prefill of sequences that fit a shape, on static tensors.

    Call `load`, then `run`, which may be captured; `chosen` and `logprobs` hold the next tokens and their log-probabilities.

    New prompts of a shape with `length` are padded to it one by one, so that a step knows its runs: cuDNN and unfused attention
    take them from the host. A prompt's padding follows it, where causal attention does not see it, and is not cached; a missing
    prompt is all padding. Shapes without `length`, for fused plans only, have their padding after the last sequence.

    max_pages  of a sequence
    """

    def __init__(self, pipeline: Pipeline, cache: PagedCache, shape: Shape, max_pages: int) -> None:
        self.pipeline, self.cache, self.shape, self.model = pipeline, cache, shape, pipeline.model
        self.plan = self.model.plan(shape.tokens)
        self._padded = [] if shape.length is None else [(0, shape.length)] * shape.batch
        if shape.length is not None:
            ranks = self.model.team.size if self.model.context_parallel else 1
            max_pages = cdiv(shape.length, cache.page_size * ranks)
        self._max_pages = max_pages
        device, batch = self.model.team.device, shape.batch
        self.chosen = torch.zeros(batch, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(batch, WIDTH, dtype=torch.float32, device=device)
        # The fields of its sequence ranges that stay on the host hold for every batch; with `length` all fields do.
        self._ranges = self._ranges_of([])
        like = self._inputs([])
        self._packed = upload(packed_arrays(like), device).clone()
        self._static = Inputs.views(self._packed, like)

    def load(self, chunks: Sequence[PrefillChunk]) -> None:
        """Copy the batch's metadata to the device asynchronously."""
        self._packed.copy_(upload(packed_arrays(self._inputs(chunks)), self._packed.device))

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
            chunks=runs(self._padded),
            spans=replace(self._ranges, spans=now.spans, tiles=now.tiles) if fused else None,
            spread=spread,
            state_chunks=SequenceChunks(now.state_rows, now.state_slots, now.state_chunks)
            if self.model.has_states
            else None,
            adapters=now.adapters if self.model.adapters else None,
        )
        logits = self.pipeline.run([Pass(now.tokens, step, now.rows)], self.cache)
        choice = Choice.of(now, now.lengths, adjustments=adjustments, rows=now.batch_slots)
        chosen, logprobs = self.pipeline.choose(logits, choice, kind)
        self.chosen.copy_(chosen)
        if logprobs is not None:
            self.logprobs.copy_(logprobs)

    def starts(self, chunks: Sequence[PrefillChunk]) -> Iterable[int]:
        """Index of each chunk's first token in the pass."""
        if self.shape.length is not None:
            return range(0, len(chunks) * self.shape.length, self.shape.length)
        return accumulate((len(chunk.tokens) for chunk in chunks), initial=0)

    def _ranges_of(self, chunks: Sequence[PrefillChunk]) -> SequenceRanges:
        """Sequence ranges of these chunks in host memory."""
        if self._padded:
            return SequenceRanges.make(self._padded, self.model.group, self.model.dtype)
        sequences = [chunk.span for chunk in chunks]
        sizes = {"tokens": self.shape.tokens, "batch": self.shape.batch}
        return SequenceRanges.make(sequences, self.model.group, self.model.dtype, **sizes)

    def _inputs(self, chunks: Sequence[PrefillChunk]) -> Arrays:
        """Metadata of these chunks in host memory, by numpy: torch would start its threads for them."""
        size, batch, team = self.cache.page_size, self.shape.batch, self.model.team
        rank, world_size = (team.rank, team.size) if self.model.context_parallel else (0, 1)
        table = numpy.zeros((batch, self._max_pages), numpy.int32)
        ids = array("q")
        for row, chunk in zip(table, chunks, strict=False):
            pages = chunk.pages[: self._max_pages]
            row[: len(pages)] = pages
            ids.fromlist(chunk.tokens)

        def of_chunks(values: Iterable[float], padding: float, dtype: type = numpy.int64) -> numpy.ndarray:
            padded = numpy.full(batch, padding, dtype)
            padded[: len(chunks)] = list(values)
            return padded

        lengths, starts = of_chunks(map(len, (chunk.tokens for chunk in chunks)), 0), self.starts(chunks)
        begins, before = of_chunks(islice(starts, len(chunks)), 0), of_chunks((chunk.before for chunk in chunks), 0)
        chunk_of = numpy.repeat(numpy.arange(batch), lengths)
        within = numpy.arange(len(ids)) - (numpy.cumsum(lengths) - lengths)[chunk_of]
        at, here = within + before[chunk_of], within + begins[chunk_of]
        slots = table[chunk_of, at // (size * world_size)].astype(numpy.int64) * size + at % size
        if world_size > 1:
            slots = numpy.where(at // size % world_size == rank, slots, -1)

        def of_tokens(values: numpy.ndarray, padding: int, dtype: type = numpy.int64) -> numpy.ndarray:
            padded = numpy.full(self.shape.tokens, padding, dtype)
            padded[here] = values
            return padded

        entries = gathered_slots = numpy.zeros(0, numpy.int64)
        if self.model.context_parallel:
            table, entries, gathered_slots = self._gathered(chunks, table)
        params, ranges = [chunk.params for chunk in chunks], self._ranges if self._padded else self._ranges_of(chunks)
        states = self._states_of(chunks) if self.model.has_states else (numpy.zeros(0, numpy.int32),) * 3
        real = numpy.arange(batch) < len(chunks)
        return {
            "tokens": of_tokens(numpy.frombuffer(ids, numpy.int64), 0),
            "positions": of_tokens(at, 0),
            "cache_slots": of_tokens(slots, -1),
            "table": table,
            "entries": entries,
            "gathered_slots": gathered_slots,
            "spans": ranges.spans.numpy(),
            "tiles": ranges.tiles.numpy(),
            "rows": numpy.where(real, begins + lengths - 1, 0),
            "lengths": numpy.where(real, before + lengths, 1),
            "seed": of_chunks((one.seed for one in params), 0),
            "temperature": of_chunks((one.temperature for one in params), 0.0, numpy.float32),
            "top_p": of_chunks((one.top_p for one in params), 1.0, numpy.float32),
            "top_k": of_chunks((one.top_k for one in params), 0),
            "min_p": of_chunks((one.min_p for one in params), 0.0, numpy.float32),
            "batch_slots": of_chunks((chunk.slot for chunk in chunks), 0),
            "state_rows": states[0],
            "state_slots": states[1],
            "state_chunks": states[2],
            "adapters": of_tokens(
                of_chunks((chunk.adapter for chunk in chunks), -1, numpy.int32)[chunk_of], -1, numpy.int32
            ),
        }

    def _states_of(self, chunks: Sequence[PrefillChunk]) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """SequenceChunks of these chunks, and of the padding between and after them.

        Padding has a state apart, so all rows of a pass are computed. Missing sequences have no rows, missing chunks no tokens.
        """
        tokens, batch, padding = self.shape.tokens, self.shape.batch, self.cache.states.padding
        runs, end = [], 0  # (first row, rows, tokens before, index of the state)
        for chunk, start in zip(chunks, self.starts(chunks), strict=False):
            runs += [(end, start - end, 0, padding)] if start > end else []
            runs.append((start, len(chunk.tokens), chunk.before, chunk.slot))
            end = start + len(chunk.tokens)
        runs += [(end, tokens - end, 0, padding)] if end < tokens else []
        rows, slots = numpy.zeros((2 * batch + 2, 3), numpy.int32), numpy.full(2 * batch + 2, padding, numpy.int32)
        cut = numpy.full((tokens // CHUNK + 2 * batch + 1, 2), (2 * batch + 1, CHUNK), numpy.int32)
        rows[: len(runs)] = [run[:3] for run in runs]
        slots[: len(runs)] = [run[3] for run in runs]
        places = [(index, at) for index, run in enumerate(runs) for at in range(0, run[1], CHUNK)]
        cut[: len(places)] = places
        return rows, slots, cut

    def _gathered(
        self, chunks: Sequence[PrefillChunk], table: numpy.ndarray
    ) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """(page table of the gathered pages, their entries, slots of the tokens in them) of a spread cache."""
        world_size, size = self.model.team.size, self.cache.page_size
        layout = GatheredLayout.make(
            [chunk.span for chunk in chunks],
            size,
            world_size,
            window=self.model.window,
            entries=self.shape.entries,
            tokens=self.shape.tokens,
            starts=list(self.starts(chunks)),
            batch=self.shape.batch,
        )
        self._gathered_pages = layout.pages
        pages = numpy.zeros((self.shape.batch, self._max_pages * world_size), numpy.int32)
        pages[:, : layout.table.shape[1]] = layout.table
        entries = numpy.zeros(self.shape.entries, numpy.int64)
        entries[: len(layout.rows)] = table[layout.rows, layout.columns]
        return pages, entries, layout.slots

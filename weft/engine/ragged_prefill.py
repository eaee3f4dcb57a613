"""Prefill of prompts, and of parts of prompts, by CUDA graphs: one per number of tokens.

Launching the kernels one by one may take the host longer than they take the GPU (docs/experiments.md, "Prompts").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy
import torch

from weft.engine.params import Kind
from weft.engine.prefill import PrefillChunk
from weft.engine.sampling import Choice, choose_tokens
from weft.models import Decoder
from weft.ops import PrefillSpans
from weft.parallel.step import PagedCache, Step
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import upload

# Token counts: powers of two up to ROWS, then its multiples, and above 2048 multiples of a sixteenth of the next power of two.
# cuBLAS may take longer for rows in between than for the next multiple of 128 (docs/experiments.md, "Prompts").
SHORTEST, ROWS, STEPS = 16, 128, 16
# Sequence counts are powers of this: the head's GEMM takes as long for 8 rows as for one.
BATCHES = 8
# Bytes; kernels are compiled for pointers of this alignment.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class RaggedShape:
    """Number of tokens and of sequences of a pass."""

    tokens: int
    batch: int


def ragged_shape_of(chunks: Sequence[PrefillChunk], max_batch: int) -> RaggedShape:
    """Smallest shape that the chunks fit; `max_batch` bounds the number of sequences."""
    tokens, batch = sum(len(chunk.tokens) for chunk in chunks), 1
    power = max(SHORTEST, 1 << (tokens - 1).bit_length())
    step = power if power <= ROWS else max(ROWS, power // STEPS)
    while batch < len(chunks):
        batch *= BATCHES
    return RaggedShape(cdiv(tokens, step) * step, min(batch, max_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Metadata of a pass of T tokens of S sequences.

    Padding tokens have id 0, are not cached and attend to nothing; padding sequences have no tokens, and their choice is
    ignored.

    tokens, positions, cache_slots        [T] int64
    table                                 [S, max_pages] int32
    spans, tiles                          of PrefillSpans
    rows                                  [S] int64: index of each sequence's last token
    lengths, seed, temperature, top_p     [S]: tokens including cached ones, and sampling parameters
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cache_slots: torch.Tensor
    table: torch.Tensor
    spans: torch.Tensor
    tiles: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor

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


class RaggedPrefill:
    """Prefill of up to `tokens` tokens of up to `batch` sequences on static tensors.

    Call `load`, then `run`, which may be captured; `chosen` holds the next tokens. For fused plans only: unfused attention
    takes its sequence lengths from the host. max_pages: of a sequence.
    """

    def __init__(self, model: Decoder, cache: PagedCache, tokens: int, batch: int, max_pages: int) -> None:
        self.model, self.cache = model, cache
        self._tokens, self._batch, self._max_pages = tokens, batch, max_pages
        device = model.team.device
        self.chosen = torch.zeros(batch, dtype=torch.int64, device=device)
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

    def run(self, kind: Kind) -> None:
        """Write keys and values into the cache, and the token after each sequence into `chosen`."""
        now = self._static
        step = Step(
            positions=now.positions,
            slots=now.cache_slots,
            pages=now.table,
            angles=self.model.angles,
            plan=self.model.plan(self._tokens),
            spans=replace(self._ranges, spans=now.spans, tiles=now.tiles),
        )
        logits = self.model(now.tokens, step, self.cache, now.rows)
        choice = Choice(temperature=now.temperature, top_p=now.top_p, seed=now.seed, position=now.lengths)
        self.chosen.copy_(choose_tokens(self.model.lm_head, logits, choice, kind, fused=True))

    def _inputs(self, chunks: Sequence[PrefillChunk]) -> Inputs:
        """Metadata of these chunks in host memory, by numpy: torch would start its threads for them."""
        size, table = self.cache.page_size, numpy.zeros((self._batch, self._max_pages), numpy.int32)
        for row, chunk in zip(table, chunks, strict=False):
            row[: len(chunk.pages)] = chunk.pages
        ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
        places = [range(chunk.before, chunk.before + len(chunk.tokens)) for chunk in chunks]
        cache_slots = [
            c.pages[at // size] * size + at % size for c, mine in zip(chunks, places, strict=True) for at in mine
        ]
        params, ranges = [chunk.params for chunk in chunks], self._ranges_of(chunks)
        return Inputs(
            tokens=_padded([token for chunk in chunks for token in chunk.tokens], self._tokens, 0),
            positions=_padded([at for mine in places for at in mine], self._tokens, 0),
            cache_slots=_padded(cache_slots, self._tokens, -1),
            table=torch.from_numpy(table),
            spans=ranges.spans,
            tiles=ranges.tiles,
            rows=_padded([end - 1 for end in ends], self._batch, 0),
            lengths=_padded([mine.stop for mine in places], self._batch, 1),
            seed=_padded([p.seed for p in params], self._batch, 0),
            temperature=_padded([p.temperature for p in params], self._batch, 0.0, torch.float32),
            top_p=_padded([p.top_p for p in params], self._batch, 1.0, torch.float32),
        )

    def _ranges_of(self, chunks: Sequence[PrefillChunk]) -> PrefillSpans:
        """Sequence ranges of these chunks in host memory."""
        sequences = [(chunk.before, len(chunk.tokens)) for chunk in chunks]
        sizes = {"tokens": self._tokens, "batch": self._batch}
        return PrefillSpans.make(sequences, self.model.group, self.model.dtype, **sizes)


def _padded(values: list[float], size: int, value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values + [value] * (size - len(values)), dtype=dtype)

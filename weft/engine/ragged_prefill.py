"""Prompts of any lengths, and parts of them, read by CUDA graphs, one for each number of tokens: to launch their kernels one by
one may take the host longer than they take the GPU (docs/decisions.md, "Prompts").
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

# Of tokens: powers of two up to ROWS, then its multiples, and above 2048 those of a sixteenth of the next power of two. Rows in
# between may take cuBLAS longer than the next multiple of 128 (docs/decisions.md, "Prompts").
SHORTEST, ROWS, STEPS = 16, 128, 16
# Of sequences: a product of so few rows with the head takes as long as one of one row.
BATCHES = 8
# Bytes: kernels are compiled for pointers of this alignment.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class RaggedShape:
    """Tokens and sequences, of all together."""

    tokens: int
    batch: int


def ragged_shape_of(chunks: Sequence[PrefillChunk], max_batch: int) -> RaggedShape:
    """The smallest that they all fit; `max_batch`: no sequences are more."""
    tokens, batch = sum(len(chunk.tokens) for chunk in chunks), 1
    power = max(SHORTEST, 1 << (tokens - 1).bit_length())
    step = power if power <= ROWS else max(ROWS, power // STEPS)
    while batch < len(chunks):
        batch *= BATCHES
    return RaggedShape(cdiv(tokens, step) * step, min(batch, max_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the host says of a pass, T tokens of S sequences. Padding: token 0 of nobody, which goes nowhere and attends to
    nothing; sequences without a token, of whose choice nobody reads.

    tokens, positions, cache_slots        [T] int64
    table                                 [S, max_pages] int32
    spans, tiles                          of PrefillSpans
    rows                                  [S] int64: of each sequence's last token
    lengths, seed, temperature, top_p     [S]: tokens with those before, and how the next is chosen
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
        """Of a tensor that holds all, for one copy to the device."""
        return sum(cdiv(getattr(self, field.name).nbytes, ALIGNMENT) * ALIGNMENT for field in fields(self))

    def views(self, packed: torch.Tensor) -> Inputs:
        """The same sizes in ``packed`` [nbytes] uint8."""
        found, start = {}, 0
        for field in fields(self):
            like = getattr(self, field.name)
            found[field.name] = packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += cdiv(like.nbytes, ALIGNMENT) * ALIGNMENT
        return Inputs(**found)


class RaggedPrefill:
    """Up to `batch` sequences that go on by up to `tokens` tokens together, on static tensors. `load`, `run` (which may be
    captured), `chosen`. Of a fused plan: unfused attention knows its sequences on the host.

    max_pages  of a sequence
    """

    def __init__(self, model: Decoder, cache: PagedCache, tokens: int, batch: int, max_pages: int) -> None:
        self.model, self.cache = model, cache
        self._tokens, self._batch, self._max_pages = tokens, batch, max_pages
        device = model.team.device
        self.chosen = torch.zeros(batch, dtype=torch.int64, device=device)
        # What the host knows of its spans holds for all that will be loaded.
        self._spans = self._spans_of([])
        like = self._inputs([])
        self._packed = torch.zeros(like.nbytes, dtype=torch.uint8, device=device)
        self._static = like.views(self._packed)

    def load(self, chunks: Sequence[PrefillChunk]) -> None:
        """Of the host's lists; nothing is waited for."""
        inputs = self._inputs(chunks)
        packed = torch.empty(len(self._packed), dtype=torch.uint8)
        there = inputs.views(packed)
        for field in fields(Inputs):
            getattr(there, field.name).numpy()[...] = getattr(inputs, field.name).numpy()
        self._packed.copy_(upload(packed, self._packed.device))

    def run(self, kind: Kind) -> None:
        """Keys and values into the cache, the token after each sequence into `chosen`."""
        now = self._static
        step = Step(
            positions=now.positions,
            slots=now.cache_slots,
            pages=now.table,
            angles=self.model.angles,
            plan=self.model.plan(self._tokens),
            spans=replace(self._spans, spans=now.spans, tiles=now.tiles),
        )
        logits = self.model(now.tokens, step, self.cache, now.rows)
        choice = Choice(temperature=now.temperature, top_p=now.top_p, seed=now.seed, position=now.lengths)
        self.chosen.copy_(choose_tokens(self.model.lm_head, logits, choice, kind, fused=True))

    def _inputs(self, chunks: Sequence[PrefillChunk]) -> Inputs:
        """In host memory. Without torch, which would start its threads for so little."""
        size, table = self.cache.page_size, numpy.zeros((self._batch, self._max_pages), numpy.int32)
        for row, chunk in zip(table, chunks, strict=False):
            row[: len(chunk.pages)] = chunk.pages
        ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
        places = [range(chunk.before, chunk.before + len(chunk.tokens)) for chunk in chunks]
        cache_slots = [
            c.pages[at // size] * size + at % size for c, mine in zip(chunks, places, strict=True) for at in mine
        ]
        params, spans = [chunk.params for chunk in chunks], self._spans_of(chunks)
        return Inputs(
            tokens=_padded([token for chunk in chunks for token in chunk.tokens], self._tokens, 0),
            positions=_padded([at for mine in places for at in mine], self._tokens, 0),
            cache_slots=_padded(cache_slots, self._tokens, -1),
            table=torch.from_numpy(table),
            spans=spans.spans,
            tiles=spans.tiles,
            rows=_padded([end - 1 for end in ends], self._batch, 0),
            lengths=_padded([mine.stop for mine in places], self._batch, 1),
            seed=_padded([p.seed for p in params], self._batch, 0),
            temperature=_padded([p.temperature for p in params], self._batch, 0.0, torch.float32),
            top_p=_padded([p.top_p for p in params], self._batch, 1.0, torch.float32),
        )

    def _spans_of(self, chunks: Sequence[PrefillChunk]) -> PrefillSpans:
        """In host memory."""
        sequences = [(chunk.before, len(chunk.tokens)) for chunk in chunks]
        sizes = {"tokens": self._tokens, "batch": self._batch}
        return PrefillSpans.make(sequences, self.model.group, self.model.dtype, **sizes)


def _padded(values: list[float], size: int, value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values + [value] * (size - len(values)), dtype=dtype)

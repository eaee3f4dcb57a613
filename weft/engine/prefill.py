"""Prefill of new prompts of similar length by CUDA graphs, padded to one of a few shapes.

A graph saves the host time of launching the kernels of small prompts. Other prompts: weft.engine.ragged_prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.engine.params import Kind, SamplingParams
from weft.engine.sampling import Choice, choose_tokens
from weft.models import Decoder
from weft.ops import PrefillSpans
from weft.parallel.step import PagedCache, Step, cells_of, runs
from weft.runtime.copying import upload

SHORTEST = 16
# Up to this many tokens padding is free, since a pass takes as long as reading the weights.
FREE_TOKENS = 256
# Largest ratio of padded to real tokens above that.
SLACK = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens of one sequence, after `before` cached ones; `choose`: then its next token is chosen."""

    slot: int
    tokens: list[int]
    before: int
    pages: list[int]
    params: SamplingParams
    choose: bool


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


class PaddedPrefill:
    """Prefill of `batch` new prompts of up to `length` tokens on static tensors.

    Call `load`, then `run`, which may be captured; `chosen` holds the next tokens. A prompt's padding follows it, where
    causal attention does not see it, and is not cached. A missing prompt is all padding.
    """

    def __init__(self, model: Decoder, cache: PagedCache, batch: int, length: int) -> None:
        self.model, self.cache, self.batch, self.length = model, cache, batch, length
        device, width = model.team.device, -(-length // cache.page_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens, self.cache_slots = zeros(batch * length), zeros(batch * length)
        self.table = zeros(batch, width, dtype=torch.int32)
        self.lengths, self.seed, self.chosen = zeros(batch), zeros(batch), zeros(batch)
        self.temperature, self.top_p = zeros(batch, dtype=torch.float32), zeros(batch, dtype=torch.float32)
        self.first = torch.arange(batch, device=device) * length
        # Padding may exceed the model's last position, which has no rotary angle; any angle will do.
        positions = torch.arange(length, device=device).clamp(max=len(model.angles) - 1)
        plan, spans = model.plan(batch * length), [(0, length)] * batch
        self.step = Step(
            positions=positions.repeat(batch),
            slots=self.cache_slots,
            pages=self.table,
            angles=model.angles,
            plan=plan,
            chunks=runs(spans),
            spans=PrefillSpans.make(spans, model.group, model.dtype).to(device) if plan.fused else None,
        )

    def load(self, chunks: Sequence[PrefillChunk]) -> None:
        """Copy the batch's metadata to the device asynchronously."""
        missing = self.batch - len(chunks)
        size, width = self.cache.page_size, self.table.shape[1]
        tokens = torch.tensor([chunk.tokens + [0] * (self.length - len(chunk.tokens)) for chunk in chunks])
        pages = torch.tensor([(chunk.pages + [0] * width)[:width] for chunk in chunks])
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        places = torch.arange(self.length).expand(len(chunks), -1)
        cache_slots = pages.gather(1, places // size) * size + places % size
        cache_slots = torch.where(places < lengths[:, None], cache_slots, -1)
        params = [chunk.params for chunk in chunks]
        for target, source, padding in (
            (self.tokens, tokens.flatten(), 0),
            (self.cache_slots, cache_slots.flatten(), -1),
            (self.table, pages.to(torch.int32), 0),
            (self.lengths, lengths, 1),
            (self.seed, torch.tensor([p.seed for p in params]), 0),
            (self.temperature, torch.tensor([p.temperature for p in params]), 0.0),
            (self.top_p, torch.tensor([p.top_p for p in params]), 1.0),
        ):
            rest = source.new_full((missing * (len(source) // len(chunks)), *source.shape[1:]), padding)
            target.copy_(upload(torch.cat((source, rest)), target.device))

    def run(self, kind: Kind) -> None:
        """Write keys and values into the cache, and the token after each prompt into `chosen`."""
        cells = None if self.step.plan.fused else cells_of(self.cache_slots, self.cache.page_size)
        step = replace(self.step, cells=cells)
        logits = self.model(self.tokens, step, self.cache, self.first + self.lengths - 1)
        choice = Choice(temperature=self.temperature, top_p=self.top_p, seed=self.seed, position=self.lengths)
        self.chosen.copy_(choose_tokens(self.model.lm_head, logits, choice, kind, fused=step.plan.fused))

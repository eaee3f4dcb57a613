"""Prompts as they are, without padding, launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from weft.engine.adjustments import Adjustments
from weft.engine.params import SamplingParams, joint_kind
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PrefillChunk
from weft.engine.sampling import Choice
from weft.engine.slots import DTYPES, SAMPLING
from weft.models import Decoder
from weft.parallel.step import PagedCache
from weft.runtime.copying import upload


class Prefilled(NamedTuple):
    """Result of chunks of prompts.

    chosen           [n] int64, the next token after each of the n chunks with `choose`
    logprobs         [n, WIDTH] fp32, their log-probabilities; None: none is asked for
    prompt_logprobs  by slot, [targets, WIDTH] fp32 of a chunk's targets
    """

    chosen: torch.Tensor
    logprobs: torch.Tensor | None
    prompt_logprobs: dict[int, torch.Tensor]


def prefill_eagerly(
    model: Decoder,
    pipeline: Pipeline,
    cache: PagedCache,
    chunks: Sequence[PrefillChunk],
    adjustments: Adjustments | None,
) -> Prefilled:
    """Write chunks of prompts into the cache, and choose the next tokens. Collective.

    adjustments  of the slots of chunks with `choose`; None: no logits change
    """
    device = pipeline.team.device
    width = max(len(chunk.pages) for chunk in chunks)
    table = upload(_padded([chunk.pages for chunk in chunks], width).to(torch.int32), device)
    tokens = upload(torch.tensor([token for chunk in chunks for token in chunk.tokens]), device)
    ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
    last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.choose]
    # Token i of a prompt is predicted after token i - 1. No target follows the prompt's last token.
    scored = []
    for end, chunk in zip(ends, chunks, strict=True):
        end -= chunk.choose
        scored += range(end - len(chunk.targets), end)
    sequences = [(chunk.before, len(chunk.tokens)) for chunk in chunks]
    logits = pipeline.prefill(model, tokens, sequences, table, cache, last + scored)
    prompt_logprobs = {}
    if scored:
        having = [chunk for chunk in chunks if chunk.targets]
        prompt_logprobs = _score(model, pipeline, having, None if logits is None else logits[len(last) :])
        logits = None if logits is None else logits[: len(last)]
    chunks = [chunk for chunk in chunks if chunk.choose]
    if not chunks:
        return Prefilled(tokens[:0], None, prompt_logprobs)
    params = [chunk.params for chunk in chunks]
    choice = Choice(
        **_sampling_tensors(params, device),
        position=upload(torch.tensor([chunk.before + len(chunk.tokens) for chunk in chunks]), device),
        adjustments=adjustments,
        rows=upload(torch.tensor([chunk.slot for chunk in chunks]), device),
    )
    chosen = pipeline.choose(model, logits, choice, joint_kind(params), fused=model.plan(1).fused)
    return Prefilled(*chosen, prompt_logprobs)


def _score(
    model: Decoder, pipeline: Pipeline, chunks: Sequence[PrefillChunk], logits: torch.Tensor | None
) -> dict[int, torch.Tensor]:
    """Log-probabilities of the chunks' targets under all their logits, by slot."""
    targets = upload(torch.tensor([token for chunk in chunks for token in chunk.targets]), pipeline.team.device)
    rows = pipeline.logprobs(model, logits, targets)
    parts = rows.split([len(chunk.targets) for chunk in chunks])
    return {chunk.slot: part for chunk, part in zip(chunks, parts, strict=True)}


def _padded(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def _sampling_tensors(params: list[SamplingParams], device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: upload(torch.tensor([getattr(p, name) for p in params], dtype=DTYPES[name]), device) for name in SAMPLING
    }

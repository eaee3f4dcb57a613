"""Vectors of prompts for embeddings: the last layer's normed output, of the last token or as a mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy
import torch

from weft.models.decoder import Tap

if TYPE_CHECKING:
    from weft.engine.pipeline import Pipeline
    from weft.models import Decoder


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


def vector_of(pooling: str, parts: Sequence[torch.Tensor], tokens: int) -> bytes:
    """Vector of a prompt as fp32 numbers, from what its chunks have given."""
    last = parts[-1] if pooling == "last" else torch.stack(list(parts)).sum(0) / tokens
    return last.numpy().astype("<f4").tobytes()


def unit_vector(vector: bytes, dimensions: int | None = None) -> numpy.ndarray:
    """The first `dimensions` numbers of a vector, all if None, at length 1."""
    numbers = numpy.frombuffer(vector, "<f4")[:dimensions]
    length = float(numpy.linalg.norm(numbers.astype(numpy.float64)))
    return (numbers / length if length > 0 else numbers).astype("<f4")

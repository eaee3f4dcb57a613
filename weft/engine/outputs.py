"""Output of an engine: pieces as they are generated, completions, and timing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.runtime.codec import exchangeable

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Answer to one prompt.

    text           without the end-of-sequence or stop token, and cut before a stop string; None without a tokenizer
    token_ids      all generated tokens, these included
    finish_reason  "eos", "stop" (a stop string or token) or "length" (`max_tokens`, or the model's limit)
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason


@exchangeable
class Piece(NamedTuple):
    """Generated token of one prompt.

    `text` may be empty while a character or a stop string is undecided; None without a tokenizer.
    """

    prompt: int
    text: str | None
    token_id: int
    finish_reason: FinishReason | None = None


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Timing of the latest generation, in seconds, and of loading the engine.

    capture_seconds      capture of CUDA graphs that this generation was the first to need; part of the times below
    time_to_first_token  from the start to the first token of any prompt on the host
    tokens_per_second    tokens after the first ones (two of a prompt may arrive together), over the time since; 0: none
    preemptions          how often a sequence gave its KV pages to an older one, to be read again later
    hit_tokens           tokens of the prompts that were in the KV cache already (prefix caching)
    """

    load_seconds: float
    capture_seconds: float = 0.0
    time_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    hit_tokens: int = 0


@exchangeable
class Load(NamedTuple):
    """Load of an engine between two steps.

    running, waiting  requests in the batch, and those that wait for room in it
    cache_usage       share of the KV cache's pages that are taken
    preemptions       as in Stats, of all requests so far
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    preemptions: int = 0


def join_pieces(pieces: Iterator[Piece], prompts: int) -> list[Completion]:
    """Completions of `prompts` prompts, from all their pieces."""
    texts: list[list[str | None]] = [[] for _ in range(prompts)]
    token_ids: list[list[int]] = [[] for _ in range(prompts)]
    reasons: list[FinishReason] = ["length"] * prompts
    for piece in pieces:
        texts[piece.prompt].append(piece.text)
        token_ids[piece.prompt].append(piece.token_id)
        reasons[piece.prompt] = piece.finish_reason or reasons[piece.prompt]
    return [
        Completion(text=None if None in text else "".join(text), token_ids=ids, finish_reason=reason)
        for text, ids, reason in zip(texts, token_ids, reasons, strict=True)
    ]

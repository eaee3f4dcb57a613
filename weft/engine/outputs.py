"""What comes out of an engine: pieces as they are generated, completions of them, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.runtime.codec import exchangeable

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's answer.

    text:          without the end-of-sequence token or a stop token, and cut before a stop string
    token_ids:     all that was generated, those included
    finish_reason: "eos", "stop" (a stop string or token) or "length" (`max_tokens`, or the model's limit)
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@exchangeable
class Piece(NamedTuple):
    """One generated token of one prompt. `text` may be empty while a character or a stop string is undecided."""

    prompt: int
    text: str
    token_id: int
    finish_reason: FinishReason | None = None


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Seconds: load_seconds of the engine, the rest of its latest generation.

    capture_seconds:     making the CUDA graphs that this generation was the first to need; part of the times below
    time_to_first_token: from the start to the first token of any prompt on the host
    tokens_per_second:   all tokens that came after those (two of a prompt may come together), over the time since; 0: none
    preemptions:         how often a sequence gave its KV pages to an older one, to be read again later
    """

    load_seconds: float
    capture_seconds: float = 0.0
    time_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0


def join_pieces(pieces: Iterator[Piece], prompts: int) -> list[Completion]:
    texts: list[list[str]] = [[] for _ in range(prompts)]
    token_ids: list[list[int]] = [[] for _ in range(prompts)]
    reasons: list[FinishReason] = ["length"] * prompts
    for piece in pieces:
        texts[piece.prompt].append(piece.text)
        token_ids[piece.prompt].append(piece.token_id)
        reasons[piece.prompt] = piece.finish_reason or reasons[piece.prompt]
    return [
        Completion(text="".join(text), token_ids=ids, finish_reason=reason)
        for text, ids, reason in zip(texts, token_ids, reasons, strict=True)
    ]

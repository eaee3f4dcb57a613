"""Output of an engine: pieces as they are generated, completions, and timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from weft.runtime.codec import exchangeable

FinishReason = Literal["eos", "stop", "length", "error"]


@exchangeable
class Logprob(NamedTuple):
    """Log-probability of a token at its place, by the model alone: before penalties and temperature.

    rank           number of tokens at least as likely, itself included
    decoded_token  its text by itself; None without a tokenizer
    """

    logprob: float
    rank: int
    decoded_token: str | None


@exchangeable
class Fault(NamedTuple):
    """Cause of an answer that ended with finish_reason "error": one line.

    of_request  True: its own constraints exclude every token; False: the model's logits are not finite
    """

    message: str
    of_request: bool


# By token id, the token of the place itself first.
Logprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Answer to one prompt.

    index          among the n answers to its prompt
    text           without the end-of-sequence or stop token, and cut before a stop string; None without a tokenizer
    token_ids      all generated tokens, these included
    finish_reason  "eos", "stop" (a stop string or token), "length" (`max_tokens`, or the model's limit) or "error"
    error          why no token could be chosen, where finish_reason is "error"
    logprobs       of each generated token, if asked for
    prompt_logprobs  of each token of the prompt, if asked for; None for the first, which nothing predicts
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    index: int = 0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    error: Fault | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer."""
        if self.logprobs is None:
            return None
        return sum(found[token].logprob for found, token in zip(self.logprobs, self.token_ids, strict=True))


@exchangeable
class Piece(NamedTuple):
    """Generated token of one prompt, or the error that ends its answer, without a token.

    `text` may be empty while a character or a stop string is undecided; None without a tokenizer. `logprobs` are the token's,
    and `prompt_logprobs` come with the first token, as in Completion. `index`: of the answer, among the n of its prompt.
    `offset`: characters of the answer before the token's own; with `logprobs`.
    """

    prompt: int
    text: str | None
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    index: int = 0
    error: Fault | None = None
    offset: int | None = None


# Fields of Piece with the values of several pieces; None for a field that is None in all of them.
Columns = list[list[Any] | None]


def columns_of(pieces: Sequence[Piece]) -> Columns:
    """The pieces as columns, which encode much faster."""
    columns = zip(*pieces, strict=True)
    return [None if column.count(None) == len(column) else list(column) for column in columns]


def pieces_of_columns(columns: Columns) -> list[Piece]:
    """The inverse of `columns_of`."""
    if not columns:
        return []
    empty = [None] * len(columns[0])
    return list(map(Piece._make, zip(*(empty if column is None else column for column in columns), strict=True)))


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
    """Completions of `prompts` prompts, from all their pieces; n of each prompt, one after the other."""
    answers: dict[tuple[int, int], list[Piece]] = {(prompt, 0): [] for prompt in range(prompts)}
    for piece in pieces:
        answers.setdefault((piece.prompt, piece.index), []).append(piece)
    return [_completion(index, answers[prompt, index]) for prompt, index in sorted(answers)]


def _completion(index: int, pieces: list[Piece]) -> Completion:
    texts, tokens = [piece.text for piece in pieces], [piece for piece in pieces if piece.token_id is not None]
    return Completion(
        text=None if None in texts else "".join(texts),
        token_ids=[piece.token_id for piece in tokens],
        finish_reason=next((piece.finish_reason for piece in pieces if piece.finish_reason), "length"),
        index=index,
        logprobs=[piece.logprobs for piece in tokens] if tokens and tokens[0].logprobs is not None else None,
        prompt_logprobs=pieces[0].prompt_logprobs if pieces else None,
        error=pieces[-1].error if pieces else None,
    )

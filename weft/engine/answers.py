"""Requests of an engine, and what becomes of their tokens: text, pieces, completions, timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from tokenizers import Tokenizer

from weft.arguments import quoted
from weft.engine.config import EngineConfig
from weft.engine.kv_cache import Sequence
from weft.engine.params import MOST_LOGPROBS, Prompt, SamplingParams, plain_prompt
from weft.engine.slots import Adjusted
from weft.engine.snapshots import SnapshotCounts
from weft.engine.speculation.drafting import Speculation
from weft.ops.vocab.sample_argmax import EXCLUDED
from weft.runtime.codec import exchangeable
from weft.text.grammars import GrammarGuard, Guides, TeamGuard
from weft.text.stream import StopStrings, TextStream, TokenTexts, token_texts
from weft.text.tokenizer import PromptReader, check_room, spellings

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from weft.runtime.team.team import Team

FinishReason = Literal["eos", "stop", "length", "error"]


@exchangeable
class Logprob(NamedTuple):
    """Log-probability of a token at its place, by the model alone: before penalties and temperature.

    rank           number of tokens at least as likely, this one included
    decoded_token  text of the token alone; None without a tokenizer
    """

    logprob: float
    rank: int
    decoded_token: str | None


@exchangeable
class Fault(NamedTuple):
    """Cause of an answer that ended with finish_reason "error": one line.

    of_request  True: the request's constraints exclude every token; False: the model's logits are not finite
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
    embedding      the prompt's vector as fp32 numbers of 4 bytes (little-endian), if `pooling` asks for one
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
    embedding: bytes | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer."""
        if self.logprobs is None:
            return None
        return sum(likely[token].logprob for likely, token in zip(self.logprobs, self.token_ids, strict=True))


@exchangeable
class Piece(NamedTuple):
    """Generated token of one prompt, or the error that ends its answer, without a token.

    `text` may be empty while a character or a stop string is undecided; None without a tokenizer. `logprobs` are the token's,
    and `prompt_logprobs` come with the first token, as in Completion. `index`: of the answer, among the n of its prompt.
    `offset`: characters of the answer before the token's own; with `logprobs`. `embedding`: the vector of `pooling`, with the
    first token, as fp32 numbers of 4 bytes (little-endian).
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
    embedding: bytes | None = None


# Values of several pieces, field by field; None for a field that is None in all pieces.
Columns = list[list[Any] | None]


def columns_of(pieces: Collection[Piece]) -> Columns:
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
    speculation          counts of drafts and accepted tokens; None: without speculation
    """

    load_seconds: float
    capture_seconds: float = 0.0
    time_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    speculation: Speculation | None = None


@exchangeable
class Load(NamedTuple):
    """Load of an engine between two steps.

    running, waiting  requests in the batch, and requests that wait for room in it
    cache_usage       share of the KV cache's pages that are taken
    preemptions, speculation  as in Stats, of all requests so far
    snapshots         of states; None: the model has none, or no prefix caching
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    preemptions: int = 0
    speculation: Speculation | None = None
    snapshots: SnapshotCounts | None = None


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
        embedding=pieces[0].embedding if pieces else None,
        error=pieces[-1].error if pieces else None,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(Sequence):
    """A request, and the answer that grows by its tokens.

    ends        tokens that end it, and the reason that each gives
    text        of its tokens; None without a tokenizer
    decode      text of a token by itself, for log-probabilities; None without a tokenizer
    prompt_index, index  `prompt` and `index` of its pieces
    pieces      list that they are added to
    """

    ends: dict[int, FinishReason]
    text: TextStream | None
    decode: Callable[[int], str | None]
    prompt_index: int = 0
    index: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def take(self, token: int, row: list[float] | None) -> bool:
        """Add a token that has arrived, and its piece. True if the answer has ended.

        token  of weft.engine.sampling: below 0 where none could be chosen
        row    of weft.engine.sampling, where log-probabilities are asked for
        """
        rows = [row] if self.params.logprobs is not None else []
        scores_prompt = self.params.prompt_logprobs is not None and not self.tokens
        of_prompt = self._rows_of_prompt() if scores_prompt else None
        if (fault := self._fault(token, [*rows, *(of_prompt or ())])) is not None:
            return self._end(fault)
        self.tokens.append(token)
        text, offset, reason = self._text_after(token)
        piece = Piece(self.prompt_index, text, token, reason, index=self.index)
        if rows:
            logprobs = logprobs_of(row, token, self.params.logprobs, self.decode)
            piece = piece._replace(logprobs=logprobs, offset=offset)
        if of_prompt is not None:
            pairs = zip(of_prompt, self.prompt[1:], strict=True)
            scores = [logprobs_of(*pair, self.params.prompt_logprobs, self.decode) for pair in pairs]
            piece = piece._replace(prompt_logprobs=[None, *scores])
        if self.params.pooling is not None and len(self.tokens) == 1:
            piece = piece._replace(embedding=vector_of(self.params.pooling, self.pooled, len(self.prompt)))
        self.pieces.append(piece)
        return reason is not None

    def _text_after(self, token: int) -> tuple[str | None, int | None, FinishReason | None]:
        """(new text, its offset, reason why the answer ends) of the answer's newest token."""
        reason, stream = self.ends.get(token), self.text
        ends_early = reason is not None
        if not ends_early and len(self.tokens) == self.budget:
            reason = "length"
        if stream is None:
            return None, None, reason
        if ends_early:
            text, _ = stream.finish()
            return text, stream.length, reason
        offset = stream.length
        text, stopped = stream.push(token)
        if reason is not None and not stopped:
            rest, stopped = stream.finish()
            text += rest
        return text, offset, "stop" if stopped else reason

    def _rows_of_prompt(self) -> list[list[float]]:
        return [row for part in self.prompt_logprobs for row in part.tolist()]

    def _fault(self, token: int, rows: Iterable[list[float]]) -> Fault | None:
        """Cause of an error at this token, or in these rows of log-probabilities."""
        chosen = len(self.tokens)
        if token == EXCLUDED.value and self.adjusted is not None and self.adjusted.constraints(chosen):
            return Fault(f"no token is left for place {chosen} of the answer: {self.adjusted.named(chosen)}", True)
        if token >= 0 and not any(math.isnan(row[0]) for row in rows):
            return None
        return Fault(
            f"the model's logits are not finite (NaN or infinite) at place {chosen} of the answer, after a prompt of "
            f"{len(self.prompt)} tokens: its weights or activations overflow; try another dtype, such as bfloat16 or float32",
            False,
        )

    def _end(self, fault: Fault) -> bool:
        """Add a piece with the error, and the text held back. True: the answer has ended."""
        self.corrupt = not fault.of_request
        text = None if self.text is None else self.text.finish()[0]
        self.pieces.append(Piece(self.prompt_index, text, None, "error", index=self.index, error=fault))
        return True


def logprobs_of(row: list[float], token: int, count: int, decode: Callable[[int], str | None]) -> dict[int, Logprob]:
    """Logprobs by token id: of the token, then of the `count` likeliest tokens."""
    logprobs = {token: Logprob(row[0], int(row[1]), decode(token))}
    for rank in range(1, count + 1):
        logprob, likely = row[1 + rank], int(row[1 + MOST_LOGPROBS + rank])
        if logprob > -math.inf and likely not in logprobs:
            logprobs[likely] = Logprob(logprob, rank, decode(likely))
    return logprobs


def vector_of(pooling: str, parts: list[torch.Tensor], tokens: int) -> bytes:
    """Vector of a prompt as fp32 numbers, from what its chunks have given."""
    last = parts[-1] if pooling == "last" else torch.stack(parts).sum(0) / tokens
    return last.numpy().astype("<f4").tobytes()


class Requests:
    """Reader of requests: prompts as token ids, parameters as the tokens that they mean.

    Collective, with equal arguments on all ranks of `team`.

    no_text  said where a request needs a tokenizer and there is none
    ends     end-of-sequence tokens
    """

    def __init__(
        self,
        team: Team,
        config: EngineConfig,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        no_text: str,
        ends: frozenset[int],
    ) -> None:
        self._team, self._config, self._vocab_size, self.ends = team, config, vocab_size, ends
        self._tokenizer, self._no_text = tokenizer, no_text
        self._reader = None if tokenizer is None else PromptReader(tokenizer, config.max_seq_len)
        self._guides: Guides | None = None  # once a request asks for one
        self._guard: TeamGuard | None = None  # with them
        self._token_texts: dict[bool, TokenTexts | None] = {}  # by skip_special_tokens
        self._checked: SamplingParams | None = None  # the last ones that `_check` has let through
        self._stops: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()

    def encode(self, name: str, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. ValueError if the model cannot read it, or it leaves no room."""
        ids = plain_prompt(name, prompt)
        if isinstance(ids, str):
            if self._tokenizer is None:
                raise ValueError(f"{name}={quoted(ids)} is text, and {self._no_text}; pass token ids")
            ids = self._reader.read(name, ids)
        if not ids:
            raise ValueError(f"{name}={quoted(prompt)} is empty; a prompt needs at least one token")
        most = self._vocab_size - 1
        if not 0 <= min(ids) <= max(ids) <= most:
            index = next(index for index, token in enumerate(ids) if not 0 <= token <= most)
            raise ValueError(f"{name}[{index}]={quoted(ids[index])} is a token id outside 0 .. {most}")
        check_room(name, len(ids), self._config.max_seq_len)
        return ids

    def answer_to(self, ids: list[int], params: SamplingParams, prompt: int, index: int) -> Answer:
        """Answer to a prompt of these ids, whose pieces say `prompt` and `index`."""
        if self._checked is None or params is not self._checked:  # the prompts of a call share theirs
            self._check(params)
            self._checked = params
        room = self._config.max_seq_len - len(ids)
        return Answer(
            prompt=ids,
            params=params,
            adapter=-1 if params.lora is None else list(self._config.lora).index(params.lora),
            budget=room if params.max_tokens is None else min(params.max_tokens, room),
            reads_all=params.prompt_logprobs is not None or params.pooling == "mean",
            adjusted=self._adjusted(params),
            ends=dict.fromkeys(params.stop_token_ids, "stop")
            | ({} if params.ignore_eos else dict.fromkeys(self.ends, "eos")),
            text=self._text_stream(params),
            decode=self._token_text,
            prompt_index=prompt,
            index=index,
        )

    def _check(self, params: SamplingParams) -> None:
        """ValueError for parameters that this engine cannot follow."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={quoted(params)} is not a SamplingParams")
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={quoted(params.stop)} needs text, and {self._no_text}; pass stop_token_ids")
        if params.pooling is not None and self._config.speculative is not None:
            raise ValueError(
                f"pooling={params.pooling!r}: an engine that drafts tokens gives no vectors; leave out speculative"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if (largest := max(getattr(params, name) or (), default=0)) >= self._vocab_size:
                raise ValueError(f"{name} holds {quoted(largest)}, outside 0 .. {self._vocab_size - 1}")
        adapters = self._config.lora or {}
        if params.lora is not None and params.lora not in adapters:
            listed = f"the adapters are {', '.join(adapters)}" if adapters else "this engine has no adapters"
            raise ValueError(f"lora={quoted(params.lora)} is not an adapter here; {listed}")

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        skips = params.skip_special_tokens
        if skips not in self._token_texts:
            self._token_texts[skips] = token_texts(self._tokenizer, keep_special=not skips)
        options = {"keep_stop": params.include_stop_str_in_output, "keep_special": not skips}
        if (stop := self._stops.get(params.stop)) is None:  # the answers of a prompt share it
            stop = self._stops[params.stop] = StopStrings(params.stop)
        return TextStream(self._tokenizer, stop, **options, alone=self._token_texts[skips])

    def _adjusted(self, params: SamplingParams) -> Adjusted | None:
        """Changes of logits that a request asks for."""
        if not params.adjusted:
            return None
        if params.bad_words and self._tokenizer is None:
            raise ValueError(f"bad_words={quoted(params.bad_words)} needs text, and {self._no_text}; pass logit_bias")
        guide = None
        if params.structured_outputs is not None:
            guide = self._grammars().start(params.structured_outputs)
        ends = sorted(self.ends | set(params.stop_token_ids)) if params.min_tokens else []
        adjusted = Adjusted(
            params=params, ends=ends, bad_words=spellings(self._tokenizer, params.bad_words), guide=guide
        )
        adjusted.check_begin(self._vocab_size)
        return adjusted

    def _grammars(self) -> Guides:
        if self._guides is None:
            if self._tokenizer is None:
                raise ValueError(f"structured_outputs need text, and {self._no_text}")
            source = self._tokenizer, self._vocab_size, self.ends
            self._guides = Guides(*source)
            self._guard = TeamGuard(self._team, GrammarGuard(*source, self._config.grammar_seconds))
        return self._guides

    def try_grammars(self, params: Iterable[SamplingParams], settle: Callable[[], None]) -> None:
        """Try the grammars of these requests, as TeamGuard.check does."""
        asked = [one.structured_outputs for one in params if isinstance(one, SamplingParams) and one.structured_outputs]
        if asked:
            self._grammars()
            self._guard.check(asked, settle)

    def prepare(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Have the grammar of a request compiled in a thread. None without one, and for one that is refused."""
        if (asked := params.structured_outputs) is None:
            return None
        try:
            future = self._grammars().prepare(asked)
        except ValueError:
            return None
        self._guard.note(asked)
        return future

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)

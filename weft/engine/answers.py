"""Requests of an engine, and what becomes of their tokens: text, pieces, completions, timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer, decoders

from weft.engine.params import MOST_LOGPROBS
from weft.engine.scheduler import Sequence
from weft.ops.vocab.sample_argmax import EXCLUDED
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


class StopStrings:
    """Automaton of strings.

    A state is the longest ending of the text so far that some string begins with; 0 is the empty one.

    empty    there is no string
    depth    of each state, its length
    longest  of each state, the length of the longest string that ends there, or 0
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.empty = not strings
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.longest = [0], [0]
        for string in strings:
            state = 0
            for letter in string:
                if (after := self._next[state].get(letter)) is None:
                    after = self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = after
            self.longest[state] = len(string)
        # State of the longest shorter ending; states are taken by their depth.
        self._shorter = [0] * len(self._next)
        ordered = list(self._next[0].values())
        for state in ordered:
            for letter, after in self._next[state].items():
                shorter = self._shorter[after] = self._step(self._shorter[state], letter)
                self.longest[after] = self.longest[after] or self.longest[shorter]
                ordered.append(after)

    def advance(self, state: int, text: str, begin: int) -> tuple[int, int]:
        """(state, end) after the characters from `begin` on, or behind the first string that is complete."""
        for index in range(begin, len(text)):
            state = self._step(state, text[index])
            if self.longest[state]:
                return state, index + 1
        return state, len(text)

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)


# Decoders that join tokens' bytes or texts as they are.
JOINING = (decoders.ByteLevel, decoders.Fuse)
# Tokens behind which a character that has not ended is none: it has up to 4 bytes.
MOST_UNDECIDED = 16


class TokenTexts(dict[int, str]):
    """Text of each token by itself, decoded when first asked for.

    "\ufffd" in it stands for bytes that are no character.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool) -> None:
        super().__init__()
        self._decode, self._skip = tokenizer.decode, not keep_special

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode([token_id], skip_special_tokens=self._skip)
        return text


def token_texts(tokenizer: Tokenizer, *, keep_special: bool) -> TokenTexts | None:
    """Texts of tokens by themselves, if these make up the text of all of them.

    None for a decoder that looks at several tokens at once.
    """
    return TokenTexts(tokenizer, keep_special=keep_special) if isinstance(tokenizer.decoder, JOINING) else None


class TextStream:
    """Text of a growing sequence of tokens: pieces that, joined, are the text before a stop string.

    keep_stop     the text ends behind the stop string
    keep_special  special tokens have text too
    alone         `token_texts` with this keep_special: one look-up a token in place of decoding two; None: none are known

    The first stop string that is complete counts. Bytes of an unfinished character, and an ending that may begin a stop string,
    are held back until they are decided; of bytes that are no character the last alone, or each token would decode all of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | tuple[str, ...] = (),
        *,
        keep_stop: bool = False,
        keep_special: bool = False,
        alone: TokenTexts | None = None,
    ) -> None:
        self.tokenizer, self.alone = tokenizer, alone
        self._stops, self._state = stop if isinstance(stop, StopStrings) else StopStrings(stop), 0
        self.keep_stop, self.keep_special = keep_stop, keep_special
        self.token_ids: list[int] = []
        self.held = ""
        # Tokens before `read` are text already; from `first` on they are decoded again with each new one, because some
        # decoders treat the first token differently (a leading blank).
        self.first = self.read = 0
        self.ahead = 0  # characters behind `read` that are text already
        self._given = self._waiting = 0  # characters given out, and those before an unfinished one

    @property
    def length(self) -> int:
        """Number of characters of the text so far, those held back included, without an unfinished one."""
        return self._given + len(self.held) + self._waiting

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text, whether a stop string ended it)."""
        decided = self.read == len(self.token_ids)
        self.token_ids.append(token_id)
        if decided and self.alone is not None and "\ufffd" not in (new := self.alone[token_id]):
            self.first, self.read = self.read, self.read + 1
            if self._stops.empty:
                self._given += len(new)
                return new, False
            self.held += new
            return self._release()
        new = self._new_text()
        self._waiting = 0
        if new and not new.endswith("\ufffd"):
            self.held += new
            self.first, self.read, self.ahead = self.read, len(self.token_ids), 0
        elif len(self.token_ids) - self.read > 2 * MOST_UNDECIDED:
            self.held += new[:-1]
            self.first = self.read = len(self.token_ids) - MOST_UNDECIDED
            self.ahead = len(self._decoded(self.token_ids[self.first :])) - 1
        else:
            self._waiting = len(new.rstrip("\ufffd"))
        return self._release()

    def finish(self) -> tuple[str, bool]:
        """Text that was held back, now that no token follows, as from `push`."""
        self.held += self._new_text()
        self.first, self.read, self.ahead, self._waiting = len(self.token_ids), len(self.token_ids), 0, 0
        text, stopped = self._release()
        self._given += len(self.held)
        rest, self.held, self._state = self.held, "", 0
        return (text, True) if stopped else (text + rest, False)

    def _new_text(self) -> str:
        before = self._decoded(self.token_ids[self.first : self.read])
        return self._decoded(self.token_ids[self.first :])[len(before) + self.ahead :]

    def _decoded(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=not self.keep_special)

    def _release(self) -> tuple[str, bool]:
        # What was held back is what the state stands for.
        state, end = self._stops.advance(self._state, self.held, self._stops.depth[self._state])
        if stop := self._stops.longest[state]:
            text, self.held, self._state = self.held[: end if self.keep_stop else end - stop], "", 0
        else:
            keep = self._stops.depth[state]
            text, self.held, self._state = self.held[: end - keep], self.held[end - keep :], state
        self._given += len(text)
        return text, stop > 0


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
        of_prompt = self._rows_of_prompt() if self.reads_all and not self.tokens else None
        if (fault := self._fault(token, [*rows, *(of_prompt or ())])) is not None:
            return self._end(fault)
        self.tokens.append(token)
        reason, text, offset = self.ends.get(token), None, None
        if reason is not None:
            if self.text is not None:
                text, _ = self.text.finish()
                offset = self.text.length
        else:
            if len(self.tokens) == self.budget:
                reason = "length"
            if self.text is not None:
                offset = self.text.length
                text, stopped = self.text.push(token)
                if reason is not None and not stopped:
                    rest, stopped = self.text.finish()
                    text += rest
                if stopped:
                    reason = "stop"
        piece = Piece(self.prompt_index, text, token, reason, index=self.index)
        if rows:
            logprobs = logprobs_of(row, token, self.params.logprobs, self.decode)
            piece = piece._replace(logprobs=logprobs, offset=offset)
        if of_prompt is not None:
            pairs = zip(of_prompt, self.prompt[1:], strict=True)
            found = [logprobs_of(*pair, self.params.prompt_logprobs, self.decode) for pair in pairs]
            piece = piece._replace(prompt_logprobs=[None, *found])
        self.pieces.append(piece)
        return reason is not None

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
            f"the model's logits are not finite (NaN or infinite) at place {chosen} of the answer, behind a prompt of "
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
    """The token's Logprob, then those of the `count` likeliest tokens, by token id."""
    found = {token: Logprob(row[0], int(row[1]), decode(token))}
    for rank in range(1, count + 1):
        logprob, other = row[1 + rank], row[1 + MOST_LOGPROBS + rank]
        if logprob > -math.inf and int(other) not in found:
            found[int(other)] = Logprob(logprob, rank, decode(int(other)))
    return found

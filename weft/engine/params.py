"""Requests: prompts and sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag
from functools import partial, reduce
from numbers import Integral, Real
from operator import or_
from typing import TYPE_CHECKING, Any

from weft.arguments import (
    check_bool,
    check_choice,
    check_instance,
    check_int,
    check_number,
    check_optional,
    check_utf_8,
    is_integer,
    positive,
    quoted,
    strings_of,
)
from weft.errors import CheckpointError
from weft.runtime.codec import exchangeable
from weft.text.structure import StructuredOutputsParams

if TYPE_CHECKING:
    from weft.models.checkpoint import Checkpoint

Prompt = str | Sequence[int]

# Far beyond a uniform distribution, and times the noise (up to 23) still far from fp32's infinity.
MAX_TEMPERATURE = 1e30
# The range of OpenAI's API; vLLM's server clamps to it.
MAX_LOGIT_BIAS = 100.0
# vLLM's default of max_logprobs.
MOST_LOGPROBS = 20
# Each is at least one of the spellings that a batch slot has room for.
MOST_BAD_WORDS = 128
# The automaton that finds stop strings takes 300 bytes a character.
MOST_STOPS, MOST_CHARACTERS = 1 << 12, 1 << 16
# Vectors of prompts: of the last token, and the mean of all.
POOLINGS = "last", "mean"
# vLLM's limit of n.
MOST_ANSWERS = 1 << 14


class Kind(IntFlag):
    """Kernels that a choice of tokens launches. The union of requests' kinds serves them all.

    GREEDY .. TRUNCATED  kinds of sampling; each has the bits of all earlier ones
    ADJUSTED             logits are changed first: penalties, biases, tokens that are not allowed
    LOGPROBS             log-probabilities of the chosen tokens
    GUIDED               the tokens that a grammar allows; with ADJUSTED
    """

    GREEDY = 0
    SAMPLED = 1
    NUCLEUS = 3
    TRUNCATED = 7
    ADJUSTED = 8
    LOGPROBS = 16
    GUIDED = 32


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. ValueError for an invalid value.

    n               answers to the prompt; all but the first draw with seeds derived from `seed`
    temperature     0: the most likely token (greedy); otherwise tokens are drawn from softmax(logits / temperature)
    top_k           draw only from this many of the most likely tokens, and from tokens as likely as the last; 0 or -1: from all
    top_p           draw only from the most likely tokens, left by top_k and min_p, whose probabilities together reach it
    min_p           draw only from tokens at least min_p times as likely as the most likely one
    presence_penalty    subtracted from the logit of each token that the answer has already
    frequency_penalty   the same, times how often it has it
    repetition_penalty  divides logits above 0, and multiplies logits below, of tokens that prompt or answer have
    logit_bias      added to logits, by token id, before the penalties; in -100 .. 100
    allowed_token_ids  the only tokens that an answer may have; None: all
    bad_words       strings that an answer does not get: never the last token of one whose other tokens stand before it
    max_tokens      of the answer, which is shorter where it would exceed the model's limit
                    None: as long as the model allows
    min_tokens      before these, no end-of-sequence token and none of stop_token_ids is chosen; stop strings do count
    structured_outputs  StructuredOutputsParams: the answer's structure, such as a JSON schema; needs weft[guided]
    logprobs        each token comes with its log-probability and with this many tokens' greatest, up to 20. None: without
    prompt_logprobs  the same for the tokens of the prompt
    pooling         "last" or "mean": with its first token comes a vector of the prompt, the last layer's normed output at the
                    last token of the prompt, or its mean over all tokens; with max_tokens=1 for embeddings. None: without
    seed            of the random numbers, which depend on seed, position and token only; logits still round differently for
                    another world size, batch or GPU, so answers may differ there, on one kind of GPU not with
                    EngineConfig.invariant. None: another one each time
    stop            strings that end an answer; they are not part of it
    include_stop_str_in_output  they are
    stop_token_ids  tokens that end an answer; their text is not part of it
    ignore_eos      continue after an end-of-sequence token
    skip_special_tokens  special tokens give no text
    cache_salt      pages of the KV cache are shared only with requests of the same salt (prefix caching); None: without salt
    lora            name of the adapter that answers (docs/lora.md); None: the model as it is
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 64
    min_tokens: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: str | None = None
    seed: int | None = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        # Plain values, as ranks exchange them, also from NumPy's numbers and strings. Most are defaults, which are.
        for name, plain in _PLAIN.items():
            value, default = getattr(self, name), _DEFAULTS[name]
            if type(value) is not type(default) or value != default:
                object.__setattr__(self, name, plain(name, value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower it")
        if self.min_tokens and self.structured_outputs is not None:
            raise ValueError(
                f"min_tokens={self.min_tokens} with structured_outputs, which say where an answer ends; leave it out"
            )

    @property
    def kind(self) -> Kind:
        kind = Kind.GREEDY
        if self.adjusted:
            kind |= Kind.ADJUSTED
        if self.structured_outputs is not None:
            kind |= Kind.GUIDED
        if self.logprobs is not None:
            kind |= Kind.LOGPROBS
        if self.temperature == 0.0:
            return kind
        if self.top_k or self.min_p:
            return kind | Kind.TRUNCATED
        return kind | (Kind.SAMPLED if self.top_p == 1.0 else Kind.NUCLEUS)

    @property
    def adjusted(self) -> bool:
        """True if some logits are to be changed before a token is chosen."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
            or self.structured_outputs is not None
        )

    def answers(self) -> list[SamplingParams]:
        """Parameters of the n answers, as n requests; the first one scores the prompt."""
        if self.n == 1:
            return [self]
        further = [
            replace(self, n=1, prompt_logprobs=None, pooling=None, seed=derived(self.seed, index, 0xD1B54A32D192ED03))
            for index in range(1, self.n)
        ]
        return [replace(self, n=1), *further]

    def with_options(self, options: Mapping[str, Any]) -> SamplingParams:
        """These parameters with changes by name; None: no change. TypeError for an unknown name."""
        known = [one.name for one in fields(self)]
        if unknown := next((name for name in options if name not in known), None):
            raise TypeError(f"{unknown}= is not a sampling parameter; they are {', '.join(known)}")
        return replace(self, **{name: value for name, value in options.items() if value is not None})


def joint_kind(requests: Iterable[Any]) -> Kind:
    """Kind that serves all these requests, which have a `kind` each."""
    different = {id(one): one for one in requests}  # the prompts of a call share theirs
    return reduce(or_, {one.kind for one in different.values()}, Kind.GREEDY)


def difference(one: object, other: object) -> str:
    """The value for a message; of parameters only what differs."""
    if not isinstance(one, SamplingParams) or not isinstance(other, SamplingParams):
        return quoted(one)
    names = [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]
    return f"SamplingParams({', '.join(f'{name}={quoted(getattr(one, name))}' for name in names)})"


def check_strings(name: str, strings: Sequence[str], most: int, characters: int) -> None:
    """ValueError for more than `most` strings, or for more than `characters` in all together."""
    if len(strings) > most:
        raise ValueError(f"{name} has {len(strings):,} strings; pass at most {most:,}")
    if (together := sum(map(len, strings))) > characters:
        raise ValueError(f"{name} has {together:,} characters in all; pass at most {characters:,}")


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """The value's token ids, each once, in order. ValueError if it is no list of token ids."""
    are_ids = isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, bytearray))
    if not are_ids or not all(is_integer(token) and token >= 0 for token in value):
        raise ValueError(f"{name}={quoted(value)} is not a list of token ids")
    return tuple(sorted(set(map(int, value))))


def _allowed(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not (allowed := _token_ids(name, value)):
        raise ValueError(f"{name} is empty; pass at least one token id, or None for all")
    return allowed


def _bounded(most: int, name: str, value: object) -> tuple[str, ...]:
    """At most `most` strings."""
    strings = strings_of(name, value)
    check_strings(name, strings, most, MOST_CHARACTERS)
    return strings


def _number(low: float, high: float, rule: str, name: str, value: object) -> float:
    """The value as a float. ValueError unless it is a number in low .. high; `rule` names the range."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name}={quoted(value)} is not a number")
    check_number(name, value, low, high, rule)
    return float(value)


def _top_k(name: str, value: object) -> int:
    if not is_integer(value) or not -1 <= value < 1 << 31:
        raise ValueError(f"{name}={quoted(value)} is not a number of tokens, or 0 or -1 for all")
    return max(0, int(value))


def _seed(name: str, value: object) -> int | None:
    if value is not None and (not is_integer(value) or not 0 <= value < 1 << 63):
        raise ValueError(f"{name}={quoted(value)} is not an integer in 0 .. 2**63 - 1, or None")
    return None if value is None else int(value)


def _checked(check: Callable[[str, object], None], name: str, value: bool) -> bool:
    check(name, value)
    return value


def _is_structure(name: str, value: object) -> None:
    check_instance(name, value, StructuredOutputsParams, "a StructuredOutputsParams, or None")


def _salt(name: str, value: object) -> str | None:
    if value is not None:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name}={quoted(value)} is not a non-empty string, or None")
        check_utf_8(name, value)
    return value


def _logit_bias(name: str, value: object) -> dict[int, float] | None:
    """Plain numbers by token id, in order. ValueError unless the value maps token ids to -100 .. 100."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(is_integer(token) and token >= 0 for token in value):
        raise ValueError(f"{name}={quoted(value)} is not a dict of token ids to numbers")
    for token, bias in value.items():
        check_number(f"{name}[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "in [-100, 100]")
    return {int(token): float(bias) for token, bias in sorted(value.items())}


# Function from a field's name and value to its plain value; ValueError for an invalid one.
_PLAIN: dict[str, Callable[[str, Any], Any]] = {
    "stop": partial(_bounded, MOST_STOPS),
    "bad_words": partial(_bounded, MOST_BAD_WORDS),
    "stop_token_ids": lambda name, value: () if value is None else _token_ids(name, value),
    "allowed_token_ids": _allowed,
    "logit_bias": _logit_bias,
    "structured_outputs": partial(_checked, partial(check_optional, _is_structure)),
    "max_tokens": partial(check_optional, positive),
    "min_tokens": partial(check_int, low=0),
    "n": partial(check_int, low=1, high=MOST_ANSWERS),
    "logprobs": lambda name, value: check_optional(check_int, name, value, 0, MOST_LOGPROBS),
    "prompt_logprobs": lambda name, value: check_optional(check_int, name, value, 0, MOST_LOGPROBS),
    "pooling": lambda name, value: check_optional(check_choice, name, value, POOLINGS) or value,
    "temperature": partial(_number, 0, MAX_TEMPERATURE, f"0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}"),
    "top_p": partial(_number, math.ulp(0.0), 1, "in (0, 1]; 1 keeps every token"),
    "top_k": _top_k,
    "min_p": partial(_number, 0, 1, "in [0, 1]; 0 keeps every token"),
    "presence_penalty": partial(_number, -2, 2, "in [-2, 2]; 0 changes nothing"),
    "frequency_penalty": partial(_number, -2, 2, "in [-2, 2]; 0 changes nothing"),
    "repetition_penalty": partial(_number, 1e-30, 1e30, "a positive number; 1 changes nothing"),
    "seed": _seed,
    "ignore_eos": partial(_checked, check_bool),
    "include_stop_str_in_output": partial(_checked, check_bool),
    "skip_special_tokens": partial(_checked, check_bool),
    "cache_salt": _salt,
    "lora": _salt,
}
# Their functions leave them as they are.
_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}


def one_each(params: SamplingParams, prompts: int) -> list[SamplingParams]:
    """Parameters for each prompt of a call, with seeds of their own: equal prompts get different answers.

    The same ones for all where no token is drawn; these go to the ranks once.
    """
    if params.temperature == 0.0:
        return [params] * prompts
    return [replace(params, seed=derived(params.seed, index, 0x9E3779B97F4A7C15)) for index in range(prompts)]


def derived(seed: int | None, index: int, stride: int) -> int | None:
    """Seed number `index` that follows from a seed; None without one."""
    return None if seed is None else (seed + index * stride) % (1 << 63)


def sampling_defaults(checkpoint: Checkpoint) -> SamplingParams:
    """Sampling parameters of generation_config.json. CheckpointError for invalid values."""
    given = checkpoint.generation_defaults()
    same = {
        name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
    }
    tokens = SamplingParams().max_tokens if given.max_new_tokens is None else given.max_new_tokens
    try:
        return SamplingParams(**same, max_tokens=tokens, min_tokens=given.min_new_tokens)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: generation_config.json: {error}") from None


def unused_defaults(checkpoint: Checkpoint) -> list[str]:
    """Warning for settings of generation_config.json that weft does not follow: no line or one."""
    unused = checkpoint.generation_defaults().unused
    if not unused:
        return []
    return [
        f"{checkpoint.directory}: generation_config.json: not used: {', '.join(unused)} (weft follows do_sample, temperature, "
        f"top_k, top_p, min_p, repetition_penalty, max_new_tokens, min_new_tokens, stop_strings and eos_token_id)"
    ]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """List of prompts; one prompt, text or token ids, becomes a list of one. ValueError for other values."""
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts={quoted(prompts)} is not a string, a list of token ids or a list of these")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        prompts = [prompts]
    return [plain_prompt(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def plain_prompt(name: str, prompt: Prompt) -> str | list[int]:
    """A copy in plain values, as ranks exchange them, also of NumPy's integers and other sequences.

    ValueError unless it is text or a sequence of token ids, which bytes and booleans are not.
    """
    if isinstance(prompt, str):
        check_utf_8(name, prompt)
        return str(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise ValueError(f"{name}={quoted(prompt)} is not a string or a list of token ids")
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    for index, token in enumerate(prompt):
        if not is_integer(token):
            raise ValueError(f"{name}[{index}]={quoted(token)} is not a token id")
    return list(map(int, prompt))

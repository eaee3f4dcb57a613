"""Requests: prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING

from weft.arguments import check_bool, check_optional, is_integer, positive, quoted
from weft.errors import CheckpointError
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.models.checkpoint import Checkpoint

Prompt = str | Sequence[int]

# Far beyond a uniform distribution, and times the noise (up to 23) still far from fp32's infinity.
MAX_TEMPERATURE = 1e30


class Kind(IntEnum):
    """Kind of sampling; each also serves the requests of the kinds before it."""

    GREEDY = 0
    SAMPLED = 1
    NUCLEUS = 2
    TRUNCATED = 3


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. ValueError for an invalid value.

    temperature     0: the most likely token (greedy); otherwise tokens are drawn from softmax(logits / temperature)
    top_k           draw only from this many of the most likely tokens, and from those as likely as the last of them; 0 or -1:
                    from all
    top_p           draw only from the most likely tokens whose probabilities together reach it; of those that top_k and min_p
                    leave
    min_p           draw only from tokens at least min_p times as likely as the most likely one
    max_tokens      of the answer, which is shorter where it would exceed the model's limit
                    None: as long as the model allows
    seed            of the random numbers, which depend on seed, position and token only; logits still round differently for
                    another world size, batch or GPU, so answers may differ there. None: another one each time
    stop            strings that end an answer; they are not part of it
    include_stop_str_in_output  they are
    stop_token_ids  tokens that end an answer; their text is not part of it
    ignore_eos      continue after an end-of-sequence token
    skip_special_tokens  special tokens give no text
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 64
    seed: int | None = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Iterable):
            raise ValueError(f"stop={quoted(stop)} is not a string or a list of strings")
        object.__setattr__(self, "stop", tuple(stop))
        token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        are_ids = isinstance(token_ids, (Sequence, Set)) and not isinstance(token_ids, (bytes, bytearray))
        if not are_ids or not all(is_integer(token) and token >= 0 for token in token_ids):
            raise ValueError(f"stop_token_ids={quoted(token_ids)} is not a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(sorted(set(map(int, token_ids)))))
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(value := getattr(self, name), Real) or isinstance(value, bool):
                raise ValueError(f"{name}={quoted(value)} is not a number")
        object.__setattr__(self, "max_tokens", check_optional(positive, "max_tokens", self.max_tokens))
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature={quoted(self.temperature)} is not 0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={quoted(self.top_p)} is not in (0, 1]; 1 keeps every token")
        if not is_integer(self.top_k) or not -1 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k={quoted(self.top_k)} is not a number of tokens, or 0 or -1 for all")
        object.__setattr__(self, "top_k", max(0, int(self.top_k)))
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={quoted(self.min_p)} is not in [0, 1]; 0 keeps every token")
        if self.seed is not None:
            if not is_integer(self.seed) or not 0 <= self.seed < 1 << 63:
                raise ValueError(f"seed={quoted(self.seed)} is not an integer in 0 .. 2**63 - 1, or None")
            object.__setattr__(self, "seed", int(self.seed))
        # Plain values, as ranks exchange them, also from NumPy's numbers and strings.
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop={quoted(self.stop)} holds something that is not a non-empty string")
        object.__setattr__(self, "stop", tuple(map(str, self.stop)))

    @property
    def kind(self) -> Kind:
        if self.temperature == 0.0:
            return Kind.GREEDY
        if self.top_k or self.min_p:
            return Kind.TRUNCATED
        return Kind.SAMPLED if self.top_p == 1.0 else Kind.NUCLEUS


def one_each(params: SamplingParams, prompts: int) -> list[SamplingParams]:
    """Parameters for each prompt of a call, with seeds of their own: equal prompts get different answers."""
    if params.seed is None:
        return [params] * prompts
    return [replace(params, seed=(params.seed + index * 0x9E3779B97F4A7C15) % (1 << 63)) for index in range(prompts)]


def sampling_defaults(checkpoint: Checkpoint) -> SamplingParams:
    """Sampling parameters of generation_config.json. CheckpointError for invalid values."""
    found = checkpoint.generation_defaults()
    tokens = SamplingParams().max_tokens if found.max_new_tokens is None else found.max_new_tokens
    try:
        return SamplingParams(
            temperature=found.temperature,
            top_p=found.top_p,
            top_k=found.top_k,
            min_p=found.min_p,
            max_tokens=tokens,
            stop=found.stop,
        )
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: generation_config.json: {error}") from None


def unused_defaults(checkpoint: Checkpoint) -> list[str]:
    """Warning for settings of generation_config.json that weft does not follow: no line or one."""
    unused = checkpoint.generation_defaults().unused
    if not unused:
        return []
    return [
        f"{checkpoint.directory}: generation_config.json: not used: {', '.join(unused)} (weft follows do_sample, temperature, "
        f"top_k, top_p, min_p, max_new_tokens, stop_strings and eos_token_id)"
    ]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """List of prompts; one prompt, text or token ids, becomes a list of one. ValueError for other values."""
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts={quoted(prompts)} is not a string, a list of token ids or a list of these")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        prompts = [prompts]
    for index, prompt in enumerate(prompts):
        check_prompt(f"prompts[{index}]", prompt)
    # Plain values, as ranks exchange them, also from NumPy's integers and other sequences.
    return [str(prompt) if isinstance(prompt, str) else list(map(int, prompt)) for prompt in prompts]


def check_prompt(name: str, prompt: Prompt) -> None:
    """ValueError unless it is text or a sequence of token ids, which bytes and booleans are not."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise ValueError(f"{name} is not text that UTF-8 can hold: {error}") from None
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise ValueError(f"{name}={quoted(prompt)} is not a string or a list of token ids")
    for index, token in enumerate(prompt):
        if not is_integer(token):
            raise ValueError(f"{name}[{index}]={quoted(token)} is not a token id")

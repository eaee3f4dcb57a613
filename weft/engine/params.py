"""What a request asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING

from weft.arguments import check_bool, is_integer, positive, quoted
from weft.errors import CheckpointError
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.models.checkpoint import Checkpoint

Prompt = str | Sequence[int]

HOTTEST = 1e30  # all words have long been alike, and times the noise, of up to 23, it is still far from fp32's infinity


class Kind(IntEnum):
    """How much the choice of a token takes: each can do what those before it can."""

    GREEDY = 0
    SAMPLED = 1
    NUCLEUS = 2


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature 0: the most likely token; else one drawn from softmax(logits / temperature).

    top_p       only the most likely tokens that together reach it are drawn
    max_tokens  of the answer; it is shorter where it would outgrow the model
    seed        fixes the random numbers, which depend on seed, position and token only. Logits still round differently for
                another world size, batch or GPU, so an answer may change there
    stop        strings that end an answer, and are not part of it
    stop_token_ids  tokens that do, whose text is not part of it
    ignore_eos  go on after an end-of-sequence token

    ValueError for a value that means nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 64
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

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
        for name in ("temperature", "top_p"):
            if not isinstance(value := getattr(self, name), Real) or isinstance(value, bool):
                raise ValueError(f"{name}={quoted(value)} is not a number")
        object.__setattr__(self, "max_tokens", positive("max_tokens", self.max_tokens))
        if not 0 <= self.temperature <= HOTTEST:
            raise ValueError(
                f"temperature={quoted(self.temperature)} is not 0 (greedy) or a positive number up to {HOTTEST:g}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={quoted(self.top_p)} is not in (0, 1]; 1 keeps every token")
        if not is_integer(self.seed) or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={quoted(self.seed)} is not an integer in 0 .. 2**63 - 1")
        object.__setattr__(self, "seed", int(self.seed))
        # Plain values, as ranks exchange them: NumPy's numbers and strings are welcome, too.
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        check_bool("ignore_eos", self.ignore_eos)
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop={quoted(self.stop)} holds something that is not a non-empty string")
        object.__setattr__(self, "stop", tuple(map(str, self.stop)))

    @property
    def kind(self) -> Kind:
        if self.temperature == 0.0:
            return Kind.GREEDY
        return Kind.SAMPLED if self.top_p == 1.0 else Kind.NUCLEUS


def one_each(params: SamplingParams, prompts: int) -> list[SamplingParams]:
    """The same for every prompt of a call, but each with its own seed, so that one prompt given twice is answered twice."""
    return [replace(params, seed=(params.seed + index * 0x9E3779B97F4A7C15) % (1 << 63)) for index in range(prompts)]


def sampling_defaults(checkpoint: Checkpoint) -> SamplingParams:
    """Parameters by generation_config.json. CheckpointError for values that mean nothing."""
    found = checkpoint.generation_defaults()
    tokens = SamplingParams().max_tokens if found.max_new_tokens is None else found.max_new_tokens
    try:
        return SamplingParams(temperature=found.temperature, top_p=found.top_p, max_tokens=tokens, stop=found.stop)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: generation_config.json: {error}") from None


def unused_defaults(checkpoint: Checkpoint) -> list[str]:
    """At most one line, on what generation_config.json asks for and weft does not do."""
    unused = checkpoint.generation_defaults().unused
    if not unused:
        return []
    return [
        f"{checkpoint.directory}: generation_config.json: not used: {', '.join(unused)} (weft follows do_sample, temperature, "
        f"top_p, max_new_tokens, stop_strings and eos_token_id)"
    ]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, text or token ids, is a list of one. ValueError for what is no prompt, before a rank meets with it."""
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts={quoted(prompts)} is not a string, a list of token ids or a list of these")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        prompts = [prompts]
    for index, prompt in enumerate(prompts):
        check_prompt(f"prompts[{index}]", prompt)
    # Plain values, as ranks exchange them: NumPy's integers and any sequence are welcome, too.
    return [str(prompt) if isinstance(prompt, str) else list(map(int, prompt)) for prompt in prompts]


def check_prompt(name: str, prompt: Prompt) -> None:
    """Bytes and booleans are integers to Python, and not token ids."""
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

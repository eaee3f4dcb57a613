"""Requests of the proof, their answers as bits, and the first bit that differs."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.engine.answers import Completion
    from weft.engine.params import SamplingParams

# Requests that compare the likeliest tokens too, and how many tokens of each place.
WITH_TOP, TOP = 8, 5


class Request(NamedTuple):
    """A prompt and how it is answered."""

    prompt: list[int]
    params: SamplingParams


class Bits(NamedTuple):
    """Token ids and the bits of their fp32 log-probabilities.

    Of an answer, or of a prompt without its first token.
    top  bits of the likeliest tokens of each place, as text; () where they were not asked for
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[int, ...] = ()
    top: tuple[str, ...] = ()


class Answered(NamedTuple):
    """Result of a request; ``prompt`` is empty where its log-probabilities were not asked for."""

    answer: Bits
    prompt: Bits = Bits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First bit that differs. request, place: of its answer or prompt (``part``); expected, given: as text"""

    request: int
    part: str
    place: int
    expected: str
    given: str

    def __str__(self) -> str:
        return f"request {self.request}, {self.part} token {self.place}: {self.given}, expected {self.expected}"


def requests_of(count: int, vocab_size: int, longest: int, new_tokens: int, seed: int = 0) -> list[Request]:
    """``count`` requests of random tokens, greedy and sampled.

    Some have a first half in common, some repeat a few tokens.
    longest  tokens of a prompt at most. A repeated prompt makes n-gram drafts that are accepted
    """
    from weft.engine.params import SamplingParams

    generator, made = random.Random(seed), []
    shared = [generator.choices(range(vocab_size), k=max(1, longest // 2)) for _ in range(4)]
    for index in range(count):
        length = generator.randint(max(1, longest // 16), longest)
        prompt = generator.choices(range(vocab_size), k=length)
        if index % 3 == 1 and length > longest // 2:
            prompt[: longest // 2] = shared[index % 4]
        elif index % 3 == 2:
            period = prompt[: max(1, min(length // 3, 24))]
            prompt = (period * (length // len(period) + 1))[:length]
        sampling: dict[str, Any] = ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50})[
            index % 3
        ]
        params = SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, seed=index, logprobs=TOP if index < WITH_TOP else 0, **sampling
        )
        made.append(Request(prompt, params))
    return made


def scored(request: Request) -> Request:
    """The request, which also asks for log-probabilities of its prompt."""
    return request._replace(params=replace(request.params, prompt_logprobs=0))


def finished(request: Request, answer: Bits) -> Request:
    """One forward pass over prompt and answer, as a trainer makes it."""
    params = replace(request.params, max_tokens=1, logprobs=None, prompt_logprobs=0, temperature=0.0)
    return Request([*request.prompt, *answer.tokens], params)


def bits_of(completion: Completion, request: Request) -> Answered:
    """Bits of a completion."""
    answer = _bits(completion.token_ids, completion.logprobs or (), bool(request.params.logprobs))
    prompt = _bits(request.prompt[1:], (completion.prompt_logprobs or [None])[1:], False)
    return Answered(answer, prompt)


def _bits(tokens: Sequence[int], logprobs: Sequence[Any], with_top: bool) -> Bits:
    if not logprobs:
        return Bits(tuple(tokens))
    own = tuple(_word(likely[token].logprob) for token, likely in zip(tokens, logprobs, strict=True))
    top = tuple(
        " ".join(f"{token}:{_word(one.logprob):08x}:{one.rank}" for token, one in likely.items()) for likely in logprobs
    )
    return Bits(tuple(tokens), own, top if with_top else ())


def _word(logprob: float) -> int:
    """Bits of a number that was an fp32."""
    return struct.unpack("<I", struct.pack("<f", logprob))[0]


def compare(expected: Sequence[Answered], given: Sequence[Answered]) -> tuple[int, int, Difference | None]:
    """(places compared, places that differ, the first one) of answers to the same requests."""
    compared, differing, first = 0, 0, None
    for request, (one, other) in enumerate(zip(expected, given, strict=True)):
        for part in ("answer", "prompt"):
            count, places = _differing(getattr(one, part), getattr(other, part))
            compared, differing = compared + count, differing + len(places)
            if places and first is None:
                at = places[0]
                texts = (_place(bits, at) for bits in (getattr(one, part), getattr(other, part)))
                first = Difference(
                    request=request, part=part, place=at, **dict(zip(("expected", "given"), texts, strict=True))
                )
    return compared, differing, first


def _differing(expected: Bits, given: Bits) -> tuple[int, list[int]]:
    """(places compared, places that differ); log-probabilities count where both have them."""
    if not expected.tokens or not given.tokens or not (expected.logprobs and given.logprobs):
        return 0, []
    longest = max(len(expected.tokens), len(given.tokens))
    return longest, [at for at in range(longest) if _of(expected, at) != _of(given, at)]


def _of(bits: Bits, at: int) -> tuple[Any, ...]:
    return tuple(part[at] if at < len(part) else None for part in bits)


def _place(bits: Bits, at: int) -> str:
    token, word, top = _of(bits, at)
    if token is None:
        return "no token"
    value = struct.unpack("<f", struct.pack("<I", word))[0]
    return f"token {token} with log-probability {value:.9g} ({word:#010x})" + (f", likeliest {top}" if top else "")

"""Load that a server is planned for, a JSON file: arrivals, lengths, shared prefixes and targets."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.arguments import check_int, check_number, did_you_mean, is_integer, quoted
from weft.runtime.files import text_of

SCHEMA = 1
KNOWN = (
    "schema", "arrivals_per_second", "concurrency", "prompt_tokens", "answer_tokens", "shared_prefix", "targets", "drafts",
)  # fmt: skip
TARGETS = ("first_token_seconds", "token_seconds")
DRAFTS = ("method", "acceptance", "most")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of a number of tokens: values, ascending, each with its share."""

    values: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(value * share for value, share in zip(self.values, self.shares, strict=True))

    @property
    def largest(self) -> int:
        return self.values[-1]

    def percentile(self, share: float) -> int:
        """Smallest value that at least ``share`` of all do not exceed."""
        total = 0.0
        for value, one in zip(self.values, self.shares, strict=True):
            total += one
            if total >= share - 1e-9:
                return value
        return self.values[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Speculation that the load allows.

    acceptance  probability that a drafted token is accepted, after accepted ones
    """

    method: str
    acceptance: float
    most: int = 4

    def tokens(self, drafts: int) -> float:
        """Tokens of a step with ``drafts`` drafts, in the mean."""
        return sum(self.acceptance**place for place in range(drafts + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of all servers together.

    arrivals_per_second  of requests; None: ``concurrency`` requests are always there
    prompt, answer       tokens of requests
    shared_prefix        share of a prompt's tokens that is cached, in the mean
    first_token_seconds, token_seconds  targets in the mean; None: there is none
    drafts               None: no speculation
    """

    arrivals_per_second: float | None
    concurrency: int | None
    prompt: Lengths
    answer: Lengths
    shared_prefix: float = 0.0
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    drafts: Drafts | None = None

    @property
    def new_tokens(self) -> float:
        """Prompt tokens that are computed, in the mean."""
        return max(1.0, self.prompt.mean * (1 - self.shared_prefix))

    @property
    def context(self) -> int:
        """Tokens that a decode step attends to, in the mean of an answer."""
        return max(1, round(self.prompt.mean + (self.answer.mean + 1) / 2))

    @property
    def longest(self) -> int:
        return self.prompt.largest + self.answer.largest


def read(path: Path) -> Load:
    """Load of a file. ValueError, with file and field, for another content."""
    try:
        return of(json.loads(text_of(path)))
    except (OSError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"--load {path} cannot be read as JSON: {error}; write one as docs/planning.md shows"
        ) from None
    except ValueError as error:
        raise ValueError(f"--load {path}: {error}") from None


def of(content: object) -> Load:
    """Load of a file's content. ValueError, with the field, its value and the rule."""
    if not isinstance(content, Mapping):
        raise ValueError("it is not an object of a load's fields")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"schema={quoted(content.get('schema'))} is not {SCHEMA}")
    _only("", content, KNOWN)
    rate, concurrency = content.get("arrivals_per_second"), content.get("concurrency")
    if (rate is None) == (concurrency is None):
        raise ValueError("arrivals_per_second and concurrency: a load has one of both; pass one")
    if rate is not None:
        rate = _number("arrivals_per_second", rate, 1e-6, 1e6)
    if concurrency is not None:
        concurrency = check_int("concurrency", concurrency, 1, 1 << 20)
    targets = content.get("targets", {})
    _only("targets.", targets, TARGETS)
    drafts = content.get("drafts")
    return Load(
        arrivals_per_second=rate,
        concurrency=concurrency,
        prompt=_lengths("prompt_tokens", content.get("prompt_tokens")),
        answer=_lengths("answer_tokens", content.get("answer_tokens")),
        shared_prefix=_number("shared_prefix", content.get("shared_prefix", 0.0), 0.0, 1.0),
        drafts=None if drafts is None else _drafts(drafts),
        **{name: _number(f"targets.{name}", value, 1e-6, 1e6) for name, value in targets.items()},
    )


def _only(prefix: str, content: object, known: tuple[str, ...]) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{prefix[:-1]}={quoted(content)} is not an object with {', '.join(known)}")
    for name in content:
        if name not in known:
            raise ValueError(f"{prefix}{name} is not one of {', '.join(known)}{did_you_mean(name, known)}")


def _number(name: str, value: object, low: float, high: float) -> float:
    check_number(name, value, low, high, f"a number in {low:g} .. {high:g}")
    return float(value)


def _drafts(content: object) -> Drafts:
    _only("drafts.", content, DRAFTS)
    assert isinstance(content, Mapping)
    method = content.get("method", "ngram")
    if method not in ("ngram", "mtp", "eagle3", "draft_model"):
        raise ValueError(f"drafts.method={quoted(method)} is not one of ngram, mtp, eagle3, draft_model")
    acceptance = _number("drafts.acceptance", content.get("acceptance"), 0.0, 1.0)
    return Drafts(method=method, acceptance=acceptance, most=check_int("drafts.most", content.get("most", 4), 1, 8))


def _lengths(name: str, given: Any) -> Lengths:
    """A number, a list of numbers, or percentiles, {"50": 300, "90": 1200}, with even values between them."""
    if isinstance(given, Mapping):
        _only(f"{name}.", given, ("percentiles",))
        return _of_percentiles(name, given.get("percentiles"))
    values = given if isinstance(given, list) else [given]
    if not values or not all(_is_count(value) for value in values):
        raise ValueError(
            f"{name}={quoted(given)} is not a number of tokens, a list of some, or an object with percentiles"
        )
    counts = Counter(sorted(values))
    return Lengths(tuple(counts), tuple(count / len(values) for count in counts.values()))


def _of_percentiles(name: str, given: object) -> Lengths:
    rule = (
        f'{name}.percentiles={quoted(given)} is not an object such as {{"50": 300, "90": 1200, "99": 4000}}, ascending'
    )
    if not isinstance(given, Mapping) or not given:
        raise ValueError(rule)
    try:
        points = sorted((float(place), value) for place, value in given.items())
    except (TypeError, ValueError):
        raise ValueError(rule) from None
    places, values = zip(*points, strict=True)
    rising = all(_is_count(value) for value in values) and list(values) == sorted(values)
    if not rising or not 0 <= places[0] <= places[-1] <= 100:
        raise ValueError(rule)
    shares: dict[int, float] = {}
    below, least = 0.0, values[0]
    for place, value in points:
        # The middle of the values between two percentiles has the share of all.
        middle = math.ceil((least + value) / 2)
        shares[middle] = shares.get(middle, 0.0) + (place - below) / 100
        below, least = place, value
    shares[values[-1]] = shares.get(values[-1], 0.0) + 1 - below / 100
    ordered = sorted((value, share) for value, share in shares.items())
    # Of the largest percentile some value must be, so that memory is planned for it.
    return Lengths(tuple(value for value, _ in ordered), tuple(share for _, share in ordered))


def _is_count(value: object) -> bool:
    return is_integer(value) and 1 <= value <= 1 << 24

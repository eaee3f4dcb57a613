"""Load of a server, point by point: arrivals, prompts, and the figures of what came back."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.arguments import is_integer, quoted
from weft.bench.serving.client import Answered, Ask, Target, run
from weft.runtime.files import text_of

# Seconds that processes of clients have to start, and then to connect.
START_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of one point: one of the two.

    rate         requests per second, with exponential gaps (open loop)
    concurrency  requests at a time; one ends, the next begins (closed loop)
    """

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.concurrency is None else f"{self.concurrency} at a time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Figures of one load, times in milliseconds as {"mean", "p50", "p99"}.

    seconds        from the first request to the last token
    ttft           from sending a request to its first token
    tpot           per token after the first, of a request with several
    e2e            from sending a request to its last token
    tokens_per_second  generated, of all requests
    client_busy    share of the time that a client's processor worked: above 0.8 its times are too long
    latest         by how much a request was sent after it was due
    error          the first one
    """

    rate: float | None
    concurrency: int | None
    completed: int
    failed: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    prompt_tokens: int
    tokens: int
    ttft: dict[str, float]
    tpot: dict[str, float]
    e2e: dict[str, float]
    client_busy: float
    latest: float
    error: str | None


def random_asks(
    count: int, input_tokens: tuple[int, int], output_tokens: tuple[int, int], vocab_size: int, seed: str
) -> list[Ask]:
    """Requests with prompts of random token ids, of lengths drawn evenly from (shortest, longest)."""
    draw = random.Random(seed)
    return [
        Ask(prompt=draw.choices(range(vocab_size), k=draw.randint(*input_tokens)), tokens=draw.randint(*output_tokens))
        for _ in range(count)
    ]


def asks_of(file: Path, count: int, tokens: int) -> list[Ask]:
    """Requests of a file's lines, {"prompt": ..., "max_tokens": ...}, repeated where there are too few."""
    asks = []
    try:
        text = text_of(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--file {file} cannot be read: {error}; pass a file of text in UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line)
            prompt, most = content["prompt"], content.get("max_tokens", tokens)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f'--file {file}:{number}: not a line as {{"prompt": "…", "max_tokens": 16}}') from None
        if not isinstance(prompt, (str, list)) or not prompt or not is_integer(most) or most < 1:
            raise ValueError(
                f"--file {file}:{number}: prompt={quoted(prompt)}, max_tokens={quoted(most)} is no request"
            )
        asks.append(Ask(prompt=prompt, tokens=most))
    if not asks:
        raise ValueError(f"--file {file} is empty; write a prompt to each line")
    return [asks[index % len(asks)] for index in range(count)]


def timed(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """The requests as a Poisson process of `rate` per second; all at once for an infinite rate."""
    draw, at, placed = random.Random(seed), 0.0, []
    for ask in asks:
        placed.append(replace(ask, at=at))
        at += draw.expovariate(rate) if rate != math.inf else 0.0
    return placed


def measure(target: Target, asks: Sequence[Ask], load: Load, seed: int, clients: int) -> Point:
    """Send the requests under a load, by `clients` processes, and sum up what came back."""
    if load.rate is not None:
        asks = timed(asks, load.rate, seed)
    clients = min(clients, load.concurrency or clients, len(asks))
    if clients == 1:
        shares_of_load = [share_of(target, asks, load.concurrency, time.monotonic() + START_SECONDS)]
    else:
        # Spawned: a fork of a process with threads may hang.
        with ProcessPoolExecutor(clients, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_imported, [START_SECONDS] * clients))
            start = time.monotonic() + START_SECONDS
            shares = [
                pool.submit(share_of, target, asks[one::clients], _part(load.concurrency, one, clients), start)
                for one in range(clients)
            ]
            shares_of_load = [share.result() for share in shares]
    answers = [answer for share, _ in shares_of_load for answer in share]
    return summed(load, answers, max(busy for _, busy in shares_of_load))


def _imported(seconds: float) -> None:
    """Sleep in a process that has imported this module, and the client."""
    time.sleep(seconds)


def share_of(
    target: Target, asks: Sequence[Ask], concurrency: int | None, start: float
) -> tuple[list[Answered], float]:
    """Answers to one client's requests, and the share of the time that its processor worked."""
    return asyncio.run(run(target, asks, concurrency, start))


def _part(concurrency: int | None, one: int, clients: int) -> int | None:
    return None if concurrency is None else len(range(one, concurrency, clients))


def summed(load: Load, answers: Sequence[Answered], busy: float) -> Point:
    """Figures of a point. ValueError where no request was answered."""
    good = [answer for answer in answers if answer.error is None]
    error = next((answer.error for answer in answers if answer.error is not None), None)
    if not good:
        raise ValueError(f"none of {len(answers)} requests was answered; the first: {error}")
    seconds = max(answer.last for answer in good) - min(answer.sent for answer in good)
    tokens = sum(answer.tokens for answer in good)
    several = [answer for answer in good if answer.tokens > 1]
    return Point(
        rate=load.rate,
        concurrency=load.concurrency,
        completed=len(good),
        failed=len(answers) - len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=tokens / seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        tokens=tokens,
        ttft=_spread([answer.first - answer.sent for answer in good]),
        tpot=_spread([(answer.last - answer.first) / (answer.tokens - 1) for answer in several]),
        e2e=_spread([answer.last - answer.sent for answer in good]),
        client_busy=busy,
        latest=max(answer.late for answer in good),
        error=error,
    )


def _spread(seconds: list[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty without values. A percentile is one of the values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = {"p50": 0.50, "p99": 0.99}
    ranks = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    return {name: 1e3 * value for name, value in {"mean": sum(ordered) / len(ordered), **ranks}.items()}


def as_json(points: Sequence[Point], about: dict[str, Any]) -> str:
    """Points as text. An infinite rate is "inf", since JSON has no infinity."""
    as_dicts = [asdict(point) for point in points]
    for point in as_dicts:
        if point["rate"] == math.inf:
            point["rate"] = "inf"
    return json.dumps({**about, "points": as_dicts}, indent=1, allow_nan=False) + "\n"

"""Command `weft bench serve`: flags to loads, output of their figures."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from weft.arguments import check_int, positive, shortened
from weft.console import (
    TypedFlags,
    api_key_of,
    check_output,
    from_flags,
    notices,
    numbers,
    one_line_errors,
    option,
    progress,
    words,
)
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.bench.serving.client import Ask
    from weft.bench.serving.points import Load, Point

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchFlags(TypedFlags):
    """Flags of `weft bench serve`."""

    url: str = option("http://127.0.0.1:8000/v1", "URL of a server with OpenAI's API, such as vLLM's, with /v1")
    model: str | None = option(None, "Name of the model [default: the first that the server names]")
    api_key: str | None = option(
        None, "Key to send as a bearer token; `ps` shows it to other users [default: WEFT_API_KEY in the environment]"
    )
    api_key_file: Path | None = option(None, "File that holds the key, in place of --api-key")
    rates: str | None = option(None, "Poisson arrivals per second, as in 1,4,16; inf: all at once (open loop)")
    concurrency: str | None = option(
        None, "Requests at a time, as in 1,8,32 (closed loop) [default: 1,8,32, without --rates]"
    )
    requests: int = option(128, "Number of requests for each rate and concurrency")
    input_tokens: str = option("1024", "Random token ids in a prompt, as in 1024 or 128-2048")
    output_tokens: str = option("128", "Tokens of an answer, as in 128 or 16-256")
    vocab_size: int = option(1000, "Random token ids are below this number")
    file: Path | None = option(
        None, 'File of prompts, a line each as {"prompt": "…", "max_tokens": 16}, in place of random ones'
    )
    warmup: int = option(8, "Number of requests that are not measured, before each rate and concurrency")
    clients: int = option(1, "Number of processes that send requests: more where one is too busy")
    seed: int = option(0, "Seed of prompts and arrivals")
    json: Path | None = option(None, "Write the results to this file, after every rate")
    traceback: bool = option(False, "Show where an error came from")


def serve(flags: ServeBenchFlags) -> None:
    """Time a server under load: first token, time per token, throughput. Exit status 1: a request failed."""
    with one_line_errors(flags.traceback):
        if find_spec("httpx") is None:
            raise WeftError("weft bench serve needs httpx; install it: pip install httpx")
        from weft.bench.serving.client import Target, models_of
        from weft.bench.serving.points import Load, as_json, measure
        from weft.runtime.files import put

        check_output("--json", flags.json)
        for name in ("requests", "clients"):
            positive(f"--{name}", getattr(flags, name))
        check_int("--warmup", flags.warmup, 0)
        if flags.file is not None and (given := flags.given("input_tokens", "vocab_size")):
            raise ValueError(
                f"{next(iter(given))} is of random prompts, and --file {flags.file} names prompts; leave one out"
            )
        loads = _loads(flags)
        # Other prompts for each load: a server may keep what it has read.
        asks = [_asks(flags, number) for number in range(len(loads))]
        api_key = api_key_of(flags.api_key, flags.api_key_file)
        target = Target(url=flags.url.rstrip("/"), model=flags.model or "", api_key=api_key)
        if not flags.model:
            target = replace(target, model=models_of(target)[0])
        about = {
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(["weft", *_without(flags.api_key, sys.argv[1:])]),
            "url": target.url,
            "model": target.model,
        }
        points: list[Point] = []
        with progress(True) as say:
            for load, (measured, unmeasured) in zip(loads, asks, strict=True):
                say(f"{target.model}: {load}, {flags.requests} requests")
                if unmeasured:  # at once, so that the server has captured its graphs for about this many
                    together = Load(concurrency=min(len(unmeasured), load.concurrency or len(unmeasured)))
                    measure(target, unmeasured, together, flags.seed, 1)
                points.append(measure(target, measured, load, flags.seed, flags.clients))
                if flags.json is not None:
                    put(flags.json, as_json(points, about))
        Console().print(_table(f"{target.model} at {target.url}", points))
        _say_warnings(points)
    raise typer.Exit(1 if any(point.failed for point in points) else 0)


command = from_flags(ServeBenchFlags, serve)


def _without(key: str | None, words: Sequence[str]) -> list[str]:
    """Words of a command line without the key."""
    return [word.replace(key, "KEY") if key else word for word in words]


def _loads(flags: ServeBenchFlags) -> list[Load]:
    from weft.bench.serving.points import Load

    by_rate = [Load(rate=_rate(word)) for word in words("rates", flags.rates)]
    given = flags.concurrency or (None if by_rate else "1,8,32")
    return by_rate + [Load(concurrency=count) for count in numbers("concurrency", given)]


def _rate(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"--rates {shortened(word)} is not a positive number of requests per second, or inf")
    return rate


def _asks(flags: ServeBenchFlags, number: int) -> tuple[list[Ask], list[Ask]]:
    """Requests of a load, and of its warm-up."""
    from weft.bench.serving.points import asks_of, random_asks

    count = flags.requests + flags.warmup
    outputs = _lengths("--output-tokens", flags.output_tokens)
    if flags.file is not None:
        asks = asks_of(flags.file, count, outputs[1])
    else:
        inputs, vocab_size = _lengths("--input-tokens", flags.input_tokens), positive("--vocab-size", flags.vocab_size)
        asks = random_asks(count, inputs, outputs, vocab_size, f"{flags.seed}/{number}")
    return asks[: flags.requests], asks[flags.requests :]


def _lengths(flag: str, text: str) -> tuple[int, int]:
    """Shortest and longest of `128` or `128-2048`."""
    shortest, _, longest = text.partition("-")
    parts = shortest, longest or shortest
    if not all(part.isascii() and part.isdigit() for part in parts) or not 0 < int(parts[0]) <= int(parts[1]):
        raise ValueError(f"{flag} {shortened(text)} is not a number of tokens, as in 128, or a range, as in 128-2048")
    return int(parts[0]), int(parts[1])


def _table(title: str, points: list[Point]) -> Table:
    table = Table(title=title)
    for column in ("load", "answered", "requests/s", "tokens/s"):
        table.add_column(column, justify="right")
    for column in ("first token", "per token", "whole"):
        table.add_column(f"{column}, ms\np50", justify="right")
        table.add_column("\np99", justify="right")
    for point in points:
        load = f"{point.rate:g}/s" if point.concurrency is None else f"{point.concurrency} at a time"
        times = [
            f"{spread[at]:.2f}" if spread else ""
            for spread in (point.ttft, point.tpot, point.e2e)
            for at in ("p50", "p99")
        ]
        answered = f"{point.completed}/{point.completed + point.failed}"
        table.add_row(load, answered, f"{point.requests_per_second:.2f}", f"{point.tokens_per_second:.1f}", *times)
    return table


def _say_warnings(points: list[Point]) -> None:
    if busy := [point.client_busy for point in points if point.client_busy > 0.8]:
        notices.warning(
            "weft: the client was busy %.0f%% of the time, so times are too long; pass --clients", 100 * max(busy)
        )
    for error in dict.fromkeys(point.error for point in points if point.error):
        notices.warning("weft: a request failed: %s", shortened(error))

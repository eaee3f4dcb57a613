"""Client of a benchmark: sends requests to a server when they are due, and times their tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from weft.arguments import is_integer, shortened

# Longer than any answer takes; a server that has gone fails at once.
TIMEOUT_SECONDS = 3600.0
# For each status of a list of models.
REMEDIES = {
    401: "pass the server's key by --api-key-file or WEFT_API_KEY",
    403: "pass a key that may list them",
    404: "pass the URL up to /v1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: `prompt` as text or token ids, sent `at` seconds after the start."""

    prompt: str | list[int]
    tokens: int
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Server and model. ``url``: up to /v1."""

    url: str
    model: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"--url {shortened(self.url)} is no URL of a server; pass one as in http://127.0.0.1:8000/v1"
            )

    @property
    def headers(self) -> dict[str, bytes]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}".encode()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Times of a request, in seconds since the start of the run; `error`: why it has no answer.

    late  by how much it was sent after it was due
    """

    sent: float
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    late: float = 0.0
    error: str | None = None


def models_of(target: Target) -> list[str]:
    """Names of the models that the server has, one at least. ValueError where it does not say."""
    flag = f"--url {target.url}"
    try:
        answer = httpx.get(f"{target.url}/models", headers=target.headers, timeout=30)
    except httpx.HTTPError as error:
        remedy = "start weft serve there, or pass another --url"
        raise ValueError(f"{flag}: no list of models comes from it ({shortened(error)}); {remedy}") from None
    if answer.status_code != 200:
        remedy = REMEDIES.get(answer.status_code, "see the server's log")
        raise ValueError(f"{flag}: status {answer.status_code} for its list of models; {remedy}")
    try:
        models = [model["id"] for model in answer.json()["data"]]
        if not all(isinstance(model, str) for model in models):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(
            f"{flag}: what it sends is no list of models of OpenAI's API; pass the URL up to /v1, or --model"
        ) from None
    if not models:
        raise ValueError(f"{flag}: its list of models is empty; pass --model, or have the server load one")
    return models


async def run(
    target: Target, asks: Sequence[Ask], concurrency: int | None, start: float
) -> tuple[list[Answered], float]:
    """Send requests, `concurrency` at a time, or if None each when it is due.

    Returns their times, and the share of the time since the start that this process worked.

    start  zero of all times, by time.monotonic(): none is sent before it

    Until then the client asks for the list of models: its process imports modules with the first request, which takes 0.1 s
    and is not the server's time.
    """
    turn = asyncio.Semaphore(concurrency or len(asks))
    context = httpx.create_ssl_context()
    # A client for each request at a time: a pool of connections looks at all connections before each request.
    idle: list[httpx.AsyncClient] = []

    async def one(ask: Ask) -> Answered:
        async with turn:
            due = start + ask.at
            if concurrency is None:
                await asyncio.sleep(due - time.monotonic())
            http = idle.pop() if idle else await clients.enter_async_context(new())
            sent = time.monotonic()
            try:
                first, last, usage = await _answer(http, target.model, ask)
            except (httpx.HTTPError, ValueError, RecursionError) as error:
                return Answered(sent=sent - start, error=" ".join(f"{type(error).__name__}: {error}".split()))
            finally:
                idle.append(http)
            return Answered(
                sent=sent - start,
                first=first - start,
                last=last - start,
                prompt_tokens=usage["prompt_tokens"],
                tokens=usage["completion_tokens"],
                late=sent - due if concurrency is None else 0.0,
            )

    def new() -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=target.url, headers=target.headers, timeout=TIMEOUT_SECONDS, verify=context)

    async with AsyncExitStack() as clients:
        idle += [await clients.enter_async_context(new()) for _ in range(min(concurrency or 1, len(asks)))]
        with suppress(httpx.HTTPError):  # requests will say it
            await idle[0].get("/models")
        await asyncio.sleep(start - time.monotonic())
        worked = time.process_time()
        answers = await asyncio.gather(*map(one, asks))
        return answers, (time.process_time() - worked) / max(time.monotonic() - start, 1e-9)


async def _answer(http: httpx.AsyncClient, model: str, ask: Ask) -> tuple[float, float, dict[str, int]]:
    """Times of the first and the last event with tokens, and the usage. ValueError without them."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = newest = 0.0
    event, rest = b"", b""
    async with http.stream("POST", "/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:300].decode(errors='replace')}")
        async for data in answer.aiter_raw():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith((b"data: {", b"data:{")):  # no comment, and not the end
                    # The last event has the usage, and the one before it the last token, unless that comes with the usage.
                    # Only the last is decoded, since decoding all lines would keep the client busy.
                    event, last, newest = line, newest, time.monotonic()
                    first = first or newest
    usage, is_apart = _usage(event)  # raises for an error in place of it
    return first, last if is_apart else newest, usage


def _usage(event: bytes) -> tuple[dict[str, int], bool]:
    """The usage, and True if its event has no token."""
    content: Any = json.loads(event.removeprefix(b"data:") or b"{}")
    if "error" in content:
        raise ValueError(str(content["error"]))
    usage = content.get("usage")
    counts = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")] if isinstance(usage, dict) else [None]
    if not all(map(is_integer, counts)) or not counts[-1]:
        raise ValueError("the stream ended without its usage")
    return usage, not content.get("choices")

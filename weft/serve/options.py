"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass

from weft.arguments import check_int, check_optional, positive, quoted
from weft.serve.parsing import NONE, reasoning_parsers, tool_parsers

MAX_BODY_BYTES = 16 << 20
MAX_WAITING = 1024
# Seconds: longer than the 60 that proxies keep a connection, which would otherwise send a request into one that closes.
KEEP_ALIVE = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a server.

    model_name      of the one model, in requests and answers
    api_key         required of requests under /v1; None: none is
    max_body_bytes  of a request
    max_waiting     requests beyond a full batch; a further one gets status 503
    keep_alive      seconds that a connection without a request stays open
    restart         after the first error of a rank all ranks start again; after a second one the server ends
    seed            from which requests without one get theirs, in the order of their arrival; None: random ones
    tool_call_parser, reasoning_parser  names of weft.serve.parsing, or "none"; None: by the model's chat template
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    max_waiting: int = MAX_WAITING
    keep_alive: int = KEEP_ALIVE
    restart: bool = False
    seed: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_waiting", "keep_alive"):
            positive(name, getattr(self, name))
        check_optional(check_int, "seed", self.seed, 0, (1 << 63) - 1)
        for name in ("model_name", "api_key"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; pass some text")
        for name, known in (("tool_call_parser", tool_parsers()), ("reasoning_parser", reasoning_parsers())):
            if (value := getattr(self, name)) not in (None, NONE, *known):
                raise ValueError(f"{name}={quoted(value)} is not a parser; pass one of {', '.join(known)} or {NONE}")

"""Server process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn

from weft.engine.async_llm import AsyncLLM
from weft.engine.params import SamplingParams
from weft.errors import WeftError
from weft.runtime.logs import logger_of
from weft.serve.address import not_bound, share
from weft.serve.app import Service
from weft.serve.routes import create_app

# Seconds that connections have to close once their answers have been ended.
GRACE_SECONDS = 5
logger = logger_of(__name__)


class Server(uvicorn.Server):
    """HTTP server of a service.

    A signal ends the answers that are being computed. An error of the engine ends the server, unless the service recovers. It
    listens once its first request has run, and then calls `listening`.
    """

    def __init__(self, service: Service, listening: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            create_app(service), lifespan="off", ws="none", log_level="warning", access_log=False, server_header=False,
            proxy_headers=False, timeout_graceful_shutdown=GRACE_SECONDS, timeout_keep_alive=service.options.keep_alive,
        )  # fmt: skip
        super().__init__(config)
        self._service, self._listening = service, listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await run_once(self._service.llm)
        for one in sockets or ():
            share(one)
        try:
            await super().startup(sockets)
        except OSError as error:  # another program was faster
            host, port = sockets[0].getsockname()[:2]
            raise not_bound(host, port, error) from None
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._service.recovers()


async def run_once(llm: AsyncLLM) -> None:
    """Run a first request: a step of the engine, the tokenizer, the chat template's process.

    Otherwise a client's first request of each kind would wait 20 to 200 ms longer. Without `warm_up` no step runs.
    """
    firsts: list[Coroutine[Any, Any, Any]] = []
    if llm.config.warm_up:
        firsts.append(llm.generate([0] if llm.tokenizer is None else "1", SamplingParams(max_tokens=2, seed=0)))
    if llm.tokenizer is not None:
        firsts.append(llm.chat_prompt([{"role": "user", "content": "1"}]))
    for first in firsts:
        try:
            await first
        except (ValueError, WeftError) as error:  # there may be no chat template, or no room for an answer
            logger.debug("a first request did not run: %s", error)


def serve(service: Service, at: socket.socket, listening: Callable[[], None]) -> None:
    """Serve until SIGINT, SIGTERM or an error of the engine, which is raised, and close the engine.

    listening  called once connections are accepted
    """
    server = Server(service, listening)

    def end(number: int, frame: FrameType | None) -> None:
        """Take a signal that comes before uvicorn takes them, or that uvicorn raises again at its end."""
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(server.serve(sockets=[at]))
        if service.llm.error is not None:
            raise service.llm.error
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        service.llm.close()
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])

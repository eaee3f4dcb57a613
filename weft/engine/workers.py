"""The ranks behind an LLM: processes that stay, one a GPU, or virtual ranks that are made anew for every call."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.engine.answers import Piece, Prompt, Stats
from weft.engine.engine import Engine
from weft.engine.params import SamplingParams
from weft.errors import WeftError
from weft.layers.plan import Mode
from weft.models import Progress, Qwen3Config
from weft.runtime.launch import launch
from weft.runtime.team import init

if TYPE_CHECKING:
    from weft.runtime.team import Team

Requests = tuple[list[Prompt], list[SamplingParams]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What each rank's Engine is made of; see there."""

    model: Path | Qwen3Config | None
    mode: Mode = "auto"
    dtype: torch.dtype | None = None
    fused: bool | None = None
    max_seq_len: int | None = None
    max_batch: int = 64
    page_size: int = 64
    pages: int | None = None
    memory_fraction: float = 0.8
    chunk_tokens: int = 4096
    cuda_graph: bool = True

    def build(self, team: Team, progress: Progress | None = None) -> Engine:
        words = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Engine(words.pop("model"), team, **words, progress=progress)


class VirtualWorkers:
    """Virtual ranks of this process. An engine's tensors belong to one simulation, so every call loads the model again.

    A process has one simulation at a time, whose end all LLMs in it wait for.
    """

    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    def __init__(self, world_size: int, options: EngineOptions, progress: Progress | None) -> None:
        self._world_size, self._options, self._progress = world_size, options, progress
        with self._lock:
            self._wait()
            self._launch(lambda team: options.build(team) and None)  # says at once what is wrong

    def ask(self, requests: Requests, keep: Callable[[Stats], None]) -> Iterator[Piece]:
        """The pieces of an answer as they come; `keep` gets the statistics at its end.

        An answer that was not drawn to its end is computed to its end before the next begins.
        """
        found: queue.Queue[tuple[str, Any]] = queue.Queue()

        def rank(team: Team) -> None:
            engine = self._options.build(team, self._progress if team.rank == 0 else None)
            for piece in engine.answer(*requests):
                if team.rank == 0:
                    found.put(("piece", piece))
            if team.rank == 0:
                found.put(("stats", engine.stats))

        def run() -> None:
            try:
                self._launch(rank)
            except BaseException as error:
                found.put(("error", error))

        def receive() -> tuple[str, Any]:
            message = found.get()
            if message[0] != "piece":
                thread.join()  # the caller's next simulation may not find this one
            return message

        thread = threading.Thread(target=run, name="weft virtual ranks", daemon=True)
        with self._lock:
            self._wait()
            thread.start()
            VirtualWorkers._thread = thread
        return _unpacked(receive, keep)

    def _launch(self, main: Callable[..., Any]) -> None:
        launch(main, self._world_size, "sim")

    @classmethod
    def close(cls) -> None:
        """They end with every call; the last may not have been drawn to its end."""
        with cls._lock:
            cls._wait()

    @classmethod
    def _wait(cls) -> None:
        if cls._thread is not None:
            cls._thread.join()


# The end of the process would cut off a thread in the middle of torch, which aborts.
atexit.register(VirtualWorkers.close)


class ProcessWorkers:
    """A process per GPU (weft.launch), each with its engine, that answers until `close` or the end of this process."""

    def __init__(self, world_size: int, options: EngineOptions, progress: Progress | None) -> None:
        self._key = secrets.token_bytes(32)
        self._listener = Listener(("127.0.0.1", 0), backlog=world_size, authkey=self._key)
        self._error: BaseException | None = None
        self._ranks: dict[int, Connection] = {}
        # Of the latest answer: what has come and nobody has drawn, and whether more is to come.
        self._found: deque[tuple[str, Any]] = deque()
        self._answering = self._closed = False
        self._lock = threading.Lock()
        arguments = (self._listener.address, self._key, options)
        self._thread = threading.Thread(
            target=self._run, args=(world_size, arguments), name="weft workers", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._accept, args=(world_size,), name="weft callers", daemon=True).start()
        try:
            while len(self._ranks) < world_size:
                self._thread.join(timeout=0.05)
                if not self._thread.is_alive():
                    raise self._failure()
            self._wait_until_loaded(progress)
        except BaseException:
            self.close()
            raise

    def ask(self, requests: Requests, keep: Callable[[Stats], None]) -> Iterator[Piece]:
        """As of VirtualWorkers. What is left of the last answer is read now, and stays its own."""
        with self._lock:
            while self._answering:
                self._receive()
            if not self._thread.is_alive():
                raise self._failure()
            self._found = found = deque()
            try:
                for pipe in self._ranks.values():
                    pipe.send(requests)
                    self._answering = True  # also where nobody waits for the first piece
            except OSError:
                raise self._failure() from None

        def receive() -> tuple[str, Any]:
            with self._lock:
                if not found:
                    self._receive()
                return found.popleft()

        return _unpacked(receive, keep)

    def close(self) -> None:
        for pipe in self._ranks.values():
            pipe.close()  # a rank that reads from it ends
        self._ranks, self._answering, self._closed = {}, False, True
        self._listener.close()
        self._thread.join(timeout=30)

    def _run(self, world_size: int, arguments: tuple) -> None:
        try:
            launch(serve, world_size, "cuda", args=arguments)
        except BaseException as error:
            self._error = error

    def _accept(self, world_size: int) -> None:
        found = {}
        try:
            while len(found) < world_size:
                try:
                    pipe = self._listener.accept()
                except (EOFError, OSError, AuthenticationError):
                    if self._closed:
                        return
                    continue  # a stranger, who looks for open ports
                found[pipe.recv()] = pipe
                self._ranks = dict(found)
        except (EOFError, OSError):
            return  # closed, or a rank has failed: the launch says why

    def _wait_until_loaded(self, progress: Progress | None) -> None:
        for rank, pipe in self._ranks.items():
            while True:
                kind, value = self._receive_from(pipe)
                if kind == "loaded":
                    break
                if rank == 0 and progress is not None:
                    progress(*value)

    def _receive(self) -> None:
        """The next message of the latest answer."""
        if not self._ranks:
            raise WeftError("this LLM is closed; make a new one")
        message = self._receive_from(self._ranks[0])
        self._answering = message[0] == "piece"
        self._found.append(message)

    def _receive_from(self, pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._failure() from None

    def _failure(self) -> BaseException:
        """What ended the workers."""
        self._thread.join(timeout=30)
        return self._error or WeftError("the workers have ended; make a new LLM")


class RankWorkers:
    """This process, one of the ranks that torchrun has started. All of them make the same calls."""

    def __init__(self, options: EngineOptions, progress: Progress | None) -> None:
        self._team = init()
        self._engine = options.build(self._team, progress if self._team.rank == 0 else None)

    def ask(self, requests: Requests, keep: Callable[[Stats], None]) -> Iterator[Piece]:
        """The pieces of an answer as they come, on every rank; `keep` gets the statistics at its end."""
        pieces = self._engine.answer(*requests)

        def kept() -> Iterator[Piece]:
            yield from pieces
            keep(self._engine.stats)

        return kept()

    def close(self) -> None:
        del self._engine
        self._team.close()


def serve(team: Team, address: tuple[str, int], key: bytes, options: EngineOptions) -> None:
    """What each rank's process runs: it answers what the parent sends to all ranks alike. Rank 0 sends the pieces."""
    if (process := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(process.sentinel,), name="weft parent watch", daemon=True).start()
    with Client(address, authkey=key) as parent:
        parent.send(team.rank)
        engine = options.build(team, lambda *bytes_read: parent.send(("progress", bytes_read)))
        parent.send(("loaded", None))
        while True:
            try:
                requests = parent.recv()
            except EOFError:
                return
            try:
                pieces = engine.answer(*requests)
            except ValueError as error:  # the same on every rank, and the next request may be right
                if team.rank == 0:
                    parent.send(("error", error))
                continue
            for piece in pieces:
                if team.rank == 0:
                    parent.send(("piece", piece))
            if team.rank == 0:
                parent.send(("stats", engine.stats))


def _end_with(sentinel: int) -> None:
    """A rank whose parent was killed may be waiting on the GPU for another that has noticed already: nobody else ends it."""
    wait([sentinel])
    os._exit(1)


def _unpacked(receive: Callable[[], tuple[str, Any]], keep: Callable[[Stats], None]) -> Iterator[Piece]:
    """Pieces until the statistics or an error come. Reads the first at once, so that a refusal is raised by the call."""
    kind, value = receive()
    if kind == "error":
        raise value

    def rest() -> Iterator[Piece]:
        nonlocal kind, value
        while kind == "piece":
            yield value
            kind, value = receive()
        if kind == "error":
            raise value
        keep(value)

    return rest()

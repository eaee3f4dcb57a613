"""Streams and events of a torch program.

Kernels run on the main stream; side streams run copies, signals and barriers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.check.torch_programs.ranks import Ranks, running_ranks
from weft.runtime.platforms.virtual import copy_in_pieces
from weft.simulator.machine.tasks import Waiting


class Stream:
    """Stand-in for ``torch.cuda.Stream``. ``name``: "" for the main stream."""

    ranks = property(lambda _: running_ranks())

    def __init__(self, device: object = None, priority: int = 0, name: str | None = None, **_: object) -> None:
        here = self.ranks.here
        self.priority, self.device = priority, torch.device("cuda", here.rank)
        if name is None:
            here.streams.append(self)
            name = f"stream {len(here.streams)}"
        self.name = name
        self.cuda_stream = self.stream_id = 0 if not name else len(here.streams)

    def issue(self, label: str, operation: Callable[[], object], tensors: list[torch.Tensor]) -> None:
        """Run ``operation`` in the order of this stream: now on the main stream, later on a side stream."""
        machine = self.ranks.machine
        if not self.name:
            machine.settle()
            machine.observer.issued()
            operation()
            return
        begin = machine.observer.enqueued(self.name, label, tensors)

        def run() -> None:
            begin()
            operation()

        machine.enqueue(self.name, label, run)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if self.name:
            self.ranks.machine.join(self.name)
        self.ranks.machine.settle()
        self.ranks.machine.observer.host_waited(self.ranks.machine.rank)

    def query(self) -> bool:
        self.synchronize()
        return True

    def __enter__(self) -> Stream:
        here = self.ranks.here
        here.scopes.append(here.stream)
        here.stream = self if self.name else None
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.here.stream = self.ranks.here.scopes.pop()


class Graph:
    """Stand-in for ``torch.cuda.CUDAGraph``, which may be named and not made."""

    def __new__(cls, *_: object, **__: object) -> Graph:
        raise running_ranks().refuse("a CUDA graph", "call the function itself")


class Event:
    """Stand-in for ``torch.cuda.Event``."""

    ranks = property(lambda _: running_ranks())

    def __init__(self, *_: object, **__: object) -> None:
        self._mark: dict[str, Any] | None = None

    def record(self, stream: Stream | None = None) -> None:
        machine, mark = self.ranks.machine, {}

        def reach() -> None:
            mark["known"] = machine.observer.published()
            machine.scheduler.recheck()

        self._mark = mark
        (stream or current_stream(self.ranks)).issue("event", reach, [])

    def wait(self, stream: Stream | None = None) -> None:
        mark = self._mark
        if mark is not None:
            (stream or current_stream(self.ranks)).issue("wait for an event", lambda: self._await(mark), [])

    def synchronize(self) -> None:
        if self._mark is not None:
            self._await(self._mark)
            self.ranks.machine.observer.host_waited(self.ranks.machine.rank)

    def query(self) -> bool:
        return self._mark is None or "known" in self._mark

    def elapsed_time(self, _: Event) -> float:
        return 1.0  # simulated time means nothing

    def _await(self, mark: dict[str, Any]) -> None:
        machine = self.ranks.machine
        machine.scheduler.block(Waiting(lambda: "known" in mark, lambda: "waits for an event of another stream"))
        machine.observer.learned(mark["known"])


def current_stream(ranks: Ranks, *_: object) -> Stream:
    here = ranks.here
    return here.stream or main_stream(ranks)


def main_stream(ranks: Ranks) -> Stream:
    here = ranks.here
    if "main" not in here.kept:
        here.kept["main"] = Stream(name="")
    return here.kept["main"]


@contextmanager
def on_stream(ranks: Ranks, stream: Stream | None) -> Iterator[None]:
    """Scope of ``torch.cuda.stream``."""
    with stream or contextlib.nullcontext():
        yield


def copy(
    ranks: Ranks, label: str, dst: torch.Tensor, src: torch.Tensor, signal: bool = False, stream: Stream | None = None
) -> None:
    """Copy on a stream, else on the current one.

    ``signal``: after all its earlier work, as ``cuStreamWriteValue32``.
    """
    machine = ranks.machine

    def move() -> None:
        known = machine.memory.add_tensor(src, machine.rank, f"source of a {label}")  # a signal's value is read
        try:
            for target, source in _contiguous(dst, src):
                copy_in_pieces(machine, label, target, source, signal)
        finally:
            if known is not None:
                machine.memory.remove(known)

    (stream or current_stream(ranks)).issue(label, move, [dst, src])


def _contiguous(dst: torch.Tensor, src: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous parts of two tensors of one shape."""
    if dst.is_contiguous() and src.is_contiguous():
        yield dst, src
        return
    for target, source in zip(dst, src, strict=True):
        yield from _contiguous(target, source)

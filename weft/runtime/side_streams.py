"""Streams of one call beside its caller's.

A cuBLAS GEMM leaves SMs idle in its last wave, which an independent GEMM on another stream fills. Stream 0 is the caller's. The
*urgent* stream has priority and is for small work that other ranks wait for. In the simulator there is one stream, in the order
of the host code.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from weft.runtime.streams import current_stream, on_stream, own_stream

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class SideStreams:
    """The streams of a call: ``fork`` first, ``join`` last.

    Work submitted in between then belongs to the caller's stream, and to the CUDA graph that captures it. Memory that a side
    stream touches must live until ``join``.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._count, self._device, self._on_gpu = count, device, device.type == "cuda"
        if self._on_gpu:
            # One stream more than needed, because the caller's stream may be among these.
            self._streams = [own_stream(device) for _ in range(count)]
            self._urgent = own_stream(device, priority=-1)
            # Events are recorded anew in every call: making one takes longer than recording it.
            self._events: list[torch.cuda.Event] = []
            self._recorded = 0

    def fork(self) -> None:
        """Have every stream wait for the work so far of the current stream, which becomes stream 0."""
        if self._on_gpu:
            self._main = current_stream(self._device)
            self._side = [stream for stream in self._streams if stream != self._main][: self._count - 1]
            self._recorded = 0
            given = self._record(self._main)
            for stream in (*self._side, self._urgent):
                given.wait(stream)

    def turn(self, number: int) -> AbstractContextManager:
        """Context in which the stream of turn ``number`` is current."""
        if not self._on_gpu:
            return nullcontext()
        return on_stream((self._main, *self._side)[number % self._count])

    def urgent(self) -> AbstractContextManager:
        """Context in which the urgent stream is current."""
        return on_stream(self._urgent) if self._on_gpu else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """The work submitted so far to the current stream, for ``after`` in the same call."""
        return self._record(current_stream(self._device)) if self._on_gpu else None

    def after(self, mark: torch.cuda.Event | None) -> None:
        """Have the current stream wait for the work before ``mark``."""
        if mark is not None:
            mark.wait(current_stream(self._device))

    def join(self) -> None:
        """Have stream 0 wait for all streams."""
        if self._on_gpu:
            for stream in (*self._side, self._urgent):
                self._record(stream).wait(self._main)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        if self._recorded == len(self._events):
            self._events.append(torch.cuda.Event())
        event = self._events[self._recorded]
        self._recorded += 1
        event.record(stream)
        return event


def side_streams(team: Team, count: int) -> SideStreams:
    """The team's ``count`` streams for calls."""
    return team.workspace(("side streams", count), lambda: SideStreams(team.device, count))

"""Streams of one call beside its caller's: a library GEMM leaves SMs idle in its last round, and the next one, which need
not wait for it, fills them.

Lane 0 is the caller's stream. The *urgent* lane has priority and is for what is small and waited for. In the simulator
there is one stream, and the host code is the order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from weft.runtime.streams import current_stream, on_stream, own_stream

if TYPE_CHECKING:
    from weft.runtime.team import Team


class SideStreams:
    """``fork`` first, ``join`` last; what was given to the lanes in between is then part of the caller's stream, and of the
    CUDA graph that captures it. Memory that a lane touches must live until ``join``."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._count, self._device, self._on_gpu = count, device, device.type == "cuda"
        if self._on_gpu:
            # Make one stream more than needed, because the caller's stream may be one of them.
            self._streams = [own_stream(device) for _ in range(count)]
            self._urgent = own_stream(device, priority=-1)

    def fork(self) -> None:
        """Every lane waits for all that the current stream, lane 0 from here on, has been given so far."""
        if self._on_gpu:
            self._main = current_stream(self._device)
            self._side = [stream for stream in self._streams if stream != self._main][: self._count - 1]
            given = self._main.record_event()
            for stream in (*self._side, self._urgent):
                stream.wait_event(given)

    def turn(self, number: int) -> AbstractContextManager:
        """The current stream is the lane whose turn comes ``number``-th."""
        if not self._on_gpu:
            return nullcontext()
        return on_stream((self._main, *self._side)[number % self._count])

    def urgent(self) -> AbstractContextManager:
        """The current stream is the urgent lane."""
        return on_stream(self._urgent) if self._on_gpu else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """All that the current stream has been given so far, for ``after``."""
        return current_stream(self._device).record_event() if self._on_gpu else None

    def after(self, mark: torch.cuda.Event | None) -> None:
        """The current stream waits for what was marked."""
        if mark is not None:
            current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """Lane 0 waits for all lanes."""
        if self._on_gpu:
            for stream in (*self._side, self._urgent):
                self._main.wait_stream(stream)


def side_streams(team: Team, count: int) -> SideStreams:
    """The team's ``count`` lanes."""
    return team.workspace(("side streams", count), lambda: SideStreams(team.device, count))

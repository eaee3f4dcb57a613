"""Streams of weft's own, and the current one without what ``torch.cuda.current_stream()`` and ``torch.cuda.stream()`` cost: not
told which device, both ask the environment whether there is any, 10 to 30 us a time; told so, the first makes an object.
"""

from __future__ import annotations

import weakref
from types import TracebackType

import torch

# torch has so many of a priority.
IN_POOL = 32
_taken: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()
# By device and handle: those that were ever current.
_known: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Of ``device``, which has an index, and which CUDA has been initialised for."""
    return _current(device.index)


def _current(index: int) -> torch.cuda.Stream:
    handle = index, torch._C._cuda_getCurrentRawStream(index)
    stream = _known.get(handle)
    if stream is None:
        stream = _known[handle] = torch.cuda.current_stream(index)
    return stream


class on_stream:  # noqa: N801  a context manager, named like a function
    """Inside, ``stream`` is the current stream of its device, which is the current device. The former one afterwards."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        index = self._stream.device_index
        before = _current(index)
        is_there = before == self._stream and torch.cuda.current_device() == index
        self._before = None if is_there else before
        if not is_there:
            torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that nobody else of weft holds, as long as there are such.

    ``torch.cuda.Stream()`` gives the same few out over and over: two of them may be one, and what was to overlap runs in turn.
    AG-GEMM 2048x12800x5120 at W=4 took 444 us in a process that had made many, and 385 in another.
    """
    for _ in range(IN_POOL):
        stream = torch.cuda.Stream(device, priority=priority)
        if stream not in _taken:
            break
    _taken.add(stream)
    return stream

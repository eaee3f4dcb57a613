"""Recorder of the traced team of this thread: it gets the work that no kernel of weft's records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from weft.runtime.team.view import TeamView


class Recorder(Protocol):
    """Recorder of cuBLAS GEMMs and of a copy engine's copies, in the order of their streams."""

    @property
    def view(self) -> TeamView:
        """View of the team that is being traced."""

    def gemm(self, M: int, N: int, K: int, device: torch.device) -> AbstractContextManager[object]:
        """Scope of a GEMM of the current stream."""

    def copy(self, stream: torch.cuda.Stream, nbytes: int, peer: int) -> AbstractContextManager[object]:
        """Scope of a copy to or from ``peer`` on the copy engine's stream."""

    def signal(self, stream: torch.cuda.Stream, address: int, peer: int) -> AbstractContextManager[object]:
        """Scope of the copy that sets ``peer``'s signal; ``address`` is that of this rank's own."""


# Of a thread, not of the process: virtual ranks are threads.
_RECORDER: ContextVar[Recorder | None] = ContextVar("weft recorder", default=None)
_NOTHING = nullcontext()


def recorder() -> Recorder | None:
    """The recorder of this thread, if a team is being traced."""
    return _RECORDER.get()


@contextmanager
def recording(into: Recorder) -> Iterator[None]:
    """Scope in which ``recorder()`` is ``into``."""
    token = _RECORDER.set(into)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def traced_view() -> TeamView | None:
    """View of the team that is being traced, into which kernels of ops without a team record their tiles."""
    into = _RECORDER.get()
    return None if into is None else into.view


def gemm_span(M: int, N: int, K: int, device: torch.device) -> AbstractContextManager[object]:
    """Scope of a cuBLAS GEMM, recorded if a team is being traced."""
    into = _RECORDER.get()
    return _NOTHING if into is None else into.gemm(M, N, K, device)


def copy_span(stream: torch.cuda.Stream, nbytes: int, peer: int) -> AbstractContextManager[object]:
    """Scope of a copy by a copy engine, recorded if a team is being traced."""
    into = _RECORDER.get()
    return _NOTHING if into is None else into.copy(stream, nbytes, peer)


def signal_span(stream: torch.cuda.Stream, address: int, peer: int) -> AbstractContextManager[object]:
    """Scope of a copy engine's signal, recorded if a team is being traced."""
    into = _RECORDER.get()
    return _NOTHING if into is None else into.signal(stream, address, peer)

"""Ctrl-C during a simulation: raised while tasks run, held back at the scope's start and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Interrupts:
    """Scope in which SIGINT raises only below the functions ``inside``, until ``leaving`` is set.

    held  number of interrupts that came elsewhere. They are delivered at the end of the scope, after the interpreter's patches
          are restored, unless another interrupt ends the scope

    Only the main thread receives SIGINT: in other threads, and without a Python handler for SIGINT, the scope does nothing.
    """

    def __init__(self, *inside: Callable[..., Any]) -> None:
        self._inside: frozenset[CodeType] = frozenset(function.__code__ for function in inside)
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self.leaving = False
        self.held = 0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self.held and (kind is None or not issubclass(kind, KeyboardInterrupt)):
            signal.raise_signal(signal.SIGINT)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        below = frame
        while not self.leaving and below is not None:
            if below.f_code in self._inside:
                return self._handler(number, frame)
            below = below.f_back
        self.held += 1

"""SIGINT and SIGTERM to a whole group of processes, of which only the parent follows them.

Ctrl-C goes to every process of a terminal; systemd, `timeout` and Slurm send SIGTERM to every process of a job. The parent
decides what that means, and ends its children.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TO_GROUPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_for_children() -> Iterator[None]:
    """Hold both signals back in this thread, and in processes that it starts meanwhile.

    A child that imports modules cannot take a signal yet; it calls `leave_end_to_parent` when it can.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_end_to_parent() -> None:
    """Take SIGTERM without effect in this process, unless a handler is set later, and end the hold.

    A handler, not SIG_IGN, which the programs that this process starts would inherit.
    """
    signal.signal(signal.SIGTERM, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_GROUPS)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass

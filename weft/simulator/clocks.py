"""Vector clocks: what each task knows to have happened.

A clock has two rows over all *slots*. Row 0 is happens-before. Row 1 adds what messages that are their own flag tell
(Lamport words order other Lamport words, never plain data), so row 1 >= row 0. A slot is a line of program order: a rank's
main stream, a side stream, and for a program three of them, since not all of its accesses are covered by its releases:
those of all its threads (``block``), those of one thread (``scalar``) and those of the asynchronous proxy (``async``).
Slots are reused by the launches that follow each other on a rank's stream, so their number does not grow with time.
"""

from __future__ import annotations

import numpy as np

_GROW = 64


class Slots:
    """Hands out slots by name, and remembers each one's time."""

    def __init__(self) -> None:
        self._index: dict[tuple, int] = {}
        self.time: list[int] = []

    def of(self, *name: object) -> int:
        if name not in self._index:
            self._index[name] = len(self.time)
            self.time.append(0)
        return self._index[name]

    def tick(self, slot: int) -> int:
        """The slot's next time."""
        self.time[slot] += 1
        return self.time[slot]


def new_clock() -> np.ndarray:
    return np.zeros((2, _GROW), np.int32)


def fit(clock: np.ndarray, slot: int) -> np.ndarray:
    """The clock, with room for ``slot``."""
    size = clock.shape[1]
    if slot < size:
        return clock
    wider = np.zeros((2, max(2 * size, -(-(slot + 1) // _GROW) * _GROW)), np.int32)
    wider[:, :size] = clock
    return wider


def joined(clock: np.ndarray, other: np.ndarray) -> np.ndarray:
    """``clock`` with all that ``other`` knows: ``clock`` itself, changed, where it has the room."""
    clock = fit(clock, other.shape[1] - 1)
    part = clock[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return clock


def hear(clock: np.ndarray, message: np.ndarray) -> np.ndarray:
    """``clock`` after a Lamport word was read whose writer knew ``message``: only row 1 learns."""
    clock = fit(clock, message.shape[1] - 1)
    part = clock[1, : message.shape[1]]
    np.maximum(part, message[1], out=part)
    return clock


def at(clock: np.ndarray, slot: int, row: int = 0) -> int:
    return int(clock[row, slot]) if slot < clock.shape[1] else 0

"""Vector clocks: the events that a thread of execution knows to have happened.

A clock has three rows over all *slots*:

ORDER             happens-before
LAMPORT           also what Lamport words carry: what their sender had seen in memory. Lamport words order other Lamport
                  words, never plain data
UNFENCED_LAMPORT  also what they would carry if no store were overtaken by a later one. Nothing promises that; the row
                  serves to name the missing fence

A slot is one line of program order: a rank's main stream, a side stream, or one kind of access of a program
(``thread_clocks``), since a program's releases and messages do not cover all kinds. Consecutive launches on a rank's stream
reuse slots, so their number does not grow with time.
"""

from __future__ import annotations

import numpy as np

ORDER, LAMPORT, UNFENCED_LAMPORT = range(3)
_FEWEST = 64


class Slots:
    """Slots by name, each with its current time."""

    def __init__(self) -> None:
        self._index: dict[tuple, int] = {}
        self.time: list[int] = []

    def of(self, *name: object) -> int:
        if name not in self._index:
            self._index[name] = len(self.time)
            self.time.append(0)
        return self._index[name]

    def tick(self, slot: int) -> int:
        """Next time of the slot."""
        self.time[slot] += 1
        return self.time[slot]


def new_clock() -> np.ndarray:
    return np.zeros((3, _FEWEST), np.int32)


def fit(clock: np.ndarray, slot: int) -> np.ndarray:
    """The clock with room for ``slot``.

    Sizes are powers of two, so that clocks joined in turn do not outgrow each other.
    """
    size = wide = clock.shape[1]
    while wide <= slot:
        wide *= 2
    if wide == size:
        return clock
    wider = np.zeros((3, wide), np.int32)
    wider[:, :size] = clock
    return wider


def joined(clock: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Elementwise maximum of both clocks: ``clock`` itself, changed in place, where it has the room."""
    clock = fit(clock, other.shape[1] - 1)
    part = clock[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return clock


def receive(clock: np.ndarray, message: np.ndarray) -> np.ndarray:
    """``clock`` after the read of a Lamport word with ``message``: all rows but happens-before learn."""
    clock = fit(clock, message.shape[1] - 1)
    part = clock[LAMPORT:, : message.shape[1]]
    np.maximum(part, message[LAMPORT:], out=part)
    return clock


def at(clock: np.ndarray, slot: int, row: int = ORDER) -> int:
    return int(clock[row, slot]) if slot < clock.shape[1] else 0

"""Vector clocks: what each task knows to have happened.

A clock has three rows over all *slots*. ``ORDER`` is happens-before. ``TOLD`` adds what messages that are their own flag
tell (Lamport words order other Lamport words, never plain data): what their sender had seen to be in memory. ``HEARD`` adds
what they would tell if no store were overtaken by a later one, which nothing promises: it serves to say what is missing. A slot
is a line of program order: a rank's main stream, a side stream, and for a program one for each kind of access
(``thread_clocks``), since not all are covered by its releases and messages. Slots are reused by the launches that follow
each other on a rank's stream, so their number does not grow with time.
"""

from __future__ import annotations

import numpy as np

ORDER, TOLD, HEARD = range(3)
_FEWEST = 64


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
    return np.zeros((3, _FEWEST), np.int32)


def fit(clock: np.ndarray, slot: int) -> np.ndarray:
    """The clock, with room for ``slot``: a power of two, whatever its size was, so that clocks that learn from one another in
    turn do not outgrow each other."""
    size = wide = clock.shape[1]
    while wide <= slot:
        wide *= 2
    if wide == size:
        return clock
    wider = np.zeros((3, wide), np.int32)
    wider[:, :size] = clock
    return wider


def joined(clock: np.ndarray, other: np.ndarray) -> np.ndarray:
    """``clock`` with all that ``other`` knows: ``clock`` itself, changed, where it has the room."""
    clock = fit(clock, other.shape[1] - 1)
    part = clock[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return clock


def hear(clock: np.ndarray, message: np.ndarray) -> np.ndarray:
    """``clock`` after a Lamport word was read that tells ``message``: all but happens-before learns."""
    clock = fit(clock, message.shape[1] - 1)
    part = clock[TOLD:, : message.shape[1]]
    np.maximum(part, message[TOLD:], out=part)
    return clock


def at(clock: np.ndarray, slot: int, row: int = ORDER) -> int:
    return int(clock[row, slot]) if slot < clock.shape[1] else 0

"""Threads of a program: which execute, and which element of a block each holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Values of the special registers: threads of a program, its index, the grid, and an SM."""

    threads: int
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    sm: int

    def read(self, name: str) -> np.ndarray | int | None:
        """Value of a special register, of all threads or of each; None for another register."""
        axis = {"x": 0, "y": 1, "z": 2}.get(name[-1], 0)
        known: dict[str, np.ndarray | int] = {
            "%tid": np.arange(self.threads) if axis == 0 else 0,
            "%ntid": self.threads if axis == 0 else 1,
            "%ctaid": self.index[axis], "%nctaid": self.grid[axis], "%smid": self.sm, "%nsmid": self.sm + 1,
            "%laneid": np.arange(self.threads) % 32, "%warpid": np.arange(self.threads) // 32, "%nwarpid": self.threads // 32,
            # Simulated time stands still, so that a time limit is never reached.
            "%globaltimer": 0, "%globaltimer_lo": 0, "%clock": 0, "%clock64": 0,
        }  # fmt: skip
        return known.get(name.partition(".")[0])


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """Branch that only some threads of a program take. ``data``: for each thread, True if it does."""

    data: np.ndarray


def elements_of(active: np.ndarray, size: int) -> np.ndarray:
    """Elements, of a block of ``size``, that the ``active`` threads hold.

    Thread t holds elements t, t + T, ... of T threads; threads beyond a smaller block hold its elements once more.
    """
    count = active.size
    if size >= count:
        return np.resize(active, size)
    held = np.zeros(size, np.bool_)
    held[np.unique(np.flatnonzero(active) % size)] = True
    return held


def stored_by(active: np.ndarray, size: int) -> np.ndarray:
    """Elements, of a block of ``size``, that the ``active`` threads store: the first holder of each."""
    return np.resize(active, size) if size >= active.size else active[:size]

"""Threads of a program: which execute, and which element of a block each holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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

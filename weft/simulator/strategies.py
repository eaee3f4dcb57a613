"""Who runs next. A strategy is a function of its seed, so that a schedule is one too.

uniform  any task that can run, with equal chance
pct      random priorities, lowered at ``depth - 1`` random steps: finds a bug that needs ``depth`` ordering constraints with
         probability at least 1 / (tasks * steps ** (depth - 1)) (Burckhardt and others, ASPLOS 2010). How many steps a run
         takes is not known before, so the seed chooses a power of two
slow     one rank, or one program number of all ranks (as if its SM were slow), is chosen 30 times more rarely
delay    uniform, and plain stores may be delayed past what does not order them (``store_buffers``)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

STRATEGIES = ("mix", "uniform", "pct", "slow", "delay", "exhaustive")
_MIX = ("uniform", "delay", "pct", "slow")
_SLOWNESS = 30.0


class Strategy(Protocol):
    def choose(self, ready: Sequence[Any], step: int) -> Any:
        """One of the tasks that can run."""

    def polled(self, task: Any) -> None:
        """``task`` looked in vain: it may be spinning."""


class Uniform:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: Sequence[Any], step: int) -> Any:
        return ready[int(self._random.random() * len(ready))]

    def polled(self, task: Any) -> None: ...


class Slow(Uniform):
    def __init__(self, seed: int, world_size: int, sms: int) -> None:
        super().__init__(seed)
        self._rank = self._random.randrange(world_size) if self._random.random() < 0.5 else None
        self._number = self._random.randrange(sms)

    def choose(self, ready: Sequence[Any], step: int) -> Any:
        quick = [task for task in ready if not self._is_slow(task)]
        if quick and (len(quick) == len(ready) or self._random.random() * _SLOWNESS > 1.0):
            ready = quick
        return super().choose(ready, step)

    def _is_slow(self, task: Any) -> bool:
        return task.rank == self._rank if self._rank is not None else getattr(task, "number", None) == self._number


class Pct:
    def __init__(self, seed: int, depth: int) -> None:
        self._random = random.Random(seed)
        self._priorities: dict[int, float] = {}
        self._keep: list[Any] = []  # ids are unique among the living only
        steps = 1 << self._random.randint(5, 12)
        self._changes = {self._random.randrange(steps) for _ in range(depth - 1)}
        self._lowest = 0.0

    def choose(self, ready: Sequence[Any], step: int) -> Any:
        for task in ready:
            if id(task) not in self._priorities:
                self._priorities[id(task)] = 1.0 + self._random.random()
                self._keep.append(task)
        chosen = max(ready, key=lambda task: self._priorities[id(task)])
        if step in self._changes:
            self._changes.discard(step)
            self._lower(chosen)
            chosen = max(ready, key=lambda task: self._priorities[id(task)])
        return chosen

    def polled(self, task: Any) -> None:
        if id(task) in self._priorities:
            self._lower(task)

    def _lower(self, task: Any) -> None:
        self._lowest -= 1.0
        self._priorities[id(task)] = self._lowest


def strategy_of(name: str, seed: int) -> str:
    """The strategy of the schedule ``seed``: itself, or for "mix" one after the other."""
    return _MIX[seed % len(_MIX)] if name == "mix" else name


def make(name: str, seed: int, world_size: int, sms: int, depth: int) -> Strategy:
    """ValueError for an unknown name."""
    if name in ("uniform", "delay"):
        return Uniform(seed)
    if name == "slow":
        return Slow(seed, world_size, sms)
    if name == "pct":
        return Pct(seed, depth)
    raise ValueError(f"strategy={name!r} is not one of {', '.join(STRATEGIES)}")

"""Stores that arrive late: what a program has stored waits in a buffer until something orders it, or chance lets it out.

Allowed by PTX for weak stores, so signals overtake data wherever nothing forbids it. For an exhaustive search each is a
task, so that its arrival is a choice like any other. A release lets out what it covers: what
came before the last CTA barrier, descriptor stores once drained; at GPU scope, what goes to the own GPU only. A program sees
its own stores at once.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.simulator.scheduler import GreenletTask

_LEAK = 0.08


@dataclass(slots=True, eq=False)
class Delayed:
    addresses: np.ndarray
    bits: np.ndarray
    low: int
    high: int
    tma: bool
    covered: bool
    drained: bool = False
    lamport: bool = False
    task: Any = None

    def overlaps(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high


class Delays:
    def __init__(self, machine: Any, seed: int, tasks: bool = False) -> None:
        self._machine, self._random, self._tasks = machine, random.Random(seed), tasks
        self._buffers: dict[Any, list[Delayed]] = {}

    def take(self, task: Any, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, how: str) -> None:
        active = addresses[mask]
        if active.size == 0:
            return
        low, high = int(active.min()), int(active.max()) + bits.dtype.itemsize
        self.touch(task, low, high)
        if how == "lamport":  # these keep their order among themselves, which their use rests on
            self._let_out(task, lambda late: late.lamport)
        late = Delayed(active, bits[mask], low, high, how == "tma", addresses.size == 1 and how != "tma")
        late.lamport = how == "lamport"
        self._buffers.setdefault(task, []).append(late)
        if self._tasks:
            self._spawn(task, late)

    def _spawn(self, task: Any, late: Delayed) -> None:
        def arrive() -> None:
            own.next = ((late.low, late.high, True),)
            self._machine.scheduler.step()
            self._let_out(task, lambda other: other is late)

        own = GreenletTask(self._machine.scheduler, task.rank, f"late store of {task.label}", arrive)
        own.maker, own.on_finish = task, lambda: None
        late.task = own
        self._machine.scheduler.spawn(own)

    def footprint(self, task: Any, near: tuple[tuple[int, int, bool], ...] | None) -> tuple[tuple[int, int, bool], ...]:
        """The late stores of ``task`` that overlap ``near`` (all if None), as what an access lets out."""
        return tuple(
            (late.low, late.high, True)
            for late in self._buffers.get(task, ())
            if near is None or any(late.overlaps(low, high) for low, high, _ in near)
        )

    def under_way(self, tasks: Collection[Any]) -> bool:
        """Whether stores of these programs are still to arrive."""
        return self._tasks and any(task in self._buffers for task in tasks)

    def touch(self, task: Any, low: int, high: int) -> None:
        """``task`` accesses these bytes itself."""
        self._let_out(task, lambda late: late.overlaps(low, high))

    def barrier(self, task: Any) -> None:
        for late in self._buffers.get(task, ()):
            late.covered = late.covered or not late.tma or late.drained

    def drain(self, task: Any) -> None:
        for late in self._buffers.get(task, ()):
            late.drained = True

    def release(self, task: Any, scope: str) -> None:
        self._let_out(task, lambda late: late.covered and (scope == "sys" or self._is_own(task, late)))

    def fence(self, task: Any) -> None:
        self._let_out(task, lambda late: not late.tma or late.drained)

    def end(self, task: Any) -> None:
        if not self._tasks:
            self.arrive(task)

    def arrive(self, task: Any) -> None:
        self._let_out(task, lambda late: True)

    def leak(self) -> None:
        """By chance, one of them arrives."""
        if self._buffers and not self._tasks and self._random.random() < _LEAK:
            task = self._random.choice(list(self._buffers))
            late = self._random.choice(self._buffers[task])
            self._let_out(task, lambda other: other is late)

    def all_out(self) -> bool:
        """Time passes: everything arrives. Whether there was anything."""
        tasks = list(self._buffers)
        for task in tasks:
            self.arrive(task)
        return bool(tasks)

    def _is_own(self, task: Any, late: Delayed) -> bool:
        heap = self._machine.memory.heap_of(late.low)
        return heap is None or self._machine.memory.heap_rank(heap) == task.rank

    def _let_out(self, task: Any, chosen: Any) -> None:
        buffer = self._buffers.get(task)
        if buffer is None:
            return
        out = [late for late in buffer if chosen(late)]
        if not out:
            return
        left = [late for late in buffer if late not in out]
        if left:
            self._buffers[task] = left
        else:
            del self._buffers[task]
        for late in out:
            if late.task is not None:
                late.task.next = None  # nothing is left of it to order
            everywhere = np.ones(late.addresses.shape, bool)
            self._machine.memory.store(late.addresses, late.bits, everywhere, lambda: task.label)
            self._machine.scheduler.written(late.low, late.high)

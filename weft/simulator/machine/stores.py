"""Arrival of a program's stores in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from weft.simulator.machine.memory import Memory
from weft.simulator.machine.scheduler import Scheduler
from weft.simulator.machine.tasks import Footprint, Task
from weft.simulator.places import Order, Places

# Called just before a store's bits are in memory.
Landed = Callable[[], None] | None


class Stores:
    """Stores that arrive at once. ``StoreBuffers`` delays them, and overrides all methods.

    "The program" is the running one.
    """

    is_late = False

    def __init__(self, scheduler: Scheduler, memory: Memory) -> None:
        self._scheduler, self._memory = scheduler, memory

    def take(self, places: Places, bits: np.ndarray, access: str, landed: Landed) -> None:
        """Take a weak store, to places in known extents. ``access``: as in ``Port.store``."""
        if landed is not None:
            landed()
        self._memory.write(places, bits, lambda: self._scheduler.current.label)
        if not places.is_empty:
            self._scheduler.written(places.low, places.high)

    def take_release(self, place: Places, bits: np.ndarray, landed: Landed) -> None:
        """Take a release store by one thread at system scope."""
        self.take(place, bits, "plain", landed)

    def before_access(self, places: Places) -> None:
        """Deliver some stores, and the program's own to the bytes that it is about to access."""

    def touch(self, low: int, high: int) -> None:
        """Deliver the program's stores to bytes ``low .. high - 1``, which it is about to access."""

    def before_atomic(self, addresses: np.ndarray, order: Order) -> None:
        """Deliver the stores that an atomic, about to take effect at ``addresses``, comes after."""

    def acquired(self, address: int) -> None:
        """Note that the program has acquired at system scope what releases to ``address`` cover."""

    def barrier(self) -> None:
        """CTA barrier of the program."""

    def drain(self) -> None:
        """Complete the program's descriptor stores."""

    def fence(self) -> None:
        """Fence in every thread of the program."""

    def end(self, program: Task) -> None:
        """Deliver all stores of a program that has ended."""

    def time_passes(self) -> bool:
        """Deliver stores when no task can go on. False if there are none."""
        return False

    def footprint(self, low: int, high: int, releases: bool, atomic: bool = False) -> Footprint:
        """Bytes of stores that the program's access to ``low .. high - 1`` delivers; all if it releases."""
        return ()

    def under_way(self, programs: Collection[Task]) -> bool:
        """True if stores of these programs keep their kernel from ending."""
        return False

"""Store buffers: a program's stores arrive in memory late, when an access needs them or at random.

PTX allows this wherever nothing orders two accesses: signals overtake data, a store overtakes stores to other bytes, later
loads overtake any store. A notify (a release store) is buffered too. It arrives after what it covers: stores before the last
CTA barrier, descriptor stores once drained. A fence does not empty the buffer; stores after it arrive later than stores
before it. An atomic takes effect at once, after the arrival of the stores that its order covers (at GPU scope, those to the
own GPU). A program sees its own stores at once, and a store that it has read back has arrived.

The observer is told of arrivals too: an acquire that finds the old value has not synchronised with the store.

In an exhaustive search each buffered store is a task, so that its arrival is a choice like any other. Otherwise the stores of
some source lines, chosen by the seed, are held back until no task can go on without them. Only so does a store arrive later
than a reply to a later store of its program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.simulator.interpreter import LIBRARIES
from weft.simulator.machine.scheduler import GreenletTask

# Probability for each access that some buffered store arrives, and for each line that its stores are held back.
_LEAK = 0.08
_HELD = 0.3


Landed = Callable[[], None] | None


@dataclass(slots=True, eq=False)
class BufferedStore:
    """One buffered store.

    covered  by later releases
    after    stores that arrive before it
    landed   called just before its bits are in memory
    """

    addresses: np.ndarray
    bits: np.ndarray
    low: int
    high: int
    tma: bool
    covered: bool
    line: tuple
    after: list[BufferedStore]
    landed: Landed = None
    drained: bool = False
    arrived: bool = False
    task: Any = None

    def overlaps(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high

    def chain(self) -> list[BufferedStore]:
        """Stores that must arrive for this one, in order, this one last."""
        found: list[BufferedStore] = []
        for late in self.after:
            if not late.arrived:
                found += [one for one in late.chain() if one not in found]
        return [*found, self]


class StoreBuffers:
    """Store buffers of all programs. ``tasks``: each store is a task, for an exhaustive search."""

    def __init__(self, machine: Any, seed: int, tasks: bool = False) -> None:
        self._machine, self._random, self._tasks = machine, random.Random(seed), tasks
        self._buffers: dict[Any, list[BufferedStore]] = {}
        self._fenced: dict[Any, list[BufferedStore]] = {}  # stores before the last fence
        self._held: dict[tuple, bool] = {}

    # --- actions of a program ----------------------------------------------------------------------------------------

    def take(
        self, task: Any, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, how: str, landed: Landed
    ) -> None:
        """Buffer a weak store."""
        if mask.any():
            one_thread = addresses.size == 1 and how != "tma"
            self._add(task, addresses[mask], bits[mask], how == "tma", one_thread, self._before(task), landed)

    def take_release(self, task: Any, address: np.ndarray, bits: np.ndarray, landed: Landed) -> None:
        """Buffer a release store by one thread at system scope."""
        self._add(task, address, bits, False, True, [*self._before(task), *self._covered(task, "sys")], landed)

    def atomic(self, task: Any, releases: bool, scope: str) -> None:
        """Deliver the stores that an atomic, about to take effect, comes after."""
        self._arrive(task, [*self._before(task), *(self._covered(task, scope) if releases else ())])

    def touch(self, task: Any, low: int, high: int) -> None:
        """Deliver the stores of ``task`` to bytes that it is about to access."""
        self._arrive(task, [late for late in self._buffers.get(task, ()) if late.overlaps(low, high)])

    def barrier(self, task: Any) -> None:
        for late in self._buffers.get(task, ()):
            late.covered = late.covered or not late.tma or late.drained

    def drain(self, task: Any) -> None:
        for late in self._buffers.get(task, ()):
            late.drained = True

    def fence(self, task: Any) -> None:
        """Fence in every thread."""
        self._fenced[task] = [late for late in self._buffers.get(task, ()) if not late.tma or late.drained]

    def end(self, task: Any) -> None:
        if not self._tasks:
            self._arrive(task, self._buffers.get(task, ()))

    # --- arrivals over time ------------------------------------------------------------------------------------------

    def leak(self) -> None:
        """Deliver one buffered store, at random."""
        if self._buffers and not self._tasks and self._random.random() < _LEAK:
            free = self._all(held=False)
            if free:
                task, late = self._random.choice(free)
                self._arrive(task, [late])

    def time_passes(self) -> bool:
        """Deliver one program's stores of one line, held ones last, when no task can go on.

        False if there are none.
        """
        left = self._all(held=False) or self._all(held=True)
        if left:
            task, late = self._random.choice(left)
            self._arrive(task, [other for other in self._buffers[task] if other.line == late.line])
        return bool(left)

    # --- for exhaustive search ---------------------------------------------------------------------------------------

    def footprint(self, task: Any, low: int, high: int, releases: bool) -> tuple[tuple[int, int, bool], ...]:
        """Bytes of the buffered stores of ``task`` that an access to ``low ..

        high - 1`` delivers; all if it ``releases``.
        """
        late = [late for late in self._buffers.get(task, ()) if releases or late.overlaps(low, high)]
        return tuple({(one.low, one.high, True) for top in late for one in top.chain()})

    def under_way(self, tasks: Collection[Any]) -> bool:
        """True if stores of these programs are still buffered, in an exhaustive search."""
        return self._tasks and any(task in self._buffers for task in tasks)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _add(
        self,
        task: Any,
        addresses: np.ndarray,
        bits: np.ndarray,
        tma: bool,
        covered: bool,
        after: list[BufferedStore],
        landed: Landed,
    ) -> None:
        low, high = int(addresses.min()), int(addresses.max()) + bits.dtype.itemsize
        self.touch(task, low, high)
        after = [late for late in after if not late.arrived]
        late = BufferedStore(addresses, bits, low, high, tma, covered, self._line(task), after, landed)
        self._buffers.setdefault(task, []).append(late)
        if self._tasks:
            self._spawn(task, late)

    def _spawn(self, task: Any, late: BufferedStore) -> None:
        def arrive() -> None:
            own.next = tuple((one.low, one.high, True) for one in late.chain())
            self._machine.scheduler.step()
            self._arrive(task, [late])

        own = GreenletTask(self._machine.scheduler, task.rank, f"late store of {task.label}", arrive)
        own.maker, own.on_finish = task, lambda: None
        late.task = own
        self._machine.scheduler.spawn(own)

    def _before(self, task: Any) -> list[BufferedStore]:
        return [late for late in self._fenced.get(task, ()) if not late.arrived]

    def _covered(self, task: Any, scope: str) -> list[BufferedStore]:
        late = [late for late in self._buffers.get(task, ()) if late.covered]
        return late if scope == "sys" else [one for one in late if self._is_own(task, one)]

    def _all(self, held: bool) -> list[tuple[Any, BufferedStore]]:
        return [(t, late) for t, buffer in self._buffers.items() for late in buffer if self._held[late.line] == held]

    def _line(self, task: Any) -> tuple:
        """Source line of the running kernel's store.

        Its first store decides whether the line's stores are held back.
        """
        frame = self._machine.interpreter.kernel_frame(LIBRARIES)
        line = (task.rank, frame.f_code.co_filename, frame.f_lineno)
        if line not in self._held:
            self._held[line] = self._random.random() < _HELD
        return line

    def _is_own(self, task: Any, late: BufferedStore) -> bool:
        heap = self._machine.memory.heap_of(late.low)
        return heap is None or self._machine.memory.heap_rank(heap) == task.rank

    def _arrive(self, task: Any, chosen: Iterable[BufferedStore]) -> None:
        for late in list(chosen):
            if late.arrived:
                continue
            for one in late.chain():
                one.arrived = True
                one.after = []
                self._buffers[task].remove(one)
                if one.task is not None:
                    one.task.next = None  # nothing is left of it to order
                if one.landed is not None:
                    one.landed()
                everywhere = np.ones(one.addresses.shape, bool)
                self._machine.memory.store(one.addresses, one.bits, everywhere, lambda: task.label)
                self._machine.scheduler.written(one.low, one.high)
        if task in self._buffers and not self._buffers[task]:
            del self._buffers[task]

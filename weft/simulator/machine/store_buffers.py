"""Store buffers: a program's stores arrive in memory late, when an access needs them or at random.

PTX allows this wherever nothing orders two accesses: signals overtake data, a store overtakes stores to other bytes, later
loads overtake any store. A notify (a release store) is buffered too. It arrives after what it covers: stores before the last
CTA barrier, descriptor stores once drained. A fence does not empty the buffer; stores after it arrive later than stores
before it. An atomic takes effect at once, after the arrival of the stores that its order covers (at GPU scope, stores to the
own GPU). Those that it leaves out are covered by later releases of the GPU's programs that acquire from it: PTX's causality
order passes through scopes. A program sees its stores at once, and a store that it has read back has arrived.

The observer is told of arrivals too: an acquire that finds the old value has not synchronised with the store.

In an exhaustive search each buffered store is a task, so that its arrival is a choice like any other. Otherwise the stores of
some source lines, chosen by the seed, are held back until no task can go on without them. Only so does a store arrive later
than a reply to a later store of its program.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.memory import Memory
from weft.simulator.machine.scheduler import Scheduler
from weft.simulator.machine.stores import Landed, Stores
from weft.simulator.machine.tasks import Footprint, GreenletTask, Task
from weft.simulator.places import Order, Places, Scattered

# Probability for each access that some buffered store arrives, and for each line that its stores are held back.
_LEAK = 0.08
_HELD = 0.3
# Rank, file and line number of a store.
Line = tuple[int, str, int]


@dataclass(slots=True, eq=False)
class BufferedStore:
    """One buffered store.

    owner    program that made it
    covered  by later releases
    after    stores that arrive before it
    landed   called just before its bits are in memory
    """

    owner: Task
    addresses: np.ndarray
    bits: np.ndarray
    low: int
    high: int
    tma: bool
    covered: bool
    line: Line
    after: list[BufferedStore]
    landed: Landed = None
    drained: bool = False
    arrived: bool = False
    task: GreenletTask | None = None

    def overlaps(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high

    def chain(self) -> list[BufferedStore]:
        """Stores that must arrive for this one, in order, this one last."""
        before: list[BufferedStore] = []
        for late in self.after:
            if not late.arrived:
                before += [one for one in late.chain() if one not in before]
        return [*before, self]


class StoreBuffers(Stores):
    """Store buffers of all programs.

    line   function that returns the running kernel's line
    tasks  each store is a task, for an exhaustive search
    """

    is_late = True

    def __init__(
        self, scheduler: Scheduler, memory: Memory, line: Callable[[], CodeLine | None], seed: int, tasks: bool
    ) -> None:
        super().__init__(scheduler, memory)
        self._code_line, self._random, self._tasks = line, random.Random(seed), tasks
        self._buffers: dict[Task, list[BufferedStore]] = {}
        self._fenced: dict[Task, list[BufferedStore]] = {}  # stores before the last fence
        # By rank and address of an atomic: stores to peers that releases at GPU scope covered; by program: stores it acquired.
        self._released: dict[tuple[int, int], list[BufferedStore]] = {}
        self._acquired: dict[Task, list[BufferedStore]] = {}
        self._held: dict[Line, bool] = {}

    # --- actions of the running program ------------------------------------------------------------------------------

    def take(self, places: Places, bits: np.ndarray, access: str, landed: Landed) -> None:
        if not places.is_empty:
            one_thread = math.prod(places.shape) == 1 and access != "tma"
            self._add(places, bits[places.mask], access == "tma", one_thread, self._before(), landed)

    def take_release(self, place: Places, bits: np.ndarray, landed: Landed) -> None:
        self._add(place, bits, False, True, [*self._before(), *self._covered("sys")], landed)

    def before_access(self, places: Places) -> None:
        self._leak()
        if not places.is_empty:
            self.touch(places.low, places.high)

    def touch(self, low: int, high: int) -> None:
        self._arrive([late for late in self._mine() if late.overlaps(low, high)])

    def before_atomic(self, addresses: np.ndarray, order: Order) -> None:
        if order.acquires and order.scope != "cta":
            for address in addresses:
                self.acquired(int(address))
        self._arrive([*self._before(), *(self._covered(order.scope) if order.releases else ())])
        left = self._covered("sys") if order.releases and order.scope == "gpu" else []
        for address in addresses if left else ():
            place = self._task.rank, int(address)
            self._released[place] = [*_under_way(self._released.get(place, ())), *left]

    def acquired(self, address: int) -> None:
        if stores := _under_way(self._released.get((self._task.rank, address), ())):
            self._acquired[self._task] = [*_under_way(self._acquired.get(self._task, ())), *stores]

    def barrier(self) -> None:
        for late in self._mine():
            late.covered = late.covered or not late.tma or late.drained

    def drain(self) -> None:
        for late in self._mine():
            late.drained = True

    def fence(self) -> None:
        landing = [late for late in self._mine() if not late.tma or late.drained]
        self._fenced[self._task] = landing + self._known()

    def end(self, program: Task) -> None:
        self._acquired.pop(program, None)
        if not self._tasks:
            self._arrive(self._buffers.get(program, ()))

    # --- arrivals over time ------------------------------------------------------------------------------------------

    def _leak(self) -> None:
        """Deliver one buffered store, at random."""
        if self._buffers and not self._tasks and self._random.random() < _LEAK:
            free = self._all(held=False)
            if free:
                self._arrive([self._random.choice(free)])

    def time_passes(self) -> bool:
        """Deliver one program's stores of one line, held ones last."""
        left = self._all(held=False) or self._all(held=True)
        if left:
            late = self._random.choice(left)
            self._arrive([other for other in self._buffers[late.owner] if other.line == late.line])
        return bool(left)

    # --- for exhaustive search ---------------------------------------------------------------------------------------

    def footprint(self, low: int, high: int, releases: bool, atomic: bool = False) -> Footprint:
        late = [late for late in self._mine() if releases or late.overlaps(low, high)]
        late += self._known() if releases else self._before() if atomic else []
        return tuple({(one.low, one.high, True) for top in late for one in top.chain()})

    def under_way(self, programs: Collection[Task]) -> bool:
        return self._tasks and any(program in self._buffers for program in programs)

    # --- internals ---------------------------------------------------------------------------------------------------

    @property
    def _task(self) -> Task:
        return self._scheduler.current

    def _mine(self) -> Iterable[BufferedStore]:
        return self._buffers.get(self._task, ())

    def _add(
        self,
        places: Places,
        bits: np.ndarray,
        tma: bool,
        covered: bool,
        after: list[BufferedStore],
        landed: Landed,
    ) -> None:
        """``bits``: of the places that are not masked off."""
        low, high = places.low, places.high
        self.touch(low, high)
        after = [late for late in after if not late.arrived]
        late = BufferedStore(
            self._task, places.active.ravel(), bits.ravel(), low, high, tma, covered, self._line(), after, landed
        )
        self._buffers.setdefault(self._task, []).append(late)
        if self._tasks:
            self._spawn(late)

    def _spawn(self, late: BufferedStore) -> None:
        def arrive() -> None:
            own.next = tuple((one.low, one.high, True) for one in late.chain())
            self._scheduler.step()
            self._arrive([late])

        owner = late.owner
        own = late.task = GreenletTask(owner.rank, f"late store of {owner.label}", arrive, maker=owner)
        own.on_finish = lambda: None
        self._scheduler.spawn(own)

    def _before(self) -> list[BufferedStore]:
        return _under_way(self._fenced.get(self._task, ()))

    def _known(self) -> list[BufferedStore]:
        """Stores of other programs that the running one has acquired."""
        return _under_way(self._acquired.get(self._task, ()))

    def _covered(self, scope: str) -> list[BufferedStore]:
        late = [*(late for late in self._mine() if late.covered), *self._known()]
        return late if scope == "sys" else [one for one in late if self._is_own(one)]

    def _all(self, held: bool) -> list[BufferedStore]:
        return [late for buffer in self._buffers.values() for late in buffer if self._held[late.line] == held]

    def _line(self) -> Line:
        """Line of the running store. Its first store decides whether the line's stores are held back."""
        code, number = self._code_line()
        line = (self._task.rank, code.co_filename, number)
        if line not in self._held:
            self._held[line] = self._random.random() < _HELD
        return line

    def _is_own(self, late: BufferedStore) -> bool:
        heap = self._memory.heap_of(late.low)
        return heap is None or self._memory.heap_rank(heap) == late.owner.rank

    def _arrive(self, chosen: Iterable[BufferedStore]) -> None:
        for late in list(chosen):
            if late.arrived:
                continue
            for one in late.chain():
                one.arrived = True
                one.after = []
                self._buffers[one.owner].remove(one)
                if not self._buffers[one.owner]:
                    del self._buffers[one.owner]
                if one.task is not None:
                    one.task.next = None  # nothing is left of it to order
                if one.landed is not None:
                    one.landed()

                places = Scattered(one.addresses, None, one.bits.dtype.itemsize)
                self._memory.write(places, one.bits, lambda owner=one.owner: owner.label)
                self._scheduler.written(one.low, one.high)


def _under_way(stores: Iterable[BufferedStore]) -> list[BufferedStore]:
    return [late for late in stores if not late.arrived]

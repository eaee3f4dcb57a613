"""Memory accesses of running programs: the interpreter's port for loads, stores, atomics and fences.

Each access is one step of the scheduler, of which the observer is then told.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Callable, Mapping

import numpy as np

from weft.errors import InvalidAccess, NotInterpretable, Unsupported, WeftError
from weft.simulator import interpreter
from weft.simulator.interpreter import CodeLine, Interpreter
from weft.simulator.machine.grids import Program
from weft.simulator.machine.memory import Memory
from weft.simulator.machine.pointers import Pointers
from weft.simulator.machine.polling import Key, Read, ReadHistory
from weft.simulator.machine.scheduler import Scheduler
from weft.simulator.machine.stores import Stores
from weft.simulator.machine.strategy import Uniform
from weft.simulator.machine.tasks import GreenletTask, Task, Waiting
from weft.simulator.observer import Observer
from weft.simulator.places import UNSIGNED, Order, Places, Scattered, one_place
from weft.simulator.ptx.threads import Position

# New element of memory from (old element, operand).
Combine = Callable[[np.generic, np.generic], np.generic]
# (step, label of the task, kind, detail).
Event = tuple[int, str, str, str]


class Accesses:
    """Part of ``Machine`` that running programs call; ``interpreter.port.Port`` describes most of it."""

    values = interpreter  # conversions of a kernel's values, for primitives that run as Python functions

    def __init__(self, seed: int, slow: Mapping[int, float] | None, on_event: Callable[[Event], None] | None) -> None:
        self.scheduler = Scheduler(Uniform(seed, slow))
        self.memory = Memory()
        self.pointers = Pointers(self.memory)
        self.interpreter = Interpreter(self)
        # A check replaces these two.
        self.observer = Observer()
        self.stores = Stores(self.scheduler, self.memory)
        self._on_event = on_event
        self.remote_atomics = True  # the links within a node carry them
        self.multicasts: list[tuple[int, int, list[int]]] = []  # base and size of a range, and the bases of its members
        self._copies: dict[Task, list[tuple[GreenletTask, str]]] = {}  # by program: copies not known to be complete

    @property
    def rank(self) -> int:
        """Rank of the running task. Unsupported where none runs: a team is used outside its simulation."""
        task = self.scheduler.current
        if task is None:
            raise Unsupported(
                "a team of virtual ranks is used where no rank runs, such as after weft.simulate has returned; use it in "
                "main(team), and return plain values"
            )
        return task.rank

    def who(self) -> str:
        """Label of the running task and, in a kernel, its source line, for messages."""
        task = self.scheduler.current
        line = self.interpreter.kernel_line() if isinstance(task, Program) else None
        if line is None:
            return task.label
        who = f"{task.label} ({os.path.basename(line[0].co_filename)}:{line[1]})"
        self.observer.note_named(who)
        return who

    def note(self, kind: str, detail: str = "") -> None:
        if self._on_event is not None:
            self._on_event((self.scheduler.steps, self.scheduler.current.label, kind, detail))

    def program(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        task = self.scheduler.current
        return task.index, task.grid.launch.grid

    def step(
        self, places: Places, what: str, write: bool, releases: bool = False, late: bool = False, atomic: bool = False
    ) -> None:
        """Let other tasks run before this access, then deliver the stores that it must find.

        what  kind of its event, "" without one
        late  the access only enters the store buffer
        """
        if self.scheduler.strategy.explores:
            task, is_active = self.scheduler.current, not places.is_empty
            low, high = (places.low, places.high) if is_active else (0, 0)
            own = ((low, high, write),) if is_active and not late else ()
            task.next = own + self.stores.footprint(low, high, releases, atomic)
            task.next_line = self.interpreter.kernel_line()
        self.scheduler.step()
        if what and self._on_event is not None:
            self.note(what, "nothing" if places.is_empty else self.memory.describe(places.first))
        if what or not places.is_empty:
            self.stores.before_access(places)

    def plain(self, places: Places, verb: str) -> Places:
        """Places of the running kernel's pointers. InvalidAccess where a pointer has left its tensor."""
        return self.pointers.plain(places, self.who, verb)

    def load(self, places: Places, access: str) -> np.ndarray:
        places = self.plain(places, "load")
        key = self.before_read(places)
        self.step(places, "load", False)
        bits = self.memory.read(places, self.who)
        self.after_read(key, Read(f"{access} load", places, bits))
        self.observer.load(places, access, bits)
        return bits

    def store(self, places: Places, bits: np.ndarray, access: str) -> None:
        places = self.plain(places, "store")
        self.step(places, "store", True, late=self.stores.is_late)
        self.note_write()
        places.targets = self.memory.check(places, self.who)
        self.stores.take(places, bits, access, self.observer.store(places, access, bits))

    def atomic(self, op: str, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, order: Order) -> np.ndarray:
        return self._read_modify_write(op, addresses, values, mask, _COMBINE[op], order)

    def cas(self, addresses: np.ndarray, compare_bits: np.ndarray, bits: np.ndarray, order: Order) -> np.ndarray:
        expected = iter(np.broadcast_to(compare_bits, addresses.shape).ravel())
        mask = np.ones(addresses.shape, bool)

        def combine(old: np.generic, new: np.generic) -> np.generic:
            return new if old == next(expected) else old

        return self._read_modify_write("cas", addresses, bits, mask, combine, order)

    # --- polling programs --------------------------------------------------------------------------------------------

    def before_read(self, places: Places) -> Key | None:
        """Note a read that is about to come.

        A program that only polls is blocked until the polled bytes change.
        """
        if places.is_empty:
            return None
        task = self.scheduler.current
        history = task.history = task.history or ReadHistory()
        key = places.first, math.prod(places.shape), places.itemsize
        if history.repeats(key, self.interpreter.frames.state):
            self._spin(task, history)
            task.history = ReadHistory(counts={key: 1})
        return key

    def after_read(self, key: Key | None, read: Read) -> None:
        """Note the bits that the running program has read without changing memory."""
        if key is None:
            return
        history = self.scheduler.current.history
        is_new = history.counts.get(key) == 1
        is_plain = read.verb in ("plain load", "tma load", "lamport load")
        polls = history.add(key, read)
        if polls:
            history.code = self.interpreter.kernel_line()
        self.scheduler.polled(plain=is_plain and not polls, new=is_new)

    def note_write(self) -> None:
        """Note that the running program changes memory: its next round may differ from the last."""
        self.scheduler.current.history = None

    def _spin(self, task: Task, history: ReadHistory) -> None:
        reads = list(history.round.reads.values())
        history.code = self.interpreter.kernel_line()

        def done() -> bool:
            try:
                return any(not np.array_equal(self.memory.read(k.places, lambda: task.label), k.bits) for k in reads)
            except InvalidAccess:  # freed since then: the program's next read raises
                return True

        self.observer.spins(reads[0].places.low, history.code)
        low, high = min(read.places.low for read in reads), max(read.places.high for read in reads)
        self.scheduler.block(Waiting(done, lambda: self.describe_spin(reads, history.code), low, high))

    def describe_spin(self, reads: list[Read], code: CodeLine | None) -> str:
        """Description of a spinning program's loads and atomics, for messages."""
        place = f" in {os.path.basename(code[0].co_filename)}:{code[1]}" if code else ""
        seen = "; ".join(f"{read.verb} of {self._seen(read)}" for read in reads[:3])
        more = f" and {len(reads) - 3} more" if len(reads) > 3 else ""
        return f"spins{place}: {seen}{more}"

    def _seen(self, read: Read) -> str:
        active = read.bits[read.places.mask]
        first = int(active.flat[0])
        bits = 8 * read.places.itemsize
        value = first - (1 << bits) if first >> (bits - 1) else first
        name = self.memory.describe(read.places.low)
        return f"{name} sees {value}" if active.size == 1 else f"{active.size} elements from {name} sees {value} first"

    def barrier(self) -> None:
        """CTA barrier. A program is one task here, so there is nothing to wait for."""
        self.observer.barrier()
        self.stores.barrier()

    def release_store(self, address: int, bits: int, itemsize: int) -> None:
        """Release store by one thread at system scope."""
        at = self.plain(one_place(address, (1,), itemsize), "store")
        self.step(at, "store", True, late=self.stores.is_late)
        self.note_write()
        value = np.array([bits & ((1 << 8 * itemsize) - 1)], f"uint{8 * itemsize}")
        self.memory.check(at, self.who)
        self.stores.take_release(at, value, self.observer.notified(at.low, int(value[0]), itemsize))

    def copy_later(
        self, target: Places, source: Places, convert: Callable[[np.ndarray], np.ndarray], what: str
    ) -> None:
        """Begin a copy of the running program that may take place any time up to ``complete_copies``.

        what  "put", "get", or "put_signal" (a put delivered before the program's next signal)
        """
        task, source, target = self.scheduler.current, self.plain(source, "load"), self.plain(target, "store")
        for places in (source, target):
            self.step(places, "", False, late=True)
        bits = self.memory.read(source, self.who)
        self.memory.check(target, self.who)
        landed = self.observer.copies(target, source, bits, what)

        def move() -> None:
            self.scheduler.current.next = ((target.low, target.high, True), (source.low, source.high, False))
            self.scheduler.step()
            if landed is not None:
                landed()
            bits = self.memory.read(source, lambda: task.label)
            self.memory.write(target, convert(bits), lambda: task.label)
            self.scheduler.written(target.low, target.high)

        if what == "put_signal":
            move()
            return
        copy = GreenletTask(task.rank, f"copy of {task.label}", move, maker=task)
        self._copies.setdefault(task, []).append((copy, what))
        self.scheduler.spawn(copy)

    def complete_copies(self, *kinds: str) -> None:
        """Block the running program until its copies (of ``kinds``, if any are named) are complete."""
        task = self.scheduler.current
        if not kinds:
            self.observer.completed()
        awaited = [copy for copy, what in self._copies.get(task, ()) if not kinds or what in kinds]
        if awaited:
            task.next = None
            self.scheduler.block(
                Waiting(lambda: all(copy.finished for copy in awaited), lambda: "waits for its copies")
            )
            left = [entry for entry in self._copies[task] if not entry[0].finished]
            self._copies[task] = left
            if not left:
                del self._copies[task]

    def computed(self, operations: int) -> None:
        self.observer.computed(operations)

    def has_exact_dots(self) -> bool:
        return self.scheduler.current.exact_dots

    def ask_exact_dots(self) -> None:
        """Have the program's later matrix products depend on no shape of their blocks."""
        self.scheduler.current.exact_dots = True

    def drain_async(self, by_all: bool = True) -> None:
        self.observer.drain(by_all)
        self.stores.drain()

    def fence_async(self) -> None:
        self.observer.fence_proxy()

    def wait_for_previous_kernel(self) -> None:
        """Order the running program after the previous kernels, which have already ended here."""
        self.observer.followed()

    def let_next_kernel_start(self) -> None:
        self.observer.let_next_start()

    def fence(self, scope: str = "sys") -> None:
        """Fence in every thread of the running program. One of scope "gpu" orders nothing for peers."""
        if scope == "sys":
            self.complete_copies("put")
        self.step(Scattered(np.zeros(0, np.uint64), None, 1), "", True)
        self.observer.fence(scope)
        if scope == "sys":
            self.stores.fence()

    # --- threads of a program ----------------------------------------------------------------------------------------

    def position(self) -> Position:
        task = self.scheduler.current
        launch = task.grid.launch
        return Position(threads=launch.threads, index=task.index, grid=launch.grid, sm=task.number)

    def active_threads(self) -> np.ndarray | None:
        branches = getattr(self.scheduler.current, "branches", None)
        return branches[-1] if branches else None

    def diverge(self, taken: np.ndarray) -> bool:
        active = self.active_threads()
        taken = taken if active is None else taken & active
        if taken.any():
            self.scheduler.current.branches.append(taken)
        return bool(taken.any())

    def converge(self) -> None:
        self.scheduler.current.branches.pop()

    def multicast(self, addresses: np.ndarray) -> list[np.ndarray]:
        for base, size, members in self.multicasts:
            offsets = addresses - np.uint64(base)
            if addresses.size and (offsets < np.uint64(size)).all():
                return [offsets + np.uint64(member) for member in members]
        raise NotInterpretable(f"{int(addresses[0]):#x} is no multicast address")

    def _check_remote(self, op: str, places: Places) -> None:
        """WeftError for an atomic on a peer's memory over links that carry none."""
        for address in () if self.remote_atomics else np.unique(places.active).tolist():
            heap = self.memory.heap_of(address)
            if heap is not None and self.memory.heap_rank(heap) != self.rank:
                raise WeftError(
                    f"{self.who()}: atomic {op} on {self.memory.describe(address)}: the link is PCIe, which carries no "
                    f"atomics; store to a place of this rank's own there, and notify"
                )

    def _read_modify_write(
        self, op: str, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, combine: Combine, order: Order
    ) -> np.ndarray:
        """Atomic, element by element: duplicates among the addresses must see each other."""
        dtype = values.dtype
        places = self.plain(
            Scattered(addresses, np.broadcast_to(mask, addresses.shape), dtype.itemsize), f"atomic {op}"
        )
        self._check_remote(op, places)
        only_reads = op == "add" and not np.asarray(values).any()
        key = self.before_read(places)
        self.step(places, op, not only_reads, releases=order.releases, atomic=True)
        unsigned = UNSIGNED[dtype.itemsize]
        values = np.broadcast_to(values, places.shape)
        active = places.active.ravel()
        self.stores.before_atomic(active, order)
        old = np.zeros(active.size, unsigned)
        new, changed = old.copy(), []
        operands = values.ravel() if places.is_whole else values[places.mask]
        for i, (address, value) in enumerate(zip(active.tolist(), operands, strict=True)):
            at = one_place(address, (1,), dtype.itemsize)
            bits = self.memory.read(at, self.who)
            result = np.asarray(combine(bits.view(dtype)[0], value), dtype=dtype).reshape(1).view(unsigned)
            old[i], new[i] = bits[0], result[0]
            if result[0] != bits[0]:
                self.memory.write(at, result, self.who)
                changed.append(at.low)
        before = np.zeros(places.shape, unsigned)
        before[places.mask] = old
        if changed:
            self.note_write()
            self.scheduler.written(min(changed), max(changed) + dtype.itemsize)
        else:
            self.after_read(key, Read(f"atomic {op}", places, before))
        if order.by == "tma":
            self.observer.reduced(op, active, new, order.scope)
        else:
            self.observer.atomic(op, active, old, new, order)
        return before


_COMBINE: dict[str, Combine] = {
    "add": lambda old, new: old + new,
    "fadd": lambda old, new: old + new,
    "xchg": lambda old, new: new,
    "min": min,
    "max": max,
    "umin": min,
    "umax": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
}

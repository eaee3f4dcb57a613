"""Virtual time of simulated ranks: a cost for each operation, and the earliest task goes on.

Each task has a clock. Operations add their cost to it (``Costs``); a wait sets it to the time at which the awaited
signal is visible, if that is later. A kernel's programs start on the SM that is free first, after the stream's kernel before.
Host code takes no time, as if all launches were in a CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.simulator.machine.grids import Grid, Program
from weft.simulator.machine.machine import Machine
from weft.simulator.machine.memory import is_met, signed
from weft.simulator.machine.pointers import ADDRESS
from weft.simulator.machine.strategy import Strategy
from weft.simulator.machine.tasks import Task, ThreadTask
from weft.simulator.observer import Observer
from weft.simulator.places import Order, Places
from weft.trace.timeline import Event, Signal, span_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Virtual nanoseconds of an operation: an H200's, rounded.

    access         load or store of a program, besides its bytes: latency is taken to be hidden
    bytes_per_ns   of one program's loads and stores: a 132nd of the memory's bandwidth, and what one sends over NVLink
    atomic         atomic of a program
    flops_per_ns   of one program's matrix products: a 132nd of 790 TFLOP/s
    hop            from a notify to its sight at another rank
    launch         between two kernels of a stream
    copy           start of a copy engine's copy
    link_per_ns    its bytes
    flag           a copy engine's signal
    library        shortest cuBLAS GEMM, which otherwise runs at 132 * flops_per_ns
    rail           from a rank to one of another node, besides ``rail_per_ns``
    """

    access: int = 20
    bytes_per_ns: int = 32
    atomic: int = 500
    flops_per_ns: int = 6000
    hop: int = 1200
    launch: int = 1300
    copy: int = 2200
    link_per_ns: int = 375
    flag: int = 2300
    library: int = 3000
    rail: int = 5000


class Earliest:
    """Strategy of a run in virtual time: the task with the earliest clock."""

    explores = False

    def __init__(self, time_of: Callable[[Task], int]) -> None:
        self._time_of = time_of

    def choose(self, ready: Sequence[Task], step: int) -> Task:
        return min(ready, key=self._time_of)

    def polled(self, task: Task) -> None: ...


@dataclass(slots=True)
class _Copy:
    """Operation of a side stream so far."""

    rank: int
    stream: str
    label: str
    source: torch.Tensor
    start: int
    end: int
    nbytes: int = 0
    cause: str = ""
    signal: Signal | None = None


class VirtualTime(Observer):
    """Observer that keeps the clocks and collects the events."""

    def __init__(self, machine: Machine, strategy_before: Strategy) -> None:
        self._machine, self._costs, self.strategy_before = machine, Costs(), strategy_before
        ranks = range(machine.world_size)
        self._clocks: dict[Task, int] = {}
        self._hosts, self._mains = [0 for _ in ranks], [0 for _ in ranks]
        self._sides: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._free = [[0] * machine.sms for _ in ranks]
        self._sm: dict[Task, int] = {}
        self._starts: dict[Task, int] = {}
        self._grids: dict[Grid, int] = {}
        # By address: (time at which it is visible, bits). By 16 bytes of Lamport data: that time.
        self._words: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._data: dict[int, int] = {}
        self._waiting: dict[Task, int] = {}
        self._exchange: dict[Task, Signal] = {}  # of the task's next Lamport load
        self._met: dict[str, int] = {}
        self._events: list[Event] = []
        self._copies: dict[Task, _Copy] = {}

    def time_of(self, task: Task) -> int:
        """Clock of a task; of host code a separate one, which launches and copies do not advance."""
        return self._hosts[task.rank] if isinstance(task, ThreadTask) else self._clocks.get(task, 0)

    def events(self) -> list[Event]:
        copies = [
            Event(
                rank=copy.rank, track=copy.stream, kind="notify" if copy.signal else "copy", name=copy.label,
                start=copy.start, end=copy.end, nbytes=0 if copy.signal else copy.nbytes, signal=copy.signal,
                cause=copy.cause,
            )
            for copy in self._copies.values()
        ]  # fmt: skip
        return [*self._events, *copies]

    # --- accesses of kernels -----------------------------------------------------------------------------------------

    def load(self, places: Places, how: str, bits: np.ndarray) -> None:
        self._spend(self._of_bytes(places.mask, places.itemsize))
        if how == "lamport" and not places.is_empty:
            visible = max((self._data.get(at, 0) for at in _granules(places.active)), default=0)
            self._see(visible, *self._named(places.first), self._exchange.pop(self._task, None))
        elif how == "volatile" and not places.is_empty:
            self._catch_up(places.active)

    def store(self, places: Places, how: str, bits: np.ndarray) -> None:
        self._spend(self._of_bytes(places.mask, places.itemsize))
        if how == "lamport" and not places.is_empty:
            visible = self._visible(places.first)
            self._data.update((at, visible) for at in _granules(places.active))
        elif np.count_nonzero(places.mask) == 1:
            self._words[places.first].append((self._visible(places.first), int(bits[places.mask][0])))

    def notified(self, address: int, bits: int, itemsize: int) -> None:
        self._notify(address, bits, itemsize)

    def atomic(self, op: str, addresses: np.ndarray, old: np.ndarray, new: np.ndarray, order: Order) -> None:
        if order.acquires:
            self._catch_up(addresses)
        if not np.array_equal(old, new):
            # A relaxed one after a fence is a signal too.
            signals = order.releases or not order.acquires
            if order.scope == "sys" and signals and addresses.size == 1:
                self._notify(int(addresses[0]), int(new[0]), new.dtype.itemsize)
            else:
                # Others may follow at once; this program waits for its result.
                for address, word in zip(addresses.tolist(), new.tolist(), strict=True):
                    self._words[address].append((self._visible(address), word))
                self._spend(self._costs.atomic)
        else:
            self._spend(self._costs.access)

    def reduced(self, op: str, addresses: np.ndarray, new: np.ndarray, scope: str) -> None:
        self._spend(self._of_bytes(np.ones(new.shape, bool), new.dtype.itemsize))

    def copies(self, target: Places, source: Places, bits: np.ndarray, what: str) -> None:
        self._spend(self._of_bytes(target.mask, target.itemsize))

    def computed(self, operations: int) -> None:
        self._spend(-(-operations // self._costs.flops_per_ns))

    # --- spans of a timeline -----------------------------------------------------------------------------------------

    def began(self) -> int:
        return self._now() & 0x7FFFFFFF

    def recorded(self, kind: str, began: int, address: int, peer: int, value: int) -> None:
        start = self._now() - (self._now() - began & 0x7FFFFFFF)
        if kind not in ("tile", "put"):
            return  # waits and notifies have events of their own
        rank, details = self._task.rank, {}
        if kind == "put":
            data = self._data_at(address & ADDRESS, None if peer == rank else peer)
            details = {"nbytes": value, "cause": self._named(address & ADDRESS)[0], "signal": data}
        self._of_program(kind, span_name(kind, address, peer, rank), start, **details)

    def names_words(self, address: int) -> None:
        self._exchange[self._task] = self._data_at(address & ADDRESS, self._task.rank)

    # --- waits -------------------------------------------------------------------------------------------------------

    def waits(self, addresses: list[int], itemsize: int, wanted: int, comparison: str) -> None:
        self._waiting[self._task] = self._now()

    def waited(self, addresses: list[int], index: int, itemsize: int, wanted: int, comparison: str) -> None:
        self._spend(self._costs.access)
        address = addresses[index]
        known = self._words[address]
        times = [time for time, word in known if is_met(signed(word, itemsize), comparison, wanted, itemsize)]
        place = self._place(address)
        asked = Signal(place=place, value=wanted if comparison == ">=" else None, bits=8 * itemsize)
        began = self._waiting.pop(self._task)
        self._see(times[0] if times else 0, *self._named(address), asked, began)

    def waits_for_data(self, address: int) -> None:
        self._waiting[self._task] = self._now()

    # --- kernels -----------------------------------------------------------------------------------------------------

    def launch(self, grid: Grid) -> None:
        self._grids[grid] = max(self._mains[grid.rank] + self._costs.launch, self._hosts[grid.rank])

    def program_started(self, program: Program) -> None:
        free = self._free[program.rank]
        at = free.index(min(free))
        start = max(self._grids.get(program.grid, 0), free[at])
        at = next(sm for sm, time in enumerate(free) if time <= start)
        self._clocks[program] = self._starts[program] = start
        self._sm[program] = at
        free[at] = 1 << 62  # taken

    def program_ended(self, program: Program) -> None:
        if program not in self._sm:
            return  # it had started before the trace
        end = self._clocks[program]
        self._of_program("kernel", program.grid.launch.name, self._starts.pop(program), task=program)
        self._free[program.rank][self._sm.pop(program)] = end
        self._mains[program.rank] = max(self._mains[program.rank], end)

    # --- host code, streams, rendezvous ------------------------------------------------------------------------------

    def fork(self, stream: str) -> None:
        rank = self._machine.rank
        self._sides[rank, stream] = max(self._sides[rank, stream], self._mains[rank])

    def joined(self, stream: str) -> None:
        rank = self._machine.rank
        self._mains[rank] = max(self._mains[rank], self._sides[rank, stream])

    def enqueued(self, stream: str, label: str, tensors: list[torch.Tensor]) -> Callable[[], None]:
        rank = self._machine.rank
        ready = max(self._hosts[rank], self._sides[rank, stream])

        def begin() -> None:
            task, start = self._task, max(ready, self._sides[rank, stream])
            self._clocks[task] = self._sides[rank, stream] = start
            self._copies[task] = _Copy(rank, stream, label, tensors[-1], start, start)

        return begin

    def copied(self, target: int, source: int, nbytes: int, itemsize: int, is_signal: bool) -> None:
        task, costs = self._task, self._costs
        copy = self._copies.get(task)
        if copy is None:
            return  # it had been enqueued before the trace
        if is_signal:
            copy.end += costs.flag
            word = int(copy.source) & (1 << 8 * itemsize) - 1
            self._words[target].append((copy.end, word))
            copy.signal = Signal(place=self._place(target), value=signed(word, itemsize), bits=8 * itemsize)
            copy.cause, name = self._named(target)
            copy.label = f"notify {name} of rank {copy.signal.place[0]}"
        else:
            copy.end += -(-nbytes // costs.link_per_ns) + (costs.copy if copy.nbytes == 0 else 0)
        copy.nbytes += nbytes
        self._clocks[task] = self._sides[copy.rank, copy.stream] = copy.end

    def published(self) -> int:
        return self._clocks.get(self._task, 0)

    def learned(self, known: object) -> None:
        task = self._task
        if isinstance(known, int) and (copy := self._copies.get(task)) is not None:
            copy.end = self._clocks[task] = max(self._clocks[task], known + self._costs.rail)

    def synchronized(self, rank: int) -> None:
        sides = [time for (owner, _), time in self._sides.items() if owner == rank]
        self._hosts[rank] = max(self._hosts[rank], self._mains[rank], *sides)

    def rendezvous_entered(self, rendezvous: str, rank: int, streams: bool) -> None:
        time = max(self._mains[rank], self._hosts[rank]) if streams else self._hosts[rank]
        self._met[rendezvous] = max(self._met.get(rendezvous, 0), time)

    def rendezvous_left(self, rendezvous: str, rank: int) -> None:
        self._hosts[rank] = max(self._hosts[rank], self._met.get(rendezvous, 0))
        self._mains[rank] = max(self._mains[rank], self._hosts[rank])

    def library_gemm(self, rank: int, name: str, operations: int) -> None:
        """Note a cuBLAS GEMM of the rank's main stream, which the simulator computes as host work."""
        start = max(self._mains[rank] + self._costs.launch, self._hosts[rank])
        end = start + max(self._costs.library, operations // (132 * self._costs.flops_per_ns))
        self._mains[rank] = end
        self._events.append(Event(rank=rank, track="stream 0", kind="gemm", name=name, start=start, end=end))

    # --- parts -------------------------------------------------------------------------------------------------------

    @property
    def _task(self) -> Task:
        return self._machine.scheduler.current

    def _now(self) -> int:
        return self._clocks.get(self._task, 0)

    def _spend(self, ns: int) -> None:
        self._clocks[self._task] = self._now() + ns

    def _of_bytes(self, mask: np.ndarray, itemsize: int) -> int:
        return self._costs.access + int(np.count_nonzero(mask)) * itemsize // self._costs.bytes_per_ns

    def _see(self, visible: int, cause: str, name: str, asked: Signal | None = None, began: int | None = None) -> None:
        """Set the program's clock to ``visible`` if that is later; it had to poll since ``began``."""
        task, now = self._task, self._now()
        if began is None:
            began = self._waiting.pop(task, now)
        if visible > now:
            self._clocks[task] = visible
            self._of_program("wait", f"wait for {name}", began, cause=cause, signal=asked)

    def _catch_up(self, addresses: np.ndarray) -> None:
        """Order the program after the last writes of these words, which it has seen."""
        visible = max((self._words[at][-1][0] for at in addresses.ravel().tolist() if self._words.get(at)), default=0)
        self._clocks[self._task] = max(self._now(), visible)

    def _notify(self, address: int, bits: int, itemsize: int) -> None:
        start = self._now()
        self._spend(self._costs.access)
        self._words[address].append((self._visible(address), bits))
        place = self._place(address)
        signal = Signal(place=place, value=signed(bits, itemsize), bits=8 * itemsize)
        cause, name = self._named(address)
        self._of_program("notify", f"notify {name} of rank {place[0]}", start, cause=cause, signal=signal)

    def _visible(self, address: int) -> int:
        """Time at which the program's store to ``address`` is visible to the rank that owns it."""
        is_far = self._owner(address) != self._task.rank
        return self._now() + (self._costs.hop if is_far else 0)

    def _owner(self, address: int) -> int:
        heap = self._machine.memory.heap_of(address)
        return self._task.rank if heap is None else self._machine.memory.heap_rank(heap)

    def _place(self, address: int) -> tuple[int, int]:
        return self._owner(address), self._machine.memory.place(address)

    def _data_at(self, address: int, rank: int | None) -> Signal:
        """Data of ``rank``, None for all other ranks, at the offset that ``address`` has in its heap."""
        heap = self._machine.memory.heap_of(address)
        return Signal(place=(rank, address - (heap[0] if heap else 0)), value=None)

    def _named(self, address: int) -> tuple[str, str]:
        """Name of the tensor at ``address``, and that of its element."""
        extent = self._machine.memory.find(address)
        if extent is None:
            return "memory", f"{address:#x}"
        return extent.name, f"{extent.name}[{(address - extent.base) // extent.itemsize}]"

    def _of_program(self, kind: str, name: str, start: int, *, task: Task | None = None, **details: object) -> None:
        task = task or self._task
        if task not in self._sm:
            return  # a program that had started before the trace
        event = Event(
            rank=task.rank, track=f"SM {self._sm[task]}", kind=kind, name=name, start=start, end=self._clocks[task],
            program=task.number, kernel=task.grid.launch.name,
        )  # fmt: skip
        self._events.append(replace(event, **details))


def _granules(addresses: np.ndarray) -> list[int]:
    return np.unique(addresses >> np.uint64(4)).tolist()

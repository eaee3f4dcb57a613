"""Happens-before edges between launches, programs, host code, side streams and rendezvous of ranks.

A rank's host code has two clocks. ``main`` is its main stream: tensor operations and kernels, in order. ``cpu`` holds what the
host has waited for. Only ``synchronize`` and ``barrier`` join ``main`` into it, so a copy engine without a fork, or ranks that
met by ``exchange`` only, know nothing of earlier kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from weft.check.detector.host_lines import OF_WEFT, host_line
from weft.check.detector.races import Elements, Races
from weft.check.detector.residency import Residency
from weft.check.detector.signals import Signals
from weft.check.detector.thread_clocks import Access, ProgramClock, Sync, ThreadClock
from weft.check.detector.vector_clocks import joined, new_clock
from weft.runtime.team.view import TeamView
from weft.simulator.machine.grids import Grid, Program
from weft.simulator.machine.machine import Machine
from weft.simulator.machine.memory import signed
from weft.simulator.machine.tasks import Task
from weft.simulator.observer import Observer
from weft.simulator.places import Scattered

# Ordinary tensors of a rank kept known after their use, while an access that is not ordered after the use may still come.
_HELD = 64


@dataclass(slots=True, kw_only=True)
class GridOrder:
    """Order of a grid in its rank's stream.

    number         of the launch, from 1
    known          knowledge at the launch
    early          knowledge with which its programs may start, ``known`` unless it overlaps the kernel before it
    end            knowledge of its ended programs
    allowed_early  one of its programs, not yet after the kernel before, has let the next kernel start
    views          views of teams among its arguments
    reached        heaps in which its tensors lie
    """

    number: int
    known: np.ndarray
    early: np.ndarray
    end: np.ndarray
    views: list[TeamView]
    reached: set[tuple[int, int]]
    allowed_early: bool = False


class HappensBefore(Observer):
    """Clocks of all threads of execution of a run, and the edges between them."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.memory = machine, machine.memory
        self.races = Races(machine)
        self.signals = Signals(self.races)
        self.residency = Residency(machine.sms, self.memory, self.races.report)
        self._cpu = [new_clock() for _ in range(machine.world_size)]
        slots = self.races.slots
        self._main = [
            ThreadClock(slots, r, f"rank {r} host code", "main", new_clock()) for r in range(machine.world_size)
        ]
        self._streams: dict[tuple[int, str], ThreadClock] = {}
        self._forks: dict[tuple[int, str], np.ndarray] = {}
        self._rendezvous: dict[str, np.ndarray] = {}
        self._held: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(machine.world_size)]
        self._launches = [0] * machine.world_size
        self._issues = itertools.count()
        # The kernel directly before a rank's next one (None if host code came in between), and the knowledge of the side
        # streams joined since.
        self._previous: list[GridOrder | None] = [None] * machine.world_size
        self._since = [new_clock() for _ in range(machine.world_size)]
        self.orders: dict[Grid, GridOrder] = {}
        self._threads: WeakKeyDictionary[Task, ThreadClock] = WeakKeyDictionary()
        self._programs: dict[tuple[int, str, int], Program] = {}  # rank, kernel, number -> the last one started
        self.launched_names: list[list[str]] = [[] for _ in range(machine.world_size)]

    # --- programs ----------------------------------------------------------------------------------------------------

    def launch(self, grid: Grid) -> None:
        rank, launch = grid.rank, grid.launch
        main = self._main[rank]
        main.learn(self._cpu[rank])
        self._launches[rank] += 1
        known = main.publish()
        order = self.orders[grid] = GridOrder(
            number=self._launches[rank], known=known, early=known, end=known.copy(),
            views=[a for a in launch.tuples if isinstance(a, TeamView)],
            reached={heap for t in launch.tensors if (heap := self.memory.heap_of(t.data_ptr())) is not None},
        )  # fmt: skip
        previous, self._previous[rank] = self._previous[rank], order
        since, self._since[rank] = self._since[rank], new_clock()
        if grid.overlaps and previous is not None:
            # It may start once all programs of the previous grid allow it, which they may do before waiting themselves.
            before = previous.early if previous.allowed_early else previous.known
            order.early = joined(before.copy(), since)
        if order.views:
            self.launched_names[rank].append(f"{launch.name}{list(launch.grid)}")
        self.hold(rank, launch.tensors, f"argument of {launch.name}")  # already known by a better name

    def program_started(self, program: Program) -> None:
        grid, order = program.grid, self.orders[program.grid]
        # Two consecutive kernels may run at once, so they use different slots.
        place = program.number, order.number % 2
        thread = ProgramClock(self.races.slots, grid.rank, program.label, place, order.early.copy())
        if order.early is not order.known:
            thread.ahead = order.known
            thread.sync = Sync(f"{thread.sync.verb}, concurrently with the kernel before it")
        thread.grid, thread.launch, thread.reached = grid, order.number, set(order.reached)
        self._threads[program] = thread
        self._programs[grid.rank, grid.launch.name, program.number] = program

    def followed(self) -> None:
        thread = self.thread()
        if thread.ahead is not None:
            thread.follow()
            thread.sync = Sync("waited for the kernel before", None, self.races.code())

    def let_next_start(self) -> None:
        thread = self.thread()
        if thread.ahead is not None:
            self.orders[thread.grid].allowed_early = True

    def program_ended(self, program: Program) -> None:
        thread, order = self._threads[program], self.orders[program.grid]
        if thread.ahead is not None:
            name = program.grid.launch.name
            access = Access.of(thread, f"end of {name}")
            text = (
                f"{thread.label}, launched with launch_pdl=True, ends without having waited for the kernel before it: the "
                f"next kernel may start before that one has ended"
            )
            self.races.report("unfollowed", text, [access])
        order.end = joined(order.end, thread.finish())

    def grid_ended(self, grid: Grid) -> None:
        main = self._main[grid.rank]
        main.learn(self.orders.pop(grid).end)
        main.tick()
        main.sync = Sync(f"end of kernel {grid.launch.name}")

    def thread(self) -> ThreadClock:
        task = self.machine.scheduler.current
        return self._threads.get(task) or self._main[task.rank]

    # --- host code, streams, rendezvous ------------------------------------------------------------------------------

    def host_access(
        self, rank: int, addresses: np.ndarray, itemsize: int, verb: str, write: bool, before: dict[int, int]
    ) -> None:
        main = self._main[rank]
        main.launch = self._launches[rank]
        self.host_works(rank)
        main.learn(self._cpu[rank])
        main.code = host_line()
        access = self.races.access(main, "host", f"host {verb}")
        access.issued = next(self._issues)
        if not write:
            self.races.read(access, addresses, itemsize, self._bits(addresses, itemsize))
            return
        for address, old in before.items():
            signal = self.signals.at(address, itemsize)
            self.signals.stored(signal, access, self.signals.value(signal), old)
            self.signals.unordered(main, signal, None, keeps=False)()
        self.races.write(access, addresses, itemsize)

    def _bits(self, addresses: np.ndarray, itemsize: int) -> np.ndarray | None:
        """Bits that host code has read, if they lie in one tensor."""
        extent = self.memory.find(int(addresses.min()))
        if extent is None or int(addresses.max()) + itemsize > extent.base + extent.size:
            return None
        return self.memory.read(Scattered(addresses, None, itemsize), lambda: "host code")

    def host_works(self, rank: int) -> None:
        """Note main-stream work of host code that is no kernel: no kernel overlaps with it."""
        self._previous[rank] = None

    def host_touches(self, rank: int, tensor: torch.Tensor, verb: str) -> None:
        """Report host code that is about to use a freed tensor."""
        extent = self.machine.pointers.freed(tensor)
        if extent is not None:
            main = self._main[rank]
            main.code = host_line()
            access = self.races.access(main, "host", f"host {verb}")
            text = f"{self.races.describe(access)} uses {extent.name}, which was freed"
            whole = Elements(extent.name, rank, 0, extent.size // extent.itemsize - 1)
            self.races.report("use-after-free", text, [access], whole)

    def stream(self, name: str) -> ThreadClock:
        rank = self.machine.rank
        if (rank, name) not in self._streams:
            thread = ThreadClock(self.races.slots, rank, f"rank {rank}'s {name}", name, new_clock())
            self._streams[rank, name] = thread
        return self._streams[rank, name]

    def host_place(self) -> object:
        # Of the user's code: layers and other functions of weft call ops too.
        return host_line(OF_WEFT)

    def disagreed(self, text: str, first: int, place: object, rank: int) -> None:
        sides = [(first, place), (rank, self.host_place())]
        accesses = [replace(Access.of(self._main[side], "call", code), sync=Sync("")) for side, code in sides]
        self.races.report("call-mismatch", text.partition(": ")[2], accesses)

    def fork(self, stream: str) -> None:
        thread, main = self.stream(stream), self._main[self.machine.rank]
        key = (thread.rank, stream)
        self._forks[key] = joined(self._forks[key], main.publish()) if key in self._forks else main.publish()

    def enqueued(self, stream: str, label: str, tensors: list[torch.Tensor]) -> Callable[[], None]:
        thread, line = self.stream(stream), host_line()
        known, launches = self._cpu[thread.rank].copy(), self._launches[thread.rank]
        issued = next(self._issues)
        if (thread.rank, stream) in self._forks:
            known = joined(known, self._forks[thread.rank, stream])
        self.hold(thread.rank, tensors, f"tensor of the {stream}")

        def begin() -> None:
            thread.learn(known)
            thread.label, thread.code, thread.launch = f"rank {thread.rank}'s {stream} ({label})", line, launches
            thread.issued = issued
            self._threads[self.machine.scheduler.current] = thread

        return begin

    def copied(self, target: int, source: int, nbytes: int, itemsize: int, is_signal: bool) -> None:
        thread, steps = self.thread(), np.arange(0, nbytes, itemsize).astype(np.uint64)
        reads, writes = (self.races.access(thread, "copy", verb) for verb in ("read", "write"))
        reads.launches = writes.launches = thread.launch
        reads.issued = writes.issued = thread.issued
        self.races.read(reads, np.uint64(source) + steps, itemsize, None)
        if not is_signal:
            self.races.write(writes, np.uint64(target) + steps, itemsize)
            for signal in self.signals.within(target, target + nbytes):
                self.signals.unordered(thread, signal, None, keeps=False)()
            return
        access = self.races.access(thread, "copy", "signal", "sys")
        self.races.write(access, np.uint64(target) + steps, itemsize)
        for step in steps.tolist():
            signal = self.signals.at(target + step, itemsize)
            value = self.memory.read_word(source + step, itemsize, lambda: thread.label)
            self.signals.wrote(signal, access, self.signals.value(signal), signed(value, itemsize))
            self.signals.release(thread, signal, "sys", "signalled", keeps=False)()

    def joined(self, stream: str) -> None:
        rank = self.machine.rank
        if (rank, stream) in self._streams:
            known = self._streams[rank, stream].publish()
            self._main[rank].learn(known)
            self._since[rank] = joined(self._since[rank], known)
            self._let_go(rank)

    def published(self) -> np.ndarray:
        return self.thread().publish()

    def learned(self, known: np.ndarray) -> None:
        thread = self.thread()
        thread.learn(known)
        if thread is self._main[thread.rank]:
            self._since[thread.rank] = joined(self._since[thread.rank], known)

    def issued(self) -> None:
        rank = self.machine.rank
        self._main[rank].code, self._main[rank].launch = host_line(), self._launches[rank]
        self.host_works(rank)
        self._main[rank].learn(self._cpu[rank])

    def host_waited(self, rank: int) -> None:
        """Note that the host has waited for its main stream, as ``tensor.item()`` does."""
        self._cpu[rank] = joined(self._cpu[rank], self._main[rank].publish())
        self.host_works(rank)

    def synchronized(self, rank: int) -> None:
        self.host_waited(rank)
        self._main[rank].sync = Sync("team.synchronize()")
        for (owner, _), thread in self._streams.items():
            if owner == rank:
                self._cpu[rank] = joined(self._cpu[rank], thread.publish())
        self._let_go(rank)

    def rendezvous_entered(self, rendezvous: str, rank: int, streams: bool) -> None:
        if streams:
            self.host_works(rank)
        known = self._main[rank].publish() if streams else self._cpu[rank]
        self._rendezvous[rendezvous] = joined(known.copy(), self._rendezvous.get(rendezvous, new_clock()))

    def rendezvous_left(self, rendezvous: str, rank: int) -> None:
        self._cpu[rank] = joined(self._cpu[rank], self._rendezvous[rendezvous])
        self._main[rank].learn(self._cpu[rank])
        self._main[rank].sync = Sync(rendezvous)

    def hold(self, rank: int, tensors: list[torch.Tensor], name: str) -> None:
        """Keep ordinary tensors known and alive, so that their addresses are not reused, until streams meet."""
        held = self._held[rank]
        if len(held) + len(tensors) > _HELD:
            self._let_go(rank)
        for tensor in tensors:
            base = self.memory.add_tensor(tensor, rank, name)
            if base is not None:
                if any(other == base for _, other in held):
                    self.memory.remove(base)  # counted once
                else:
                    held.append((tensor, base))
        while len(held) > _HELD:
            self.memory.remove(held.pop(0)[1])

    def _let_go(self, rank: int) -> None:
        """Drop the ordinary tensors whose uses happen before everything that the rank's streams can still do."""
        if not self.machine.is_idle(rank):
            return
        to_come = self._to_come(rank)
        kept = []
        for tensor, base in self._held[rank]:
            if all(self.races.is_past(base, clock) for clock in to_come):
                self.memory.remove(base)
            else:
                kept.append((tensor, base))
        self._held[rank][:] = kept

    def _to_come(self, rank: int) -> list[np.ndarray]:
        """Clocks with which the next operation of each of the rank's streams begins, at least."""
        cpu = self._cpu[rank]
        clocks = [joined(self._main[rank].clock.copy(), cpu)]
        for (owner, name), thread in self._streams.items():
            if owner == rank:
                known = joined(thread.clock.copy(), cpu)
                forked = self._forks.get((rank, name))
                clocks.append(known if forked is None else joined(known, forked))
        return clocks if len(clocks) > 1 else [cpu]

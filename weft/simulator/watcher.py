"""The checker's ear at the machine: every access, launch, copy and meeting comes here and goes on to ``races`` and ``syncing``.

A machine without a watcher pays one comparison an access.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from weft.simulator.clocks import joined, new_clock
from weft.simulator.hosts import HostOperations
from weft.simulator.races import Races, kind_of
from weft.simulator.syncing import Words, addresses_in, signed
from weft.simulator.trails import ASYNC, SCALAR, Access, ProgramTrail, Sync, Trail

_VERBS = {"plain": "load", "volatile": "volatile load", "tma": "descriptor load", "lamport": "lamport load"}
_HELD = 64


class Watcher:
    def __init__(self, machine: Any) -> None:
        self.machine, self.memory = machine, machine.memory
        self.races = Races(machine)
        self.words = Words(self.races)
        self._cpu = [new_clock() for _ in range(machine.world_size)]
        slots = self.races.slots
        self._main = [Trail(slots, r, f"rank {r} host code", "main", new_clock()) for r in range(machine.world_size)]
        self._streams: dict[tuple[int, str], Trail] = {}
        self._forks: dict[tuple[int, str], np.ndarray] = {}
        self._meetings: dict[str, np.ndarray] = {}
        self._held: list[list[tuple[Any, int]]] = [[] for _ in range(machine.world_size)]
        self._launches = [0] * machine.world_size
        self.launched_names: list[list[str]] = [[] for _ in range(machine.world_size)]

    # --- programs ----------------------------------------------------------------------------------------------------

    def launch(self, rank: int, grid: Any, args: tuple) -> None:
        """A grid of ``rank`` is about to start."""
        main = self._main[rank]
        main.learn(self._cpu[rank])
        self._launches[rank] += 1
        grid.known, grid.number = main.publish(), self._launches[rank]
        grid.end = grid.known.copy()
        grid.views = [a for a in args if hasattr(a, "deltas") and hasattr(a, "barriers")]
        if grid.views:
            self.launched_names[rank].append(f"{grid.launch.name}{list(grid.launch.grid)}")
        grid.reached = {heap for t in grid.launch.tensors if (heap := self.memory.heap_of(t.data_ptr())) is not None}
        if self._streams:
            self.hold(rank, grid.launch.tensors, f"argument of {grid.launch.name}")

    def program_started(self, program: Any) -> None:
        grid = program.grid
        index = program.index[0] + grid.launch.grid[0] * (program.index[1] + grid.launch.grid[1] * program.index[2])
        program.trail = ProgramTrail(self.races.slots, grid.rank, program.label, index, grid.known.copy())
        program.trail.launch, program.trail.reached, program.trail.waits = grid.number, set(grid.reached), None

    def program_ended(self, program: Any) -> None:
        trail = program.trail
        program.grid.end = joined(program.grid.end, trail.finish())
        if trail.waits is not None and program.grid.total > self.machine.sms:
            access = Access(0, trail, SCALAR, 0, 0, 0, "wait", trail.waits[1], "sys", trail.sync)
            text = (
                f"kernel {program.grid.launch.name} has {program.grid.total} programs, some of which wait, and this GPU holds "
                f"{self.machine.sms} at a time"
            )
            extent = self.memory.find(trail.waits[0])
            self.races.report("residency", text, [access], extent.name if extent else "", extent.rank if extent else 0)

    def grid_ended(self, grid: Any) -> None:
        main = self._main[grid.rank]
        main.learn(grid.end)
        main.tick()
        main.sync = Sync(f"end of kernel {grid.launch.name}")

    def trail(self) -> Trail:
        task = self.machine.scheduler.current
        return getattr(task, "trail", None) or self._main[task.rank]

    # --- accesses of kernels -----------------------------------------------------------------------------------------

    def load(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, how: str, bits: np.ndarray) -> None:
        trail = self.trail()
        if not mask.all():
            addresses, bits = addresses[mask], bits[mask]
        if addresses.size == 0:
            return
        addresses, bits = addresses.ravel(), bits.ravel()
        self._translated(trail, addresses, bits)
        scope = "sys" if how == "volatile" else None
        access = self.races.access(trail, kind_of(addresses), _VERBS[how], scope)
        if how == "volatile" and addresses.size == 1:
            word = self.words.known(int(addresses[0]))
            if word is not None:
                self.words.relaxed(trail, word, "sys")
                self.words.polled(word, trail)
        self.races.read(trail, access, addresses, itemsize, bits, tma=how == "tma", lamport=how == "lamport")
        if self._translated(trail, addresses, None):
            self._untranslated(trail, access, addresses)

    def store(self, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, how: str) -> None:
        """Before the bits are written."""
        trail = self.trail()
        if not mask.all():
            addresses, bits = addresses[mask], bits[mask]
        if addresses.size == 0:
            return
        addresses, bits = addresses.ravel(), bits.ravel()
        verb = {"plain": "store", "tma": "descriptor store", "lamport": "lamport store"}[how]
        access = self.races.access(trail, ASYNC if how == "tma" else kind_of(addresses), verb)
        if self._translated(trail, addresses, None):
            self._untranslated(trail, access, addresses)
        itemsize, reset = bits.dtype.itemsize, None
        for word in self.words.within(int(addresses.min()), int(addresses.max()) + itemsize):
            for i in addresses_in(word, addresses):
                old, new = self.words.value(word), signed(bits[i], itemsize)
                reset = self.words.stored(word, access, old, new, trail.launch) or reset
                self.words.unordered(trail, word, None, keeps=False)
        lamport = how == "lamport"
        self.races.write(trail, access, addresses, itemsize, lamport=lamport, kind_if_race=reset)
        if lamport:
            self._message(trail, access, bits)

    def _message(self, trail: Trail, access: Access, bits: np.ndarray) -> None:
        if (bits != 1 << (8 * bits.dtype.itemsize - 1)).any():  # not a clear, which tells nobody anything
            access.message = trail.clock.copy()
        trail.accesses.clear()
        if isinstance(trail, ProgramTrail):
            trail.step()

    def atomic(self, op: str, addresses: np.ndarray, old: np.ndarray, new: np.ndarray, sem: str, scope: str) -> None:
        """After it was done; arrays of those elements that are not masked off, as raw bits."""
        trail, itemsize = self.trail(), old.dtype.itemsize
        if addresses.size == 0:
            return
        changes = bool((old != new).any()) or op in ("xchg", "add") and not self._only_looks(op, old, new)
        access = self.races.access(trail, kind_of(addresses), f"atomic {op} ({sem}, {scope})", scope)
        if self._translated(trail, addresses, None):
            self._untranslated(trail, access, addresses)
        if addresses.size <= 32 or sem != "relaxed":
            for i, address in enumerate(addresses.tolist()):
                self._on_word(op, trail, access, self.words.at(address, itemsize), int(old[i]), int(new[i]), sem, scope, changes)
        if changes:
            self.races.write(trail, access, addresses, itemsize)
        else:
            self.races.read(trail, access, addresses, itemsize, None)

    @staticmethod
    def _only_looks(op: str, old: np.ndarray, new: np.ndarray) -> bool:
        return op != "xchg" and bool((old == new).all())

    def _on_word(self, op: str, trail: Trail, access: Access, word: Any, old: int, new: int, sem: str, scope: str,
                 changes: bool) -> None:  # fmt: skip
        if sem in ("acquire", "acq_rel"):
            self.words.acquire(trail, word, scope, "acquired")
        else:
            self.words.relaxed(trail, word, scope)
        if not changes:
            self.words.polled(word, trail)
            trail.waits = (word.address, access.code) if sem == "acquire" else trail.waits
            return
        value = signed(new, word.itemsize)
        if op == "add":
            self.words.added(word, access, value, trail.launch)
        else:
            word.wrote(trail, access.code, access.verb, value)
        if sem in ("release", "acq_rel"):
            self.words.release(trail, word, scope, "released", keeps=True)
        else:
            self.words.unordered(trail, word, scope, keeps=True)

    def notified(self, address: int, bits: int, itemsize: int) -> None:
        """``st.release.sys`` of one thread, before it is done."""
        trail, word = self.trail(), self.words.at(address, itemsize)
        access = self.races.access(trail, SCALAR, "notify", "sys")
        at = np.array([address], np.uint64)
        if self._translated(trail, at, None):
            self._untranslated(trail, access, at)
        self.words.stored(word, access, self.words.value(word), signed(bits, itemsize), trail.launch)
        self.races.write(trail, access, at, itemsize)
        self.words.release(trail, word, "sys", "notified", keeps=False)

    def waited(self, address: int, itemsize: int, wanted: int) -> None:
        trail, word = self.trail(), self.words.at(address, itemsize)
        access = self.races.access(trail, SCALAR, "wait", "sys")
        self.races.read(trail, access, np.array([address], np.uint64), itemsize, None)
        self.words.acquire(trail, word, "sys", "waited for")
        self.words.waited(word, wanted, trail.launch)
        trail.waits = (address, access.code)

    def barrier(self) -> None:
        self.trail().barrier()

    def drain(self) -> None:
        self.trail().drain()

    def fence(self) -> None:
        self.trail().fence()

    def fence_proxy(self) -> None:
        self.trail().fence_proxy()

    # --- peers' heaps ------------------------------------------------------------------------------------------------

    def _translated(self, trail: Trail, addresses: np.ndarray, bits: np.ndarray | None) -> bool:
        """With ``bits``: note a load from a table of deltas. Without: whether an access is to a heap never translated to."""
        if not isinstance(trail, ProgramTrail):
            return False
        first = int(addresses[0])
        if bits is not None:
            for view in self.machine.scheduler.current.grid.views:
                at = first - view.deltas.data_ptr()
                if 0 <= at < 8 * view.deltas.numel():
                    own = view.barriers.data_ptr()
                    found = (self.memory.heap_of(own + int(delta)) for delta in bits.view(np.int64))
                    trail.reached.update(heap for heap in found if heap is not None)
            return False
        heap = self.memory.heap_of(first)
        return heap is not None and heap not in trail.reached and self.memory.heap_rank(heap) != trail.rank

    def _untranslated(self, trail: Trail, access: Access, addresses: np.ndarray) -> None:
        extent = self.memory.find(int(addresses[0]))
        if extent is not None:
            low, high = ((int(a) - extent.base) // extent.itemsize for a in (addresses.min(), addresses.max()))
            text = f"{self.races.describe(access)} reaches rank {extent.rank}'s {extent.name} by an address that symm_at did not give it"
            self.races.report("untranslated", text, [access], extent.name, extent.rank, low, high)

    # --- host code, streams, meetings --------------------------------------------------------------------------------

    def host(self, rank: int) -> AbstractContextManager:
        """The scope of a rank's host code: its tensor operations are seen."""
        return HostOperations(self, rank)

    def host_access(self, rank: int, addresses: np.ndarray, itemsize: int, verb: str, write: bool, before: dict[int, int]) -> None:
        main = self._main[rank]
        main.launch = self._launches[rank]
        main.learn(self._cpu[rank])
        access, reset = self.races.access(main, "host", f"host {verb}"), None
        if not write:
            self.races.read(main, access, addresses, itemsize, None)
            return
        for address, old in before.items():
            word = self.words.at(address, itemsize)
            reset = self.words.stored(word, access, old, self.words.value(word), main.launch) or reset
            self.words.unordered(main, word, None, keeps=False)
        self.races.write(main, access, addresses, itemsize, kind_if_race=reset)

    def stream(self, name: str) -> Trail:
        rank = self.machine.rank
        if (rank, name) not in self._streams:
            trail = Trail(self.races.slots, rank, f"rank {rank} {name}", name, new_clock())
            trail.launch = 0
            self._streams[rank, name] = trail
        return self._streams[rank, name]

    def fork(self, name: str) -> None:
        trail, main = self.stream(name), self._main[self.machine.rank]
        key = (trail.rank, name)
        self._forks[key] = joined(self._forks[key], main.publish()) if key in self._forks else main.publish()

    def enqueued(self, name: str, tensors: list[Any]) -> tuple[str, np.ndarray]:
        trail = self.stream(name)
        known = self._cpu[trail.rank].copy()
        if (trail.rank, name) in self._forks:
            known = joined(known, self._forks[trail.rank, name])
        self.hold(trail.rank, tensors, f"tensor of the {name}")
        return name, known

    def begin(self, order: tuple[str, np.ndarray], label: str) -> None:
        trail = self.stream(order[0])
        trail.learn(order[1])
        trail.label = label
        self.machine.scheduler.current.trail = trail

    def copied(self, target: int, source: int, nbytes: int, itemsize: int, signal: bool) -> None:
        """Part of a copy. A signal is a release by the stream: all its earlier operations have landed."""
        trail, steps = self.trail(), np.arange(0, nbytes, itemsize).astype(np.uint64)
        reads = self.races.access(trail, "copy", "copy from")
        self.races.read(trail, reads, np.uint64(source) + steps, itemsize, None)
        if not signal:
            self.races.write(trail, self.races.access(trail, "copy", "copy to"), np.uint64(target) + steps, itemsize)
            return
        word, access = self.words.at(target, itemsize), self.races.access(trail, "copy", "signal", "sys")
        value = self.memory.read_word(source, itemsize, lambda: trail.label)
        word.wrote(trail, None, "copy engine's signal", signed(value, itemsize))
        self.races.write(trail, access, np.uint64(target) + steps, itemsize)
        self.words.release(trail, word, "sys", "signalled", keeps=False)

    def joined(self, name: str) -> None:
        rank = self.machine.rank
        if (rank, name) in self._streams:
            self._main[rank].learn(self._streams[rank, name].publish())
            self._let_go(rank)

    def synchronized(self, rank: int) -> None:
        """The host has waited for all of its rank's streams."""
        self._cpu[rank] = joined(self._cpu[rank], self._main[rank].publish())
        self._main[rank].sync = Sync("team.synchronize()")
        for (owner, _), trail in self._streams.items():
            if owner == rank:
                self._cpu[rank] = joined(self._cpu[rank], trail.publish())
        self._let_go(rank)

    def met(self, meeting: str, rank: int, streams: bool) -> None:
        known = self._main[rank].publish() if streams else self._cpu[rank]
        self._meetings[meeting] = joined(known.copy(), self._meetings.get(meeting, new_clock()))

    def left(self, meeting: str, rank: int) -> None:
        self._cpu[rank] = joined(self._cpu[rank], self._meetings[meeting])
        self._main[rank].learn(self._cpu[rank])
        self._main[rank].sync = Sync(meeting)

    def hold(self, rank: int, tensors: list[Any], name: str) -> None:
        """Keep ordinary tensors known (and alive, so that their addresses stay theirs) until the streams have met."""
        for tensor in tensors:
            base = self.memory.add_tensor(tensor, rank, name)
            if base is not None:
                self._held[rank].append((tensor, base))
        while len(self._held[rank]) > _HELD:
            self.memory.remove(self._held[rank].pop(0)[1])

    def _let_go(self, rank: int) -> None:
        while self._held[rank]:
            self.memory.remove(self._held[rank].pop()[1])

    def removed(self, low: int, high: int) -> None:
        self.races.untouch(low)
        self.words.drop(low, high)

"""Observer of a machine that finds errors in its accesses, launches, copies and rendezvous."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from weft.check.detector.argument_names import ArgumentNames
from weft.check.detector.arrivals import ArrivalOrders
from weft.check.detector.epochs import Epochs
from weft.check.detector.happens_before import HappensBefore
from weft.check.detector.host_operations import HostOperations
from weft.check.detector.races import Elements, elements_at, kind_of
from weft.check.detector.signal_states import Signal
from weft.check.detector.signals import addresses_in
from weft.check.detector.thread_clocks import (
    ASYNC,
    AWAITED,
    BLOCK,
    COPYING,
    DELIVERY,
    FLAGGED,
    LOADED,
    SCALAR,
    Access,
    Block,
    Note,
    ProgramClock,
    Sync,
    ThreadClock,
    add_notes,
)
from weft.check.detector.tiles import Tiles
from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.grids import Grid, Program
from weft.simulator.machine.machine import Machine
from weft.simulator.machine.memory import signed
from weft.simulator.machine.polling import is_polled
from weft.simulator.machine.stores import Landed
from weft.simulator.observer import MappedTile, TileMark
from weft.simulator.places import Order, Places, Scattered

_COPIED = {"put": DELIVERY, "get": COPYING, "put_signal": BLOCK}
# Most elements of a relaxed access that are each examined as signals, and most blocks of one line's stores that are kept for
# comparison with loads.
_FEW = 32
_VERBS = {"plain": "load", "volatile": "volatile load", "tma": "descriptor load", "lamport": "lamport load"}


class Detector(HappensBefore):
    """Findings of a run, and its state for reports."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.memory.on_remove = self.removed
        self.tiles, self.epochs, self.arguments = Tiles(self.races), Epochs(self.races), ArgumentNames(self.memory)
        self.arrivals = ArrivalOrders(self.races)
        # Accesses that messages named, by the text of ``Machine.who``: an error holds that text only.
        self.named: dict[str, Access] = {}
        self.unstarted = 0  # programs of the largest grid that could not start in a deadlock

    # --- waits and deadlocks -----------------------------------------------------------------------------------------

    def note_named(self, who: str) -> None:
        self.named[who] = Access.of(self.thread(), "access", self.races.code())

    def waits(self, addresses: list[int], itemsize: int, wanted: int, comparison: str) -> None:
        thread = self.thread()
        thread.waits = (addresses[0], self.races.code())
        for address in addresses:
            signal = self.signals.at(address, itemsize)
            if comparison == "==":
                self.signals.one_value.begins(signal, thread, wanted, thread.waits[1])
            else:
                self.signals.awaited(signal)

    def waits_for_data(self, address: int) -> None:
        self.thread().waits = (address, self.races.code())

    def spins(self, address: int, line: CodeLine | None) -> None:
        self.thread().waits = (address, line)

    def deadlocked(self, unstarted: list[Grid], tasks: list[str]) -> list[str]:
        """Report the likely cause of a deadlock, and return what is known of each awaited signal."""
        self.signals.stuck()
        waiting, spinning = self._stuck_threads()
        awaited = list(dict.fromkeys(thread.waits[0] for thread in waiting if thread.waits is not None))
        causes = list(dict.fromkeys(line for address in awaited for line in self._cause(address)))
        kind, text = self._misfit(unstarted) or ("deadlock", causes[0] if causes else "no task can go on")
        causes += self._counterparts()
        extent = self.memory.find(awaited[0]) if awaited else None
        elements = elements_at(extent, awaited[0], awaited[0]) if extent is not None else Elements()
        by_line: dict[CodeLine | None, ThreadClock] = {}
        for thread in waiting:
            if thread.waits is not None:
                by_line.setdefault(thread.waits[1], thread)
        sides = [
            Access.of(thread, "spin" if thread in spinning else "wait", line, "sys") for line, thread in by_line.items()
        ]
        stuck = [task.waiting for task in self.machine.scheduler.waiting_tasks()]
        meet = kind == "deadlock" and all(one is not None and one.low is None for one in stuck)  # ranks, not bytes
        advice = "make the call in which a rank waits on all ranks, or on none" if meet else ""
        self.races.report(kind, text, sides, elements, detail=(*tasks, *causes), advice=advice)
        return causes

    def _stuck_threads(self) -> tuple[list[ThreadClock], set[ThreadClock]]:
        """Threads that wait and, as a set, the ones that spin; each knows the address for which it waits."""
        waiting, spinning = [], set()
        for task in self.machine.scheduler.waiting_tasks():
            thread, history = self._threads.get(task), task.history
            if history is not None and history.code is not None:
                spinning.add(thread)
            if thread is None:
                continue
            waiting.append(thread)
            if task.waiting is None:
                # It spins, so an earlier wait of it is over.
                thread.waits = (history.last.places.low, history.code) if thread in spinning else None
        return waiting, spinning

    def _misfit(self, unstarted: list[Grid]) -> tuple[str, str] | None:
        """(kind, sentence) of a deadlock by too large a grid, or by different launches on the ranks."""
        if unstarted:
            self.unstarted = max(grid.total for grid in unstarted)
            grid = unstarted[0]
            return "residency", (
                f"kernel {grid.launch.name} has {grid.total} programs and this GPU holds {self.machine.sms}: the running ones "
                f"wait, so the remaining ones never start"
            )
        for number, names in enumerate(zip(*self.launched_names, strict=False), start=1):
            if len(set(names)) > 1:
                said = "; ".join(f"rank {rank} {name}" for rank, name in enumerate(names))
                return "launch-mismatch", f"launch {number}: {said}"
        return None

    def _counterparts(self) -> list[str]:
        """State of the programs that should have signalled: same kernel and number, not waiting."""
        lines = {}
        for task in self.machine.scheduler.waiting_tasks():
            if not isinstance(task, Program):
                continue
            kernel, number = task.grid.launch.name, task.number
            for rank in range(self.machine.world_size):
                other = self._programs.get((rank, kernel, number))
                if other is None:
                    lines[f"rank {rank} has not started kernel {kernel} program {number}"] = None
                elif other.finished:
                    releases = self._threads[other].releases
                    last = releases[-1] if releases else None
                    signalled = (
                        f"its last signal was {self.memory.describe(last.address)}" if last else "it sent no signal"
                    )
                    where = f", in {self.races.place(last.code)}" if last and last.code else ""
                    lines[f"{other.label} has ended: {signalled}{where}"] = None
        return list(lines)

    def _cause(self, address: int) -> list[str]:
        """Reasons why a wait for the memory at ``address`` may never end."""
        if self.signals.known(address) is not None:
            return self.signals.cause(address)
        name, last = self.memory.describe(address), self.races.last_store(address)
        if last is None:
            return [f"{name}: never stored"]
        return [f"{name}: last written by {self.races.describe(last)}: {last.verb}"]

    def host(self, rank: int) -> HostOperations:
        return HostOperations(self, rank)

    # --- epochs ------------------------------------------------------------------------------------------------------

    def epoch_began(self, address: int, itemsize: int) -> None:
        self.epochs.began(self.thread(), address, itemsize)

    def epoch_ended(self, address: int, itemsize: int) -> None:
        self.epochs.ended(self.thread(), address)

    # --- tiles -------------------------------------------------------------------------------------------------------

    def tile_mapped(self, tile: MappedTile) -> None:
        thread = self.thread()
        self.tiles.mapped(thread, thread.grid, tile)

    def tile_began(self, tile: TileMark) -> None:
        self.tiles.began(self.thread(), tile)

    def tile_ended(self) -> None:
        self.tiles.ended(self.thread())

    def launch(self, grid: Grid) -> None:
        super().launch(grid)
        self.arguments.launched(grid)

    def grid_ended(self, grid: Grid) -> None:
        super().grid_ended(grid)
        self.tiles.grid_ended(grid, self._main[grid.rank])

    # --- accesses of kernels -----------------------------------------------------------------------------------------

    def load(self, places: Places, how: str, bits: np.ndarray) -> None:
        if not places.is_empty:
            with self._by_threads(self.thread()):
                self._load(places, how, bits)

    def _load(self, places: Places, how: str, bits: np.ndarray) -> None:
        thread, itemsize, first = self.thread(), places.itemsize, places.first
        addresses, bits = places.active.ravel(), bits.ravel() if places.is_whole else bits[places.mask]
        self._note_deltas(thread, first, bits)
        scope = "sys" if how == "volatile" else None
        # All threads load, even a scalar; one thread stores a scalar.
        access = self.races.access(thread, AWAITED if how in ("volatile", "lamport") else LOADED, _VERBS[how], scope)
        if self.tiles.loads(access, addresses):
            return
        if how == "volatile" and addresses.size <= _FEW:
            self._looks_at_signals(access, places, addresses, bits)
        if how == "lamport":
            sender = self.races.last_store(first)
            if sender is not None:
                self.residency.relied_on(thread, sender.thread, first, access.code)
        writes = self.races.read(access, addresses, itemsize, bits, tma=how == "tma", lamport=how == "lamport")
        if how == "plain" and thread.stores:
            for number in writes & thread.stores.keys():
                self._across_threads(number, access, Block(places))
        if how == "lamport":
            thread.waits = (first, access.code)
            thread.sync = Sync("received words of", first, access.code)
        self._check_translated(access, addresses)

    def _looks_at_signals(self, access: Access, places: Places, addresses: np.ndarray, bits: np.ndarray) -> None:
        """Note a volatile load of some signals."""
        itemsize = places.itemsize
        for signal in self.signals.within(places.low, places.high):
            for i in addresses_in(signal, addresses)[:1]:
                self.signals.relaxed(access.thread, signal, "sys")
                self._polled(signal, access, signed(bits[i], itemsize))

    def _across_threads(self, number: int, access: Access, loaded: Block) -> None:
        """Report a load by threads that have not stored the value, by the latest stores."""
        for stored in reversed(access.thread.stores[number]):
            crossed = loaded.touches_threads_of(stored)
            if crossed is not None:
                self.races.crossed(number, access, *crossed)
                return

    def store(self, places: Places, how: str, bits: np.ndarray) -> Landed:
        if places.is_empty:
            return None
        with self._by_threads(self.thread()):
            return self._store(places, how, bits)

    def _store(self, places: Places, how: str, bits: np.ndarray) -> Landed:
        thread, landed = self.thread(), []
        addresses, bits = places.active.ravel(), bits.ravel() if places.is_whole else bits[places.mask]
        verb = {"plain": "store", "relaxed": "relaxed store", "tma": "descriptor store", "lamport": "lamport store"}[
            how
        ]
        kind = {"tma": ASYNC, "lamport": FLAGGED}.get(how) or kind_of(addresses)
        access = self.races.access(thread, kind, verb, "sys" if how == "relaxed" else None)
        self._check_translated(access, addresses)
        itemsize = bits.dtype.itemsize
        if self.tiles.stores(access, addresses, itemsize):
            return None
        for signal in self.signals.within(places.low, places.high):
            for i in addresses_in(signal, addresses):
                new = signed(bits[i], itemsize)
                access.resets = access.resets or self.signals.sets_back(signal, new)
                landed.append(partial(self.signals.stored, signal, access, new))
                landed.append(self.signals.unordered(thread, signal, None, keeps=False))
        if how == "plain" and self.machine.has_tables and self.memory.heap_of(places.low) is not None:
            access.words = thread.relaxed()
        lamport = how == "lamport"
        self.races.write(access, addresses, itemsize, lamport=lamport)
        if how == "plain":
            thread.stores.setdefault(access.number, deque(maxlen=_FEW)).append(Block(places))
        if lamport:
            landed += self._message(thread, access, addresses, bits)
        return partial(_call_all, landed) if landed else None

    def _message(
        self, thread: ThreadClock, access: Access, addresses: np.ndarray, bits: np.ndarray
    ) -> list[Callable[[], None]]:
        """Callback for the arrival of Lamport words, which carry a message to their reader from then on."""
        unwritten = 1 << (8 * bits.dtype.itemsize - 1)
        if np.count_nonzero(bits != unwritten):  # not a clear, which carries no message
            message = thread.message()
            held = self.memory.read(Scattered(addresses, None, bits.dtype.itemsize), self.machine.who)
            if np.count_nonzero(held != unwritten):
                text = f"{self.races.line_of(access)} sends words into a stage that is not cleared"
                self._report("uncleared", text, access, addresses[held != unwritten])
            return [partial(setattr, access, "message", message)]
        thread.step()
        return []

    def atomic(self, op: str, addresses: np.ndarray, old: np.ndarray, new: np.ndarray, order: Order) -> None:
        thread, alone = self.thread(), order.by == "threads"
        if addresses.size == 0:
            return
        with self._by_threads(thread) if alone else nullcontext():
            self._atomic(thread, op, addresses, old, new, order)
        if order.acquires:
            self._spread(thread, int(addresses[0])) if alone else thread.barrier()

    def _atomic(
        self, thread: ThreadClock, op: str, addresses: np.ndarray, old: np.ndarray, new: np.ndarray, order: Order
    ) -> None:
        itemsize = old.dtype.itemsize
        changes = op == "xchg" or bool((old != new).any())
        access = self.races.access(thread, kind_of(addresses), f"atomic {op} ({order.sem}, {order.scope})", order.scope)
        self._check_translated(access, addresses)
        if addresses.size <= _FEW or order.sem != "relaxed":
            for i, address in enumerate(addresses.tolist()):
                signal = self.signals.at(address, itemsize)
                self._on_signal(op, access, signal, int(old[i]), int(new[i]), order, changes)
        if changes:
            self.arrivals.note(op, access, old)
            self.races.write(access, addresses, itemsize)
        else:
            self.races.read(access, addresses, itemsize, None)

    def _by_threads(self, thread: ThreadClock) -> AbstractContextManager[None]:
        """Scope of accesses of the present branch or assembly: of single threads, if only some run it."""
        if isinstance(thread, ProgramClock) and self.machine.active_threads() is not None:
            return thread.alone()
        return nullcontext()

    def _spread(self, thread: ThreadClock, address: int) -> None:
        """Note what single threads have acquired, which other threads know after a CTA barrier alone."""
        code, known = self.races.code(), thread.acquired_alone if isinstance(thread, ProgramClock) else None
        if known is not None:
            name = self.memory.describe(address)
            text = f"single threads acquire {name} in {self.races.place(code)}, and no CTA barrier spreads it to all threads"
            add_notes(thread.notes, {("missing-barrier", code): Note("missing-barrier", text, known)})

    def reduced(self, op: str, addresses: np.ndarray, new: np.ndarray, scope: str) -> None:
        """Note relaxed atomics of the asynchronous proxy."""
        thread = self.thread()
        if addresses.size == 0:
            return
        access = self.races.access(thread, ASYNC, f"descriptor {op.removeprefix('f')}", scope)
        self._check_translated(access, addresses)
        for signal in self.signals.within(int(addresses.min()), int(addresses.max()) + new.dtype.itemsize):
            self.signals.unordered(thread, signal, None, keeps=True)()
        self.races.write(access, addresses, new.dtype.itemsize)

    def copies(self, target: Places, source: Places, bits: np.ndarray, what: str) -> Landed:
        thread, targets, sources = self.thread(), target.addresses, source.addresses
        reads = self.races.access(thread, COPYING, f"load of {what}_nbi")
        writes = self.races.access(thread, _COPIED[what], f"store of {what}_nbi")
        self.races.read(reads, sources, source.itemsize, bits)
        self.races.write(writes, targets, target.itemsize)
        for access, addresses in ((reads, sources), (writes, targets)):
            self._check_translated(access, addresses)
        signals = self.signals.within(target.low, target.high)
        landed = [self.signals.unordered(thread, signal, None, keeps=False) for signal in signals]
        return partial(_call_all, landed) if landed else None

    def completed(self) -> None:
        self.thread().complete()

    def _on_signal(
        self, op: str, access: Access, signal: Signal, old: int, new: int, order: Order, changes: bool
    ) -> None:
        thread, scope = access.thread, access.scope
        if order.acquires:
            self.signals.acquire(thread, signal, scope, "acquired")
        else:
            self.signals.relaxed(thread, signal, scope)
        old, new = signed(old, signal.itemsize), signed(new, signal.itemsize)
        self._polled(signal, access, old, changes=changes)
        if changes:
            (self.signals.added if op == "add" else self.signals.wrote)(signal, access, old, new)
            if order.releases:
                self.signals.release(thread, signal, scope, "released", keeps=True)()
            else:
                self.signals.unordered(thread, signal, scope, keeps=True)()

    def _polled(self, signal: Signal, access: Access, value: int, *, changes: bool = False) -> None:
        self.signals.polled(signal, access, value, changes=changes)
        if not changes and access.code is not None and is_polled(access.code[0].co_filename, access.code[1]):
            self.residency.waited(access.thread, signal, None, access.code)

    def notified(self, address: int, bits: int, itemsize: int) -> Landed:
        thread, signal = self.thread(), self.signals.at(address, itemsize)
        access = self.races.access(thread, SCALAR, "notify", "sys")
        at = np.array([address], np.uint64)
        self._check_translated(access, at)
        stored = partial(self.signals.stored, signal, access, signed(bits, itemsize))
        self.races.write(access, at, itemsize)
        return partial(_call_all, [stored, self.signals.release(thread, signal, "sys", "notified", keeps=False)])

    def waited(self, addresses: list[int], index: int, itemsize: int, wanted: int, comparison: str) -> None:
        address = addresses[index]
        thread, signal = self.thread(), self.signals.at(address, itemsize)
        for other in addresses:
            if other != address:
                self.signals.at(other, itemsize).for_one_value.pop(thread.slot, None)
        access = self.races.access(thread, SCALAR, "wait", "sys")
        self.races.read(access, np.array([address], np.uint64), itemsize, None)
        self.signals.acquire(thread, signal, "sys", "waited for")
        if isinstance(thread, ProgramClock):
            thread.barrier()
        self.signals.waited(signal, access, wanted, comparison)
        self.residency.waited(thread, signal, None if comparison == "!=" else wanted, access.code)
        thread.waits = (address, access.code)

    def barrier(self) -> None:
        self.thread().barrier()

    def drain(self, by_all: bool) -> None:
        self.thread().drain(by_all)

    def fence(self, scope: str) -> None:
        thread = self.thread()
        thread.fence() if scope == "sys" else thread.fence_in_gpu()

    def fence_proxy(self) -> None:
        self.thread().fence_proxy()

    # --- peers' heaps ------------------------------------------------------------------------------------------------

    def _note_deltas(self, thread: ThreadClock, first: int, bits: np.ndarray) -> None:
        """Note the heaps to which deltas lead that a program has loaded from a team's table."""
        for view in self.orders[thread.grid].views if isinstance(thread, ProgramClock) else ():
            at = first - view.deltas.data_ptr()
            if 0 <= at < 8 * view.deltas.numel():
                own = view.barriers.data_ptr()
                reached = (self.memory.heap_of(own + int(delta)) for delta in bits.view(np.int64))
                thread.reached.update(heap for heap in reached if heap is not None)

    def _check_translated(self, access: Access, addresses: np.ndarray) -> None:
        """Report a program's access to a peer's heap of which it has no delta."""
        thread = access.thread
        if not isinstance(thread, ProgramClock) or self.machine.has_tables:
            return
        heap = self.memory.heap_of(int(addresses[0]))
        if heap is not None and heap not in thread.reached and self.memory.heap_rank(heap) != thread.rank:
            who = self.races.describe(access)
            text = f"{who} reaches a peer's memory by an address that did not come from symm_at"
            self._report("untranslated", text, access, addresses)

    def _report(self, kind: str, text: str, access: Access, addresses: np.ndarray) -> None:
        """Report a finding about the addresses that lie in the tensor of the first."""
        extent = self.memory.find(int(addresses[0]))
        if extent is not None:
            inside = [address for address in addresses.tolist() if 0 <= address - extent.base < extent.size]
            self.races.report(kind, text, [access], elements_at(extent, min(inside), max(inside)))

    def removed(self, low: int, high: int) -> None:
        self.races.forget(low)
        self.signals.drop(low, high)
        self.epochs.drop(low, high)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()

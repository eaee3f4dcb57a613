"""Signals: release and acquire through them, and misuse of their values.

A signal is any scalar that a notify, a wait or an atomic has touched. PTX in short: an acquire learns what a releaser knew if
it reads the release's value, or one that a chain of read-modify-writes made from it, and the scope of each includes the other.
A release takes effect when its store arrives in memory: an earlier acquire learns nothing from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np

from weft.check.detector.one_value import OneValueWaits
from weft.check.detector.races import Races, elements_at
from weft.check.detector.signal_states import Signal
from weft.check.detector.thread_clocks import (
    SCALAR,
    Access,
    Note,
    Notes,
    ProgramClock,
    Release,
    Sync,
    ThreadClock,
    Write,
    add_notes,
)
from weft.check.detector.vector_clocks import joined, new_clock
from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.memory import signed
from weft.simulator.machine.polling import is_discarded, is_polled, loop_for_one_value


class Signals:
    """All signals of a run, by address."""

    def __init__(self, races: Races) -> None:
        self._races, self._memory, self.one_value = races, races.memory, OneValueWaits(races)
        self._signals: dict[int, Signal] = {}
        self._sorted: list[int] = []

    # --- look-up -----------------------------------------------------------------------------------------------------

    def at(self, address: int, itemsize: int) -> Signal:
        signal = self._signals.get(address)
        if signal is None:
            signal = self._signals[address] = Signal(address, itemsize)
            insort(self._sorted, address)
        return signal

    def known(self, address: int) -> Signal | None:
        return self._signals.get(address)

    def within(self, low: int, high: int) -> list[Signal]:
        """Signals at ``low .. high - 1``."""
        addresses = self._sorted[bisect_left(self._sorted, low) : bisect_right(self._sorted, high - 1)]
        return [self._signals[address] for address in addresses]

    def drop(self, low: int, high: int) -> None:
        for signal in self.within(low, high):
            self.one_value.report(signal)
            del self._signals[signal.address]
            self._sorted.remove(signal.address)

    def value(self, signal: Signal) -> int:
        raw = self._memory.read_word(signal.address, signal.itemsize, lambda: "weft check")
        return signed(raw, signal.itemsize)

    # --- order -------------------------------------------------------------------------------------------------------

    def acquire(self, thread: ThreadClock, signal: Signal, scope: str, verb: str) -> None:
        """Note an acquire by ``thread``. The caller adds the CTA barrier that spreads it to all threads."""
        for known in signal.visible(thread.rank, scope):
            thread.learn(known)
        code = self._races.code() if isinstance(thread, ProgramClock) else None
        add_notes(thread.notes, self._missed(signal, code, thread.rank, scope))
        thread.early_release = signal.early_release
        add_notes(thread.notes, signal.notes)
        thread.sync = Sync(verb, signal.address, code, signal.writers[-1] if signal.writers else None)

    def relaxed(self, thread: ThreadClock, signal: Signal, scope: str) -> None:
        """Note a read without acquire order, which only a later fence turns into an acquire."""
        for known in signal.visible(thread.rank, scope):
            if isinstance(thread, ProgramClock):
                thread.saw(known)
        if isinstance(thread, ProgramClock) and scope != "cta" and thread.rank in signal.by_rank:
            thread.saw_in_gpu(signal.by_rank[thread.rank])
        code = self._races.code()
        if code is not None and is_discarded(code[0].co_filename, code[1]):
            return  # a notify that adds decides nothing by what it reads
        missed = [
            *signal.visible(thread.rank, scope),
            *(n.clock for n in (*signal.unreleased.values(), *signal.notes.values())),
        ]
        if missed:
            place, name = self._races.place(code), self._memory.describe(signal.address)
            sentence = f"line {place.line if place else '?'} reads {name} without acquire order"
            note = Note("relaxed-order", sentence, reduce(joined, missed, new_clock()))
            add_notes(thread.notes, {(note.kind, code): note})

    def release(self, thread: ThreadClock, signal: Signal, scope: str, verb: str, *, keeps: bool) -> Callable[[], None]:
        """Note a release by ``thread``.

        ``keeps``: by a read-modify-write, which continues the release sequence. Returns a function to call when the
        write is in memory: acquires learn of it from then on.
        """
        is_program = isinstance(thread, ProgramClock)
        code = self._races.code() if is_program else None
        early_release = None
        if is_program:
            thread.releases.append(Release(thread.stamp(SCALAR)[2], code, signal.address))
            early_release = (thread.ahead, code) if thread.ahead is not None else None
        known, notes = thread.publish(), dict(thread.notes)
        thread.sync = Sync(verb, signal.address, code)

        def landed() -> None:
            if is_program:
                signal.early_release = early_release
            if not keeps:
                signal.forget()
            signal.unreleased.pop(thread, None)
            signal.release(thread.rank, known, scope)
            add_notes(signal.notes, notes)
            if scope != "sys":
                where = self._races.place(code)
                signal.unreleased[thread] = Note("scope", f"the release in {where} has scope {scope}", known, scope)

        return landed

    def unordered(self, thread: ThreadClock, signal: Signal, scope: str | None, *, keeps: bool) -> Callable[[], None]:
        """Note a write without release order (``scope`` None: a plain store). Returns as ``release`` does."""
        known = thread.relaxed() if isinstance(thread, ProgramClock) and scope is not None else None
        is_fenced = known is not None and thread.fenced is not None
        in_gpu = thread.fenced_in_gpu if known is not None and scope != "cta" else None
        place = self._races.place(self._races.code()) if isinstance(thread, ProgramClock) else thread.label
        # A fence before a relaxed write makes a release of it.
        so_far, notes = None if is_fenced else thread.so_far(), dict(thread.notes)

        def landed() -> None:
            if not keeps:
                signal.forget()
            if known is not None:
                signal.release(thread.rank, known, scope)
            if in_gpu is not None:
                signal.release(thread.rank, in_gpu, "gpu")
            add_notes(signal.notes, notes)
            if so_far is not None:
                sentence = f"{place} writes {self._memory.describe(signal.address)} without release order"
                signal.unreleased[thread] = Note("relaxed-order", sentence, so_far)

        return landed

    def _missed(self, signal: Signal, code: CodeLine | None, rank: int, scope: str) -> Notes:
        """Notes on writers that an acquire in ``code`` by ``rank`` at ``scope`` does not synchronise with."""
        missed: Notes = {}
        for thread, note in signal.unreleased.items():
            if note.within == "gpu" and thread.rank == rank:
                continue
            who = "another program" if note.within == "cta" else f"rank {rank}"
            sentence = f"{note.sentence}, so it does not order {who}" if note.kind == "scope" else note.sentence
            add_notes(missed, {(note.kind, note.sentence): replace(note, sentence=sentence)})
        released = signal.all_released() if scope != "sys" else []
        if released:
            who = "program's" if scope == "cta" else "rank's"
            sentence = f"the acquire has scope {scope}, so no other {who} release orders it"
            add_notes(missed, {("scope", code): Note("scope", sentence, reduce(joined, released, new_clock()))})
        return missed

    # --- misuse of values --------------------------------------------------------------------------------------------

    def stored(self, signal: Signal, access: Access, new: int, old: int | None = None) -> None:
        """Note a store to a signal, from ``old`` or memory's present value, and report a wrong value."""
        old = self.value(signal) if old is None else old
        back = _is_back(signal, old, new)
        self.wrote(signal, access, old, new)
        if access.verb == "notify":
            signal.notify_launches.add(access.thread.launch)
            if back:
                signal.back = f"{self._races.line_of(access)} sets a signal from {old} to {new}", access
                if signal.is_to_grow:
                    self.awaited(signal)
            return
        if not back:
            return
        access.resets = True
        waiter = self._waiting_for(signal)
        if waiter is not None:
            text = f"{self._races.line_of(access)} sets a signal from {old} to {new} while {waiter} waits for it"
            self._report("signal-reset", text, signal, [access])

    def sets_back(self, signal: Signal, new: int) -> bool:
        """True if ``new`` is less than memory's value."""
        return _is_back(signal, self.value(signal), new)

    def added(self, signal: Signal, access: Access, old: int, new: int) -> None:
        self.wrote(signal, access, old, new)
        signal.notify_launches.add(access.thread.launch)
        signal.added += 1

    def wrote(self, signal: Signal, access: Access, old: int, new: int) -> None:
        """Note that ``access`` takes the signal from ``old`` to ``new``."""
        write = Write(access, old, new)
        signal.wrote(write)
        self.one_value.wrote(signal, write)

    def awaited(self, signal: Signal) -> None:
        """Report an earlier notify that decreased the signal, now that a program relies on its growth."""
        signal.is_to_grow = True
        if signal.back is not None:
            (text, access), signal.back = signal.back, None
            self._report("epoch-back", text, signal, [access])

    def waited(self, signal: Signal, access: Access, wanted: int, comparison: str) -> None:
        """Note that the wait ``access`` has ended."""
        if comparison == "==":
            signal.for_one_value[access.slot].end = access.time
        if comparison == ">=" and wanted > 0:
            signal.wanted = max(signal.wanted, wanted)
            signal.wait_launches.add(access.thread.launch)

    def polled(self, signal: Signal, access: Access, value: int, *, changes: bool) -> None:
        """Note a raw load or an atomic that has read ``value``: a loop may wait by it.

        ``changes``: an atomic that changes the value.
        """
        code = access.code
        if code is None:
            return
        if loop_for_one_value(code[0].co_filename, code[1]) is not None:
            self.one_value.polls(signal, access.thread, code, value)
        elif not changes and is_polled(code[0].co_filename, code[1]):
            self.awaited(signal)

    def stuck(self) -> None:
        """Report missed values, at the end of a run that is stuck."""
        self.one_value.stuck(self._signals.values())

    def failed(self) -> None:
        """Report missed values, at the end of a run by an error."""
        for signal in self._signals.values():
            self.one_value.report(signal)

    def finish(self) -> None:
        """Report missed values and counts above what is waited for, at the end of a run."""
        self.one_value.finish(self._signals.values())
        for signal in self._signals.values():
            calls = len(signal.notify_launches) / max(1, len(signal.wait_launches))
            if signal.added > 1 and signal.wanted > 0 and self.value(signal) > signal.wanted * calls:
                name, count = self._memory.describe(signal.address), self.value(signal)
                text = f"{name} ends at {count}, and the largest value waited for is {signal.wanted}"
                self._report("overshoot", text, signal, [signal.writers[-1].access])

    def cause(self, address: int) -> list[str]:
        """Reasons why a wait for the signal at ``address`` may never end: the last notifies."""
        signal, name = self._signals.get(address), self._memory.describe(address)
        if signal is not None and signal.writers:
            return [f"{name}: last written by {self._writer(signal.writers[-1])}"]
        extent = self._memory.find(address)
        lines = [f"{name}: never notified"]
        if extent is not None:
            beside = [
                w
                for w in self._signals.values()
                if w.writers and (f := self._memory.find(w.address)) and f.name == extent.name
            ]
            for other in beside[:3]:
                lines.append(f"{self._memory.describe(other.address)}: notified by {self._writer(other.writers[-1])}")
        return lines

    def _writer(self, write: Write) -> str:
        access = write.access
        where = self._races.place(access.code) or "host code"
        return f"{access.thread.label} ({access.verb}, {where}), value {write.value}"

    def _waiting_for(self, signal: Signal) -> str | None:
        for task in self._races.machine.scheduler.waiting_tasks():
            waiting = task.waiting
            if waiting is not None and waiting.low is not None and waiting.low <= signal.address < waiting.high:
                return task.label
        return None

    def _report(self, kind: str, text: str, signal: Signal, accesses: list[Access]) -> None:
        extent = self._memory.find(signal.address)
        if extent is not None:
            self._races.report(kind, text, accesses, elements_at(extent, signal.address, signal.address))


def _is_back(signal: Signal, old: int, new: int) -> bool:
    bits = 8 * signal.itemsize
    return (new - old) % (1 << bits) >= 1 << (bits - 1)


def addresses_in(signal: Signal, addresses: np.ndarray) -> np.ndarray:
    """Indices of the signal in ``addresses``."""
    return np.flatnonzero(addresses == np.uint64(signal.address))

"""Waits for one value of a signal (``CMP_EQ``, raw loops of ``!=``), which may go past it unseen.

A write moves a signal *past* a value if the signal had it before and has another one now, or if the two lie on its two sides. A
wait may miss its value by such a write of another line that is not ordered before the wait's beginning or after its end, in any
schedule, unless the value comes back by a write that the wait's end need not precede, as that of a lock does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from weft.check.detector.races import Races, elements_at
from weft.check.detector.signal_states import OneValue, Signal
from weft.check.detector.thread_clocks import SCALAR, Access, ThreadClock, Write
from weft.check.detector.vector_clocks import at
from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.memory import signed
from weft.simulator.machine.polling import loop_for_one_value

# Most missed values kept of a signal until the end of a run.
_MOST = 64


class OneValueWaits:
    """Waits for one value of all signals; their state is the signal's."""

    def __init__(self, races: Races) -> None:
        self._races = races

    def begins(self, signal: Signal, thread: ThreadClock, wanted: int | None, code: CodeLine | None) -> OneValue:
        """Note that ``thread`` begins to wait for ``wanted`` alone (None: for a value that is not known)."""
        wait = signal.for_one_value[thread.slot] = OneValue(thread, wanted, code)
        passing = None
        for write in signal.writers:
            if write.value == wanted:
                passing = None
            elif self._passes(signal, wait, write) and at(thread.clock, write.access.slot) < write.access.time:
                passing = write
        if passing is not None:
            self._misses(signal, wait, f"{self._races.line_of(passing.access)} may set {passing.value} first")
        return wait

    def polls(self, signal: Signal, thread: ThreadClock, code: CodeLine, value: int) -> None:
        """Note that a raw loop for one value has read ``value``."""
        wait = signal.for_one_value.get(thread.slot)
        if wait is None or wait.thread is not thread or wait.code != code or (wait.wanted is not None and wait.end):
            wait = self.begins(signal, thread, self._wanted(signal, code), code)
        if wait.wanted is None or value == wait.wanted:
            wait.seen, wait.end = value, thread.stamp(SCALAR)[1]

    def wrote(self, signal: Signal, write: Write) -> None:
        """Note a write, by which some waits may miss their values, or get them again."""
        for key, (wait, _) in list(signal.missed.items()):
            if write.value == wait.wanted and not _is_after(write, wait):
                del signal.missed[key]
        for wait in signal.for_one_value.values():
            if self._passes(signal, wait, write):
                self._misses(signal, wait, f"{self._races.line_of(write.access)} may set {write.value} first")

    def stuck(self, signals: Iterable[Signal]) -> None:
        """Report missed values at the end of a run that is stuck."""
        for signal in signals:
            if not signal.fell and signal.writers:
                now, first = signal.writers[-1].value, signal.initial
                for wait in signal.for_one_value.values():
                    is_open = wait.end is None and wait.wanted not in (None, first)
                    if is_open and _passed(first, now, wait.wanted, signal.itemsize):
                        self._misses(signal, wait, f"it is at {now}")
            self.report(signal)

    def finish(self, signals: Iterable[Signal]) -> None:
        """Report missed values at the end of a run."""
        for signal in signals:
            last = signal.writers[-1] if signal.writers else None
            for wait in signal.for_one_value.values():
                # A loop whose condition does not show the value has ended by the last one that it saw.
                if wait.wanted is None and last is not None and last.value != wait.seen:
                    wait.wanted = wait.seen
                    if self._passes(signal, wait, last):
                        self._misses(signal, wait, f"{self._races.line_of(last.access)} may set {last.value} first")
            self.report(signal)

    def report(self, signal: Signal) -> None:
        """Report the values of a signal that were missed and have not come back."""
        for _, report in signal.missed.values():
            report()
        signal.missed.clear()

    def _passes(self, signal: Signal, wait: OneValue, write: Write) -> bool:
        """True if the wait may look at the signal only after ``write`` has moved it past the value."""
        access, wanted = write.access, wait.wanted
        if wanted is None or access.thread is wait.thread or (access.code is not None and access.code == wait.code):
            return False  # the waiting line takes the value, as that of a lock does
        if wait.end is not None:
            return write.value != wanted and not _is_after(write, wait)
        return _passed(write.old, write.value, wanted, signal.itemsize)

    def _misses(self, signal: Signal, wait: OneValue, why: str) -> None:
        key, extent = (wait.thread.slot, wait.code, wait.wanted), self._races.memory.find(signal.address)
        if extent is None or key in signal.missed or len(signal.missed) >= _MOST:
            return
        access = Access.of(wait.thread, "wait", wait.code, "sys")
        text = f"{self._races.line_of(access)} waits until a signal is {wait.wanted}, and may never see it: {why}"
        place = elements_at(extent, signal.address, signal.address)
        signal.missed[key] = wait, partial(self._races.report, "equality-wait", text, [access], place)

    def _wanted(self, signal: Signal, code: CodeLine) -> int | None:
        """Value that the loop around ``code`` waits for; None if its condition does not show it."""
        loop = loop_for_one_value(code[0].co_filename, code[1])
        value = None if loop is None or loop.wanted is None else self._races.interpreter.evaluate(loop.wanted)
        return signed(value, signal.itemsize) if isinstance(value, int) else None


def _is_after(write: Write, wait: OneValue) -> bool:
    """True if the writer knows that the wait has ended."""
    return wait.end is not None and at(write.access.thread.clock, wait.thread.slot) >= wait.end


def _passed(old: int, new: int, wanted: int, itemsize: int) -> bool:
    """True if a signal that goes from ``old`` to ``new`` leaves ``wanted``, or goes over it."""
    before, after = signed(old - wanted, itemsize), signed(new - wanted, itemsize)
    return (before == 0 != after) or before < 0 < after or after < 0 < before

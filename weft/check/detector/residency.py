"""Waits for programs that may not be resident: cycles of waits between grids too large for their GPU.

If a GPU cannot hold a grid at once, one of its programs may have to end before another can start. The first must not wait for
the second: neither within one grid, nor through a peer's grid that is too large as well and waits for this one. Waits for
earlier kernels, the copy engine, host code or grids that fit cannot hang, since these do not depend on the end of a program of
this grid.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.check.detector.races import Elements, elements_at
from weft.check.detector.signal_states import Signal
from weft.check.detector.thread_clocks import Access, ThreadClock
from weft.simulator.machine.grids import Grid
from weft.simulator.machine.memory import Memory


class Residency:
    """Graph of the waits between grids too large for their GPU. ``report``: called as ``Races.report``."""

    def __init__(self, sms: int, memory: Memory, report: Callable[..., None]) -> None:
        self._sms, self._memory, self._report = sms, memory, report
        self._awaits: dict[Grid, set[Grid]] = {}

    def waited(self, thread: ThreadClock, signal: Signal, wanted: int | None, code: tuple | None) -> None:
        """Note that ``thread`` has seen ``signal >= wanted`` (None: a value that a loop polled for)."""
        if self._is_too_large(thread):
            for writer in _suppliers(signal, wanted):
                self.relied_on(thread, writer, signal.address, code)

    def relied_on(self, thread: ThreadClock, writer: ThreadClock, address: int, code: tuple | None) -> None:
        """Note that ``thread`` has waited for a store of ``writer``."""
        if writer is thread or not (self._is_too_large(thread) and self._is_too_large(writer)):
            return
        grid, other = thread.grid, writer.grid
        if other in self._awaits.setdefault(grid, set()) and other is not grid:
            return
        self._awaits[grid].add(other)
        if not self._leads(other, grid):
            return
        suppliers = (
            "other programs of this grid"
            if other is grid
            else f"programs of {writer.label.partition(' program ')[0]}, which wait for this grid"
        )
        text = (
            f"kernel {grid.launch.name} has {grid.total} programs, some of which wait for {suppliers}, and this GPU holds "
            f"{self._sms} at a time"
        )
        extent = self._memory.find(address)
        access = Access.of(thread, "wait", code, "sys")
        elements = elements_at(extent, extent.base, extent.base) if extent is not None else Elements()
        self._report("residency", text, [access], elements)

    def _is_too_large(self, thread: ThreadClock) -> bool:
        return thread.grid is not None and thread.grid.total > self._sms

    def _leads(self, start: Grid, goal: Grid) -> bool:
        seen, left = {start}, [start]
        while left:
            grid = left.pop()
            if grid is goal:
                return True
            left += [other for other in self._awaits.get(grid, ()) if other not in seen]
            seen.update(left)
        return False


def _suppliers(signal: Signal, wanted: int | None) -> list[ThreadClock]:
    """Writers that brought the signal to ``wanted``: the one that reached it, and all adders before."""
    suppliers: list[ThreadClock] = []
    for write in signal.writers:
        thread = write.access.thread
        suppliers = [*suppliers, thread] if "add" in write.access.verb else [thread]
        if wanted is not None and write.value >= wanted:
            break
    return suppliers

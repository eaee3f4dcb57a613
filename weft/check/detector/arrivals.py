"""Lines whose values depend on the order in which programs arrive: float sums by atomics, tickets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.check.detector.findings import Arrivals
from weft.check.detector.races import Races
from weft.check.detector.thread_clocks import Access
from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.polling import is_discarded, is_polled


class ArrivalOrders:
    """Values that atomics of one run have read before they changed memory, by line."""

    def __init__(self, races: Races) -> None:
        self._races = races
        self._read: dict[CodeLine, dict[str, tuple[Access, int]]] = {}
        self._of_floats: set[CodeLine] = set()

    def note(self, op: str, access: Access, old: np.ndarray) -> None:
        """Note an atomic that has changed memory from ``old``, unless neither its value nor its order matters."""
        code = access.code
        if code is None or is_polled(code[0].co_filename, code[1]):
            return
        if op == "fadd":
            self._of_floats.add(code)
        elif is_discarded(code[0].co_filename, code[1]):
            return
        by_thread = self._read.setdefault(code, {})
        name = f"{access.thread.label} of launch {access.thread.launch}"
        first, before = by_thread.get(name, (access, 0))
        by_thread[name] = first, hash((before, old.tobytes()))

    def by_line(self) -> Arrivals:
        orders: Arrivals = {}
        for code, by_thread in self._read.items():
            access = by_thread[min(by_thread)][0]
            read = hash(tuple((name, by_thread[name][1]) for name in sorted(by_thread)))
            orders[replace(self._races.side(access), sync="", through="", ended="")] = read, code in self._of_floats
        return orders

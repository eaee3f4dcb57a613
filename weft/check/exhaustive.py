"""Exhaustive search: all schedules of a small kernel, up to the order of independent accesses.

Dynamic partial-order reduction with source sets and sleep sets (Abdulla and others, POPL 2014): a run is repeated with another
choice only where accesses of two tasks overlap and one task writes. Buffered stores (``store_buffers``) are separate
tasks, which are tried before a step that would deliver them. Host code runs as soon as it can, so its accesses are not
permuted. A polling loop that has seen nothing new waits for a write to the polled bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from weft.check.gathered import Gathered
from weft.check.report import Schedule
from weft.check.runner import Runner

if TYPE_CHECKING:  # greenlet need not be installed where this is imported
    from weft.simulator.interpreter import CodeLine
    from weft.simulator.machine.machine import Machine
    from weft.simulator.machine.tasks import Footprint, Task

# Most choices in one run; beyond them the search counts as bounded.
_MAX_CHOICES = 2000


def conflict(a: Footprint, b: Footprint) -> bool:
    return any((w or v) and low < end and start < high for low, high, w in a for start, end, v in b)


@dataclass(slots=True)
class Node:
    """Choice point: the ready tasks with their next accesses, and the choices made and still to be made."""

    enabled: dict[str, Footprint]
    sleep: dict[str, Footprint]
    chosen: str = ""
    backtrack: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Step:
    key: str
    footprint: Footprint
    clock: dict[str, int]


class Search:
    """Tree of choices so far. Each run descends it with one ``Walk``."""

    def __init__(self) -> None:
        self.stack: list[Node] = []
        self.bounded = False

    def next_branch(self) -> bool:
        """Select the next branch to try; False if none is left."""
        while self.stack:
            node = self.stack[-1]
            node.done.add(node.chosen)
            left = sorted(node.backtrack - node.done - node.sleep.keys())
            if left:
                node.chosen = left[0]
                return True
            self.stack.pop()
        return False


class Walk:
    """Strategy of one run."""

    explores = True

    def __init__(self, search: Search) -> None:
        self._search = search
        self._place: Callable[[int], int] = int  # address -> number that is equal in all runs
        self._steps: list[Step] = []
        self._clocks: dict[str, dict[str, int]] = {}
        self._names: dict[int, str] = {}
        self._keep: list[Task] = []
        self._seen: dict[str, int] = {}
        self._polls: dict[str, tuple[Footprint, CodeLine | None, int]] = {}
        self.redundant = False

    def on(self, machine: Machine) -> Walk:
        """This strategy, for a run of ``machine``."""
        self._place = machine.memory.place
        return self

    def polled(self, task: Task) -> None:
        self._polls[self._key(task)] = (self._footprint(task), task.next_line, len(self._steps))

    def choose(self, ready: Sequence[Task], step: int) -> Task:
        for task in ready:
            if not task.next:
                task.next = None
                return task
        keys = {self._key(task): task for task in ready}
        awake = {key: task for key, task in keys.items() if not self._spins(key, task)} or keys
        if len(self._steps) >= _MAX_CHOICES or self.redundant:
            self._search.bounded = self._search.bounded or not self.redundant
            return awake[sorted(awake)[step % len(awake)]]
        node = self._node({key: self._footprint(task) for key, task in awake.items()})
        if node is None:
            self.redundant = True
            return awake[sorted(awake)[0]]
        self._take(node.chosen, node.enabled[node.chosen])
        self._add_branches()
        # Stores that the step delivers are no steps of this run, so no race shows that they may arrive before it.
        delivers = {*node.enabled[node.chosen]}
        node.backtrack |= {
            key for key, footprint in node.enabled.items() if footprint and delivers.issuperset(footprint)
        }
        return awake[node.chosen]

    def _node(self, enabled: dict[str, Footprint]) -> Node | None:
        depth, stack = len(self._steps), self._search.stack
        if depth < len(stack):
            return stack[depth]
        sleep: dict[str, Footprint] = {}
        if stack:
            above = stack[-1]
            asleep = above.sleep | {key: above.enabled[key] for key in above.done if key in above.enabled}
            sleep = {k: f for k, f in asleep.items() if not conflict(f, above.enabled[above.chosen])}
        free = sorted(enabled.keys() - sleep.keys())
        if not free:
            return None
        # Continuing with the same task gives the fewest switches.
        last = self._steps[-1].key if self._steps else ""
        node = Node(enabled, sleep, chosen=last if last in free else free[0])
        node.backtrack.add(node.chosen)
        stack.append(node)
        return node

    def _add_branches(self) -> None:
        """Add a branch for each earlier step that races with the last one, to run the two in reverse order.

        The branch starts before the earlier step. It begins with any step that could begin the rest of the run without it.
        """
        last = len(self._steps) - 1
        step = self._steps[last]
        before = [i for i in range(last) if self._known(i, last)]
        for index in before:
            if self._steps[index].key == step.key or any(self._known(index, i) for i in before if i > index):
                continue
            rest = [i for i in range(index + 1, last) if not self._known(index, i)] + [last]
            first: dict[str, int] = {}
            for i in rest:
                first.setdefault(self._steps[i].key, i)
            node = self._search.stack[index]
            beginners = {
                key for key, i in first.items() if not any(self._known(j, i) for j in rest if j < i)
            } & node.enabled.keys()
            if not beginners:
                node.backtrack |= set(node.enabled)
            elif not beginners & node.backtrack:
                node.backtrack.add(min(beginners))

    def _known(self, index: int, by: int) -> bool:
        """True if step ``index`` happens before step ``by``."""
        return self._steps[by].clock.get(self._steps[index].key, -1) >= index

    def _take(self, key: str, footprint: Footprint) -> None:
        clock = dict(self._clocks.get(key, {}))
        for step in self._steps:
            if step.key == key or conflict(step.footprint, footprint):
                for other, index in step.clock.items():
                    clock[other] = max(clock.get(other, -1), index)
        clock[key] = len(self._steps)
        self._clocks[key] = clock
        self._steps.append(Step(key, footprint, clock))

    def _footprint(self, task: Task) -> Footprint:
        return tuple((place := self._place(low), place + high - low, write) for low, high, write in task.next)

    def _key(self, task: Task) -> str:
        """Name of the task, equal in all runs."""
        name = self._names.get(id(task))
        if name is None:
            count = self._seen[task.label] = self._seen.get(task.label, 0) + 1
            name = self._names[id(task)] = f"{task.label} #{count}"
            self._keep.append(task)
            if task.maker is not None:
                self._clocks[name] = dict(self._clocks.get(self._key(task.maker), {}))
        return name

    def _spins(self, key: str, task: Task) -> bool:
        """True if the task would read again what it has just read, unchanged."""
        if key not in self._polls:
            return False
        footprint, line, since = self._polls[key]
        if (self._footprint(task), task.next_line) != (footprint, line) or line is None:
            return False
        looked = tuple((low, high, True) for low, high, _ in footprint)
        writes = (tuple(part for part in step.footprint if part[2]) for step in self._steps[since:] if step.key != key)
        return not any(conflict(part, looked) for part in writes)


def explore(runner: Runner, first: Schedule, limit: int, gathered: Gathered, tell: Callable[[], None]) -> bool:
    """Run all schedules from ``first`` on, at most ``limit``. True if these were all."""
    search = Search()
    for number in range(1, limit + 1):
        walk = Walk(search)
        schedule = replace(first, runs=number)
        outcome = runner.run(schedule, walk.on)
        if not walk.redundant:
            gathered.add(schedule, outcome)
        tell()
        if not search.next_branch():
            return not search.bounded
    return False

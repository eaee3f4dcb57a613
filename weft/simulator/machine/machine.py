"""The virtual machine: W GPUs in one process, each with memory, streams and ``sms`` programs.

It is the port through which the interpreter reaches memory, and it turns kernel launches, stream operations and host code
into tasks of one scheduler. It knows ranks, addresses and streams; teams and primitives are built on it (``runtime``,
``language.lowering.simulated``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weft.errors import Deadlock
from weft.simulator import intrinsics
from weft.simulator.interpreter import GridSizes
from weft.simulator.machine.accesses import Event
from weft.simulator.machine.launches import Launches
from weft.simulator.machine.memory import is_met, signed
from weft.simulator.machine.tasks import GreenletTask, Task, ThreadTask, Waiting
from weft.simulator.places import Scattered
from weft.triton_api import JITFunction

_HOISTED = (
    "a compiler may take a plain load out of a loop, which then never ends on a GPU even if the value comes: poll with "
    "wl.wait, or with an atomic that acquires"
)


@dataclass(slots=True)
class Stream:
    """Queue of operations that run one after the other, concurrently with the rank's host code."""

    rank: int
    name: str
    queue: deque[tuple[str, Callable[[], None]]]
    running: Task | None = None

    @property
    def idle(self) -> bool:
        return self.running is None and not self.queue


class Hosts:
    """Scopes of the ranks' host code. A check of torch programs replaces it."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None: ...

    def turn(self, rank: int) -> AbstractContextManager[object]:
        """Scope of a rank's host code between two pauses."""
        return nullcontext()

    def launching(self, kernel: str) -> None:
        """Launch of a kernel that the calling rank's host code is about to make."""

    def external(self, symbol: str) -> Callable[..., int] | None:
        """External function that kernels call by its symbol; None: there is none."""


class Machine(Launches):
    """Virtual machine with one GPU per rank.

    sms         programs of a rank that can be resident at once
    slow        rank -> factor by which the scheduler chooses it less often
    on_event    called with (step, task, kind, detail) for each event
    shares_sms  each of ``sms`` holds as many programs as a GPU's, of 255 registers a thread
    """

    def __init__(
        self,
        world_size: int,
        seed: int = 0,
        sms: int = 8,
        slow: Mapping[int, float] | None = None,
        on_event: Callable[[Event], None] | None = None,
        shares_sms: bool = False,
    ) -> None:
        super().__init__(world_size, seed, sms, slow, on_event, shares_sms)
        self.world_size, self.seed = world_size, seed
        self.is_sized = False  # host code has asked how many programs can be resident at once
        self.uninitialised: set[int] = set()  # bases of symmetric tensors allocated without a value
        self.hosts = Hosts()
        self.has_tables = False  # kernels take peers' addresses from tables of their own
        self._streams: dict[tuple[int, str], Stream] = {}
        self._rendezvous: dict[str, dict[int, object]] = {}

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, mains: list[Callable[[], Any]]) -> list[Any]:
        """Run one host task per rank to its end. Returns their results in rank order."""

        def host(main: Callable[[], Any]) -> Any:
            result = main()
            self.settle()
            return result

        turn = self.hosts.turn
        hosts = [
            ThreadTask(rank, f"rank {rank} host code", partial(host, main), turn) for rank, main in enumerate(mains)
        ]
        for host in hosts:
            self.scheduler.spawn(host)
        with self.scheduler.interrupts, self.interpreter, self.hosts:
            subscription = intrinsics.subscribe(
                lambda fn, intrinsic: self.interpreter.replace(fn, self._bind(intrinsic))
            )
            try:
                self.scheduler.run(self._deadlock)
            finally:
                intrinsics.unsubscribe(subscription)
        return [host.result for host in hosts]

    def launch(self, jit_fn: JITFunction, grid: GridSizes, args: tuple, kwargs: dict[str, Any]) -> None:
        self.hosts.launching(jit_fn.__name__)
        super().launch(jit_fn, grid, args, kwargs)

    def external(self, symbol: str) -> Callable[..., int] | None:
        return self.hosts.external(symbol)

    def _bind(self, intrinsic: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: intrinsic(self, *args, **kwargs)

    # --- side streams ------------------------------------------------------------------------------------------------

    def enqueue(self, stream: str, label: str, operation: Callable[[], None]) -> None:
        """Enqueue an operation on the calling rank's side stream. It runs as a task, after the earlier ones."""
        rank = self.rank
        queue = self._streams.setdefault((rank, stream), Stream(rank, stream, deque()))
        queue.queue.append((label, operation))
        self._advance(queue)

    def _advance(self, stream: Stream) -> None:
        if stream.running is not None or not stream.queue:
            return
        label, operation = stream.queue.popleft()
        task = GreenletTask(stream.rank, f"rank {stream.rank} {stream.name}: {label}", operation)
        stream.running = task

        def finished() -> None:
            stream.running = None
            if task.error is not None:
                raise task.error
            self._advance(stream)

        task.on_finish = finished
        self.scheduler.spawn(task)

    def drain(self, *streams: str) -> None:
        """Block the calling host task until its main stream and these side streams are idle."""
        self.settle()
        for stream in streams:
            queue = self._streams.get((self.rank, stream))
            if queue is not None:
                self.scheduler.block(Waiting(lambda q=queue: q.idle, lambda name=stream: f"waits for its {name}"))

    def join(self, stream: str) -> None:
        """Order the calling rank's main stream after all work of its side stream so far."""
        self.drain(stream)
        self.observer.joined(stream)

    def is_idle(self, rank: int) -> bool:
        """True if no kernel, copy or other stream operation of ``rank`` is under way."""
        return rank not in self._left and all(s.idle for (owner, _), s in self._streams.items() if owner == rank)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait_for_words(self, addresses: list[int], itemsize: int, wanted: int, comparison: str) -> tuple[int, int]:
        """Block the running task until the word at one of ``addresses`` meets the comparison; acquire it.

        Returns the index of the first such word, and the word.
        """
        addresses = self.plain(Scattered(np.array(addresses, np.uint64), None, itemsize), "wait").addresses.tolist()
        low, high = addresses[0], addresses[-1] + itemsize
        task, where = self.scheduler.current, self.who()
        task.history = None
        self.stores.touch(low, high)
        self.observer.waits(addresses, itemsize, wanted, comparison)

        def read(address: int) -> int:
            return self.memory.read_word(address, itemsize, lambda: where)

        def first() -> int | None:
            met = (i for i, address in enumerate(addresses) if is_met(read(address), comparison, wanted, itemsize))
            return next(met, None)

        def describe() -> str:
            names = " or ".join(self.memory.describe(address) for address in addresses)
            seen = ", ".join(str(signed(read(address), itemsize)) for address in addresses)
            return f"{where[len(task.label) :].strip()} waits for {names} {comparison} {wanted}, sees {seen}"

        waiting = Waiting(lambda: first() is not None, describe, low, high)
        self.scheduler.block(waiting)
        while (index := first()) is None:  # the signal went past the value before this task's turn
            self.scheduler.block(waiting)
        self.note("waited", self.memory.describe(addresses[index]))
        self.stores.acquired(addresses[index])
        self.observer.waited(addresses, index, itemsize, wanted, comparison)
        return index, read(addresses[index])

    def wait_for_bytes(self, low: int, high: int, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        task, where = self.scheduler.current, self.who()
        self.observer.waits_for_data(low)
        self.scheduler.block(Waiting(done, lambda: f"{where[len(task.label) :].strip()} {describe()}", low, high))

    def exchange(self, rendezvous: str, item: object, members: list[int], streams: bool = False) -> list[Any]:
        """Rendezvous of the host code of all ``members`` under one name.

        Each gets every item, in the members' order. ``streams``: the main streams meet, not the hosts, as in a NCCL
        collective.
        """
        rank = self.rank
        if streams:
            self.settle()
        self.observer.rendezvous_entered(rendezvous, rank, streams)
        here = self._rendezvous.setdefault(rendezvous, {})
        here[rank] = item
        self.scheduler.recheck()

        def absent() -> str:
            return f"waits in {rendezvous} for rank {', '.join(str(m) for m in members if m not in here)}"

        self.scheduler.block(Waiting(lambda: len(here) == len(members), absent))
        self.observer.rendezvous_left(rendezvous, rank)
        return [here[m] for m in members]

    def _deadlock(self) -> Deadlock:
        lines = []
        for task in self.scheduler.waiting_tasks():
            if task.waiting is not None:
                what = task.waiting.describe()
            elif task.history is not None and task.history.last is not None:
                what = self.describe_spin([task.history.last], task.history.code)
            else:
                what = "runs and changes nothing"
            lines.append(f"{task.label} {what}")
        if any(": plain load of " in line for line in lines):
            lines.append(_HOISTED)
        for rank, pending in enumerate(self._pending):
            for grid in pending:
                if grid.started < grid.total:
                    lines.append(
                        f"rank {rank} kernel {grid.launch.name} programs {grid.started}..{grid.total - 1} cannot start: all "
                        f"{self.sms} SMs are held by waiting programs"
                    )
        lines += self.observer.deadlocked(
            [grid for pending in self._pending for grid in pending if grid.started < grid.total], lines
        )
        sms = "" if self.shares_sms else f", sms={self.sms}"
        return Deadlock(lines, f"weft.simulate(main, world_size={self.world_size}, seed={self.seed}{sms})")

"""Kernel launches as tasks: programs start as SMs become free; the last one ends the launch.

A launch returns when its kernel has ended, so that host code sees a stream's results at once. On a GPU it returns immediately.
Here it does so only if no task could go on otherwise, as when a kernel waits for a copy that its host enqueues afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from weft.errors import WeftError
from weft.simulator.interpreter import Interpreter, Launch
from weft.simulator.machine.memory import Memory
from weft.simulator.machine.pointers import Pointers
from weft.simulator.machine.scheduler import GreenletTask, Scheduler, ThreadTask, Waiting


class Program(GreenletTask):
    """Program instance of a launch."""

    def __init__(self, grid: Grid, index: int) -> None:
        x, y, z = grid.launch.grid
        self.index = (index % x, index // x % y, index // (x * y))
        self.number = index
        self.grid = grid
        label = f"rank {grid.rank} kernel {grid.launch.name} program {index}"
        super().__init__(grid.scheduler, grid.rank, label, self._body)

    def _body(self) -> None:
        self.grid.launch.run()
        self.grid.machine.complete_copies()


class Grid:
    """Kernel launch: its programs start in order as the rank's SMs become free."""

    def __init__(self, machine: Any, rank: int, launch: Launch, bases: list[int], overlaps: bool = False) -> None:
        """
        bases     bases of the extents that memory knows while the kernel runs
        overlaps  programmatic dependent launch: the kernel may start while the one before it runs. Only the checker
                  takes this into account
        """
        self.overlaps = overlaps
        self.machine, self.scheduler, self.rank, self.launch = machine, machine.scheduler, rank, launch
        x, y, z = launch.grid
        self.total = x * y * z
        self.started = self.ended = 0
        self.programs: list[Program] = []
        self.error: BaseException | None = None
        self.bases, self.left = bases, False  # left: the launch has returned to its host

    @property
    def done(self) -> bool:
        if self.machine.store_buffers is not None and self.machine.store_buffers.under_way(self.programs):
            return False
        return self.ended == self.total or self.error is not None

    def start_one(self) -> None:
        program = Program(self, self.started)
        self.programs.append(program)
        self.started += 1
        program.on_finish = lambda: self._program_ended(program)
        if self.machine.observer is not None:
            self.machine.observer.program_started(program)
        self.scheduler.spawn(program)

    def _program_ended(self, program: Program) -> None:
        self.ended += 1
        if self.machine.store_buffers is not None:
            self.machine.store_buffers.end(program)
        if self.machine.observer is not None:
            self.machine.observer.program_ended(program)
        if program.error is not None and self.error is None:
            self.error = program.error
        self.machine.sm_freed(self.rank)


class Launches:
    """Part of ``Machine`` that runs ``kernel[grid](...)``."""

    sms: int
    most_at_once: int  # most programs of a rank resident at once so far
    scheduler: Scheduler
    memory: Memory
    pointers: Pointers
    interpreter: Interpreter
    observer: Any
    rank: int
    note: Any
    _free_sms: list[int]
    _pending: list[deque[Grid]]
    _names: Mapping[int, str]
    _known: list[int]
    _awaited: dict[int, Grid]
    _left: dict[int, Grid]

    def launch(self, jit_fn: Any, grid: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run a kernel for the calling rank, as a rule to its end.

        Raises the error of its first program that failed.
        """
        task = self.scheduler.current
        if not isinstance(task, ThreadTask):
            raise WeftError(f"{task.label}: kernels are launched from host code only")
        if not task.is_here:
            raise WeftError(
                f"thread {threading.current_thread().name!r} launched a kernel while {task.label} is running; launch kernels "
                f"from main(team) itself, not from another thread or from a simulation that has ended"
            )
        self.settle()
        self._names, self._known = _argument_names(jit_fn, args, kwargs), []
        bases = self._known
        try:
            launch = self.interpreter.prepare(jit_fn, grid, args, kwargs)
            run = Grid(self, task.rank, launch, bases, overlaps=bool(kwargs.get("launch_pdl", False)))
            if bool(kwargs.get("launch_cooperative_grid", False)) and run.total > self.sms:
                raise WeftError(
                    f"rank {task.rank}: kernel {launch.name} asks for {run.total} programs that wait for each other and this "
                    f"GPU holds {self.sms} at a time; launch at most team.max_programs(num_warps)"
                )
        except BaseException:
            self._forget(bases)
            raise
        self.note("launch", f"{launch.name} {launch.grid}")
        if run.total == 0:
            self._forget(bases)
            return
        if self.observer is not None:
            self.observer.launch(task.rank, run, launch.tuples)
        self._pending[task.rank].append(run)
        self.sm_freed(task.rank, freed=0)
        self._awaited[task.rank] = run
        self.scheduler.block(Waiting(lambda: run.done or run.left, lambda: f"waits for its kernel {launch.name}"))
        del self._awaited[task.rank]
        if run.done:
            self._end(run)
        else:
            self._left[task.rank] = run

    def pointer(self, tensor: Any) -> int:
        """Pointer to ``tensor``, which stays known until the launch being prepared has ended."""
        base = self.memory.add_tensor(tensor, self.rank, self._names.get(tensor.data_ptr(), self._names[0]))
        if base is not None:
            self._known.append(base)
        return self.pointers.of(tensor)

    def settle(self) -> None:
        """Wait for the main stream's work, which the calling host code is about to use."""
        run = self._left.pop(self.rank, None) if self._left else None
        if run is not None:
            self.scheduler.block(Waiting(lambda: run.done, lambda: f"waits for its kernel {run.launch.name}"))
            self._end(run)

    def return_launches(self) -> bool:
        """Let launches return before their kernels have ended, when no task can go on. False if there is none."""
        waiting = [run for run in self._awaited.values() if not run.left]
        for run in waiting:
            run.left = True
        self.scheduler.recheck()
        return bool(waiting)

    def sm_freed(self, rank: int, freed: int = 1) -> None:
        self._free_sms[rank] += freed
        pending = self._pending[rank]
        while pending and self._free_sms[rank] > 0:
            grid = pending[0]
            if grid.error is not None or grid.started == grid.total:
                pending.popleft()
                continue
            self._free_sms[rank] -= 1
            self.most_at_once = max(self.most_at_once, self.sms - self._free_sms[rank])
            grid.start_one()

    def _end(self, run: Grid) -> None:
        self._forget(run.bases)
        if run.error is not None:
            raise run.error
        if self.observer is not None:
            self.observer.grid_ended(run)

    def _forget(self, bases: list[int]) -> None:
        for base in bases:
            self.memory.remove(base)


def _argument_names(jit_fn: Any, args: tuple, kwargs: dict[str, Any]) -> dict[int, str]:
    """Names by data_ptr of tensors, also in descriptors and tuples; at 0 the name of any other."""
    kernel = jit_fn.__name__
    defaults = [(p.name, p.default) for p in jit_fn.params]
    named = [*defaults, *zip((p.name for p in jit_fn.params), args, strict=False), *kwargs.items()]
    known = {0: f"argument of {kernel}"}
    while named:
        name, value = named.pop()
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            named += [(f"{name}.{field}", part) for field, part in zip(fields, value, strict=True)]
        value = getattr(value, "base", value)
        if hasattr(value, "data_ptr"):
            known.setdefault(value.data_ptr(), f"{name}, argument of {kernel}")
    return known

"""Kernel launches as tasks: programs start as SMs become free; the last one ends the launch.

A launch returns when its kernel has ended, so that host code sees a stream's results at once. On a GPU it returns immediately.
Here it does so only if no task could go on otherwise, as when a kernel waits for a copy that its host enqueues afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.errors import WeftError
from weft.simulator.front_end import FrontEnd
from weft.simulator.interpreter import GridSizes
from weft.simulator.interpreter.stand_ins import StaticAssertionFailed
from weft.simulator.machine.accesses import Accesses, Event
from weft.simulator.machine.grids import Grid, Program
from weft.simulator.machine.tasks import ThreadTask, Waiting
from weft.triton_api import JITFunction

# Warps that the registers of an SM hold, at 255 a thread.
_WARPS_OF_SM = 8


class Launches(Accesses):
    """Part of ``Machine`` that runs ``kernel[grid](...)``."""

    def __init__(
        self,
        world_size: int,
        seed: int,
        sms: int,
        slow: Mapping[int, float] | None,
        on_event: Callable[[Event], None] | None,
        shares_sms: bool = False,
    ) -> None:
        super().__init__(seed, slow, on_event)
        self.sms, self.shares_sms = sms, shares_sms
        self.most_at_once = 0  # most programs of a rank resident at once so far
        self._resident = [0] * world_size
        # Parts of SMs that no program holds.
        self._free = [sms * (_WARPS_OF_SM if shares_sms else 1)] * world_size
        self._pending: list[deque[Grid]] = [deque() for _ in range(world_size)]
        self._names: dict[int, str] = {}
        self._known: list[int] = []
        self._awaited: dict[int, Grid] = {}
        self._left: dict[int, Grid] = {}
        self.front_end: FrontEnd | None = None  # notes the kernels, where they are compiled afterwards

    def launch(self, jit_fn: JITFunction, grid: GridSizes, args: tuple, kwargs: dict[str, Any]) -> None:
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
        bases, source = self._known, None
        try:
            launch = self.interpreter.prepare(jit_fn, grid, args, kwargs)
            if self.front_end is not None:
                source = self.front_end.note(jit_fn, args, kwargs)
            overlaps = bool(kwargs.get("launch_pdl", False))
            run = Grid(task.rank, launch, bases, overlaps=overlaps, names=self._names)
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
        self.observer.launch(run)
        self._pending[task.rank].append(run)
        self._start_programs(task.rank)
        self._awaited[task.rank] = run
        self.scheduler.block(
            Waiting(lambda: self._is_done(run) or run.left, lambda: f"waits for its kernel {launch.name}")
        )
        del self._awaited[task.rank]
        if self._is_done(run):
            if isinstance(run.error, StaticAssertionFailed) and self.front_end is not None and source is not None:
                self.front_end.forget(source)  # the error says as much, or an autotuner passes the kernel over
            self._end(run)
        else:
            self._left[task.rank] = run

    def holds(self, num_warps: int) -> int:
        """Programs of ``num_warps`` that a rank holds at a time."""
        return self.sms * (_WARPS_OF_SM // self._parts(num_warps) if self.shares_sms else 1)

    def _parts(self, num_warps: int) -> int:
        """Parts of an SM that a program holds."""
        return min(num_warps, _WARPS_OF_SM) if self.shares_sms else 1

    def pointer(self, tensor: torch.Tensor) -> int:
        """Pointer to ``tensor``, which stays known until the launch being prepared has ended."""
        base = self.memory.add_tensor(tensor, self.rank, self._names.get(tensor.data_ptr(), self._names[0]))
        if base is not None:
            self._known.append(base)
        return self.pointers.of(tensor)

    def settle(self) -> None:
        """Wait for the main stream's work, which the calling host code is about to use."""
        run = self._left.pop(self.rank, None) if self._left else None
        if run is not None:
            self.scheduler.block(Waiting(lambda: self._is_done(run), lambda: f"waits for its kernel {run.launch.name}"))
            self._end(run)

    def return_launches(self) -> bool:
        """Let launches return before their kernels have ended, when no task can go on. False if there is none."""
        waiting = [run for run in self._awaited.values() if not run.left]
        for run in waiting:
            run.left = True
        self.scheduler.recheck()
        return bool(waiting)

    def _start_programs(self, rank: int) -> None:
        """Start programs where the rank's SMs have room."""
        pending = self._pending[rank]
        while pending:
            grid = pending[0]
            if grid.error is not None or grid.started == grid.total:
                pending.popleft()
                continue
            parts = self._parts(grid.num_warps)
            if self._free[rank] < parts:
                return
            self._free[rank] -= parts
            self._resident[rank] += 1
            self.most_at_once = max(self.most_at_once, self._resident[rank])
            self._start_program(grid)

    def _start_program(self, grid: Grid) -> None:
        def body() -> None:
            grid.launch.run()
            self.complete_copies()

        def finished() -> None:
            grid.ended += 1
            self.stores.end(program)
            self.observer.program_ended(program)
            if program.error is not None and grid.error is None:
                grid.error = program.error
            self._free[grid.rank] += self._parts(grid.num_warps)
            self._resident[grid.rank] -= 1
            self._start_programs(grid.rank)

        program = Program(grid, body)
        grid.programs.append(program)
        program.on_finish = finished
        self.observer.program_started(program)
        self.scheduler.spawn(program)

    def _is_done(self, grid: Grid) -> bool:
        return not self.stores.under_way(grid.programs) and (grid.ended == grid.total or grid.error is not None)

    def _end(self, run: Grid) -> None:
        self._forget(run.bases)
        if run.error is not None:
            raise run.error
        self.observer.grid_ended(run)
        # Records of accesses keep the grid until the run's end, and would keep its tensors too.
        run.launch = replace(run.launch, run=lambda: None, tensors=[], tuples=[])

    def _forget(self, bases: Sequence[int]) -> None:
        for base in bases:
            self.memory.remove(base)


def _argument_names(jit_fn: JITFunction, args: tuple, kwargs: dict[str, Any]) -> dict[int, str]:
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

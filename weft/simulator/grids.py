"""Kernel launches as tasks: programs that start in order as SMs become free, and end their launch together."""

from __future__ import annotations

from typing import Any

from weft.simulator.interpreter import Launch
from weft.simulator.scheduler import GreenletTask


class Program(GreenletTask):
    """One program instance of a launch."""

    def __init__(self, grid: Grid, index: int) -> None:
        x, y, z = grid.launch.grid
        self.index = (index % x, index // x % y, index // (x * y))
        self.number = index
        self.grid = grid
        super().__init__(
            grid.scheduler, grid.rank, f"rank {grid.rank} kernel {grid.launch.name} program {index}", grid.launch.run
        )


class Grid:
    """A kernel launch: its programs start in order as the rank's SMs become free, and end it together."""

    def __init__(self, machine: Any, rank: int, launch: Launch) -> None:
        self.machine, self.scheduler, self.rank, self.launch = machine, machine.scheduler, rank, launch
        x, y, z = launch.grid
        self.total = x * y * z
        self.started = self.ended = 0
        self.programs: list[Program] = []
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        if self.machine.delays is not None and self.machine.delays.under_way(self.programs):
            return False
        return self.ended == self.total or self.error is not None

    def start_one(self) -> None:
        program = Program(self, self.started)
        self.programs.append(program)
        self.started += 1
        program.on_finish = lambda: self._program_ended(program)
        if self.machine.watcher is not None:
            self.machine.watcher.program_started(program)
        self.scheduler.spawn(program)

    def _program_ended(self, program: Program) -> None:
        self.ended += 1
        if self.machine.delays is not None:
            self.machine.delays.end(program)
        if self.machine.watcher is not None:
            self.machine.watcher.program_ended(program)
        if program.error is not None and self.error is None:
            self.error = program.error
        self.machine.sm_freed(self.rank)

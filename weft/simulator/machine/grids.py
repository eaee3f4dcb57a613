"""A kernel's launch and its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from weft.simulator.interpreter import Launch
from weft.simulator.machine.tasks import GreenletTask


class Grid:
    """Kernel launch: its programs start in order as the rank's SMs become free."""

    def __init__(self, rank: int, launch: Launch, bases: list[int], overlaps: bool, names: Mapping[int, str]) -> None:
        """
        bases     bases of the extents that memory knows while the kernel runs
        overlaps  programmatic dependent launch: the kernel may start while the one before it runs. Only the checker
                  takes this into account
        names     of its arguments, by data_ptr
        """
        self.rank, self.launch, self.bases, self.overlaps, self.names = rank, launch, bases, overlaps, names
        x, y, z = launch.grid
        self.total = x * y * z
        self.num_warps = launch.threads // 32
        self.ended = 0
        self.programs: list[Program] = []
        self.error: BaseException | None = None
        self.left = False  # the launch has returned to its host

    @property
    def started(self) -> int:
        return len(self.programs)


class Program(GreenletTask):
    """Program instance of a launch."""

    number: int

    def __init__(self, grid: Grid, body: Callable[[], None]) -> None:
        self.grid, self.number = grid, grid.started
        x, y, _ = grid.launch.grid
        self.index = (self.number % x, self.number // x % y, self.number // (x * y))
        self.branches: list[np.ndarray] = []  # threads that take the branches under way, innermost last
        super().__init__(grid.rank, f"rank {grid.rank} kernel {grid.launch.name} program {self.number}", body)

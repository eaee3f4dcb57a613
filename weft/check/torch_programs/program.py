"""A torch program as the main of a check: each virtual rank runs the file as torchrun would have it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.check.script import import_file

if TYPE_CHECKING:
    from weft.check.torch_programs.ranks import Ranks
    from weft.simulator.machine.machine import Machine


class TorchProgram:
    """File of a torch program.

    ``function``: called with the rank and the number of ranks; None: the file is run.
    """

    def __init__(self, script: Path, function: str | None, arguments: tuple[str, ...] = ()) -> None:
        self._script, self._function, self._arguments = script, function, arguments
        self._ranks: Ranks | None = None

    def prepare(self, machine: Machine) -> None:
        """Give the program's ranks to a machine that is about to run."""
        from weft.check.torch_programs.ranks import Ranks
        from weft.check.torch_programs.scope import patches

        machine.hosts = self._ranks = Ranks(machine, patches)
        machine.has_tables = True
        for rank in self._ranks.ranks:
            rank.process.arguments = [str(self._script), *self._arguments]
            rank.process.folders = [str(self._script.parent.resolve())]

    def __call__(self, team: Any) -> Any:
        from weft.check.torch_programs.devices import OnGpu

        assert self._ranks is not None
        rank, size = team.rank, team.size
        with OnGpu(self._ranks, rank):
            if self._function is None:
                import_file("__main__", self._script)
                return None
            function = getattr(import_file("weft_torch_program", self._script), self._function, None)
            if not callable(function):
                raise ValueError(f"{self._script} defines no function {self._function}")
            count = len(inspect.signature(function).parameters)
            return function(*(rank, size)[:count])

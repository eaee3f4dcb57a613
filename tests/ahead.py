"""Processes of ranks for the GPU tests to come: while a test runs, those of the next load torch and make their contexts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft.runtime.early import EarlyProcesses


class Ahead:
    """Stands for ``early_processes``: each launch takes the set that is ready, and the next set starts.

    A set that started under another environment, folder, path of imports or output than the launch's is ended, and one starts
    anew.
    """

    def __init__(self, gpus: int, modules: Sequence[str], later: Sequence[str] = ()) -> None:
        self._gpus, self._modules, self._later = gpus, modules, later
        self._start()

    def _start(self) -> None:
        self._of = surroundings()
        self._ready = EarlyProcesses(self._gpus, self._modules, later=self._later, gpus=self._gpus)

    @contextmanager
    def processes(
        self, count: int, modules: Sequence[str], *, later: Sequence[str] = (), first_gemm: bool = False
    ) -> Iterator[EarlyProcesses | None]:
        """Yield the processes of a launch; None for no ranks."""
        if not count:
            yield None
            return
        if surroundings() != self._of:
            self.close()
            self._start()
        taken = self._ready
        self._start()
        try:
            yield taken
        finally:
            taken.close()

    def close(self) -> None:
        self._ready.close()


def surroundings() -> tuple[dict[str, str], str, tuple[str, ...], list[tuple[int, int]]]:
    """All of this process that a process takes over as it starts: environment, folder, path of imports, output.

    Without pytest's name of the test that runs, which no two tests share.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    output = [(file.st_dev, file.st_ino) for file in map(os.fstat, (1, 2))]  # others while a test captures it
    return environment, os.getcwd(), tuple(sys.path), output

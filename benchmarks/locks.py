"""Locks between processes of one machine, by files. The end of a process frees what it had."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.runtime.files import put


@contextmanager
def held(file: Path, shared: bool = False) -> Iterator[None]:
    """Scope in which this process has ``file`` alone, or with further ones that share it."""
    with open(file, "a") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def claimed(file: Path) -> bool:
    """True for the first process that asks."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Room:
    """A room for one process alone or for several beside each other.

    Whoever waits to be alone lets nobody in before: all pass a gate.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._room = folder / "gate", folder / "room"

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Scope beside further processes, and beside none that is alone."""
        with open(self._room, "a") as room:
            with held(self._gate):
                fcntl.flock(room, fcntl.LOCK_SH)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Scope in which no further process is in the room."""
        with held(self._gate), held(self._room):
            yield


class Budget:
    """An amount that processes share."""

    def __init__(self, folder: Path, total: int) -> None:
        self._lock, self._file, self._total = folder / "budget-lock", folder / "budget.json", total

    @contextmanager
    def part(self, amount: int) -> Iterator[None]:
        """Scope in which this process has ``amount``, at most the total; waits until as much is left."""
        while not self._take(min(amount, self._total)):
            time.sleep(0.02)
        try:
            yield
        finally:
            self._take(0)

    def _take(self, amount: int) -> bool:
        with held(self._lock):
            taken = json.loads(self._file.read_text()) if self._file.exists() else {}
            taken = {pid: part for pid, part in taken.items() if pid != str(os.getpid()) and _runs(int(pid))}
            if fits := sum(taken.values()) + amount <= self._total:
                put(self._file, json.dumps(taken | {str(os.getpid()): amount}))
        return fits


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

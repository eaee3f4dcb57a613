"""Events of a machine, for a check. Without one they go to an ``Observer``, which does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.grids import Grid, Program
from weft.simulator.machine.stores import Landed


def _nothing() -> None: ...


class Observer:
    """Receiver of a machine's events.

    "The program" is the task that runs when the method is called. Addresses are of bytes, without the number of their tensor,
    and in known extents; ``itemsize`` is in bytes; bits are unsigned integers of that size. The arrays of one event have one
    shape.
    """

    # --- accesses of kernels -----------------------------------------------------------------------------------------

    def load(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, how: str, bits: np.ndarray) -> None:
        """The program has loaded ``bits``. ``how``: "plain", "volatile", "tma" or "lamport"."""

    def store(self, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, how: str) -> Landed:
        """The program begins a "plain", "tma" or "lamport" store. Returns what to call just before the bits are in memory."""

    def notified(self, address: int, bits: int, itemsize: int) -> Landed:
        """One thread of the program begins a release store at system scope. Returns as ``store`` does."""

    def atomic(self, op: str, addresses: np.ndarray, old: np.ndarray, new: np.ndarray, sem: str, scope: str) -> None:
        """An atomic of the program has taken effect on these elements (one-dimensional arrays)."""

    def reduced(self, op: str, addresses: np.ndarray, new: np.ndarray, scope: str) -> None:
        """A descriptor's reduction has taken effect on these elements (one-dimensional arrays)."""

    def copies(
        self, targets: np.ndarray, itemsize: int, sources: np.ndarray, source_itemsize: int, bits: np.ndarray, what: str
    ) -> Landed:
        """The program begins a copy of the sources' ``bits``: a "put", "get" or "put_signal". Returns as ``store`` does."""

    def completed(self) -> None:
        """The program is about to wait until all its copies are complete."""

    def barrier(self) -> None:
        """CTA barrier of the program."""

    def drain(self) -> None:
        """The program's tensor-descriptor stores have landed."""

    def fence(self) -> None:
        """Fence at system scope in every thread of the program."""

    def fence_proxy(self) -> None:
        """Proxy fence: the program's descriptor loads see from here on what it sees."""

    # --- waits and deadlocks -----------------------------------------------------------------------------------------

    def waits(self, address: int, itemsize: int) -> None:
        """The program begins to wait for a signal."""

    def waited(self, address: int, itemsize: int, wanted: int) -> None:
        """The program has seen the signal at ``wanted`` or above, and acquires it."""

    def waits_for_data(self, address: int) -> None:
        """The program begins to wait for Lamport elements, the first of them at ``address``."""

    def spins(self, address: int, line: CodeLine | None) -> None:
        """The program repeats itself until the bytes at ``address``, or others, change; ``line`` reads them."""

    def deadlocked(self, unstarted: list[Grid], tasks: list[str]) -> list[str]:
        """No task can go on. Returns further lines for the error. ``tasks``: descriptions of the waiting ones."""
        return []

    def note_named(self, who: str) -> None:
        """A message names the program's present access by ``who``."""

    # --- kernels -----------------------------------------------------------------------------------------------------

    def launch(self, grid: Grid) -> None:
        """A rank's host code launches a kernel; no program of it has started."""

    def program_started(self, program: Program) -> None:
        """``program`` is about to become ready."""

    def program_ended(self, program: Program) -> None:
        """``program`` has ended, and its stores have arrived unless each is a task of its own."""

    def grid_ended(self, grid: Grid) -> None:
        """All programs have ended without an error, and the launch returns or is settled."""

    def followed(self) -> None:
        """The program has waited for the kernel before its own."""

    def let_next_start(self) -> None:
        """The program lets the next kernel's programs start."""

    # --- host code, streams, rendezvous ------------------------------------------------------------------------------

    def host(self, rank: int) -> AbstractContextManager[object]:
        """Scope of a rank's host code."""
        return nullcontext()

    def fork(self, stream: str) -> None:
        """Work enqueued on the calling rank's side stream from now on comes after its main stream's work so far."""

    def joined(self, stream: str) -> None:
        """The calling rank's main stream has waited for its side stream."""

    def enqueued(self, stream: str, label: str, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """The calling rank enqueues an operation on a side stream. Returns a function that the operation calls first."""
        return _nothing

    def copied(self, target: int, source: int, nbytes: int, itemsize: int, is_signal: bool) -> None:
        """A stream's operation is about to copy bytes. ``is_signal``: after all earlier operations of the stream."""

    def synchronized(self, rank: int) -> None:
        """The rank's host code has waited for all its streams."""

    def rendezvous_entered(self, rendezvous: str, rank: int, streams: bool) -> None:
        """Host code (with ``streams``: the main stream) arrives at a rendezvous, named uniquely."""

    def rendezvous_left(self, rendezvous: str, rank: int) -> None:
        """All members have arrived, and this one goes on."""

"""Events of a machine, for a check. Without one they go to an ``Observer``, which does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from weft.simulator.interpreter import CodeLine
from weft.simulator.machine.grids import Grid, Program
from weft.simulator.machine.stores import Landed
from weft.simulator.places import Order, Places


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTile:
    """Tile of a ``weft.tiles.TileMap``, as a program's functions describe it.

    number, owner, row, rows, column  as in ``weft.tiles.Tile``
    rows_of_owner  rows of each rank; 0 where ``row`` is no row of the owner
    chunk_rows     rows of a chunk; 0 without chunks
    covers         rows that tiles cover; 0 if unknown
    """

    number: int
    owner: int
    row: int
    rows: int
    column: int
    rows_of_owner: int
    chunk_rows: int
    covers: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMark:
    """Tile of weft.tiles that a program begins to compute. Addresses and sizes are 0 without a tensor.

    number, owner, row, rows  as in ``weft.tiles.Tile``
    columns                   first column of the result, and the one after the last
    out, row_bytes            the result, with the bytes of a row
    own                       this rank's shard
    gathered, gathered_row_bytes, panel_rows, chunk_rows  all ranks' panels of rows
    chunks                    chunks of the owner that the program has waited for
    """

    number: int
    owner: int
    row: int
    rows: int
    columns: tuple[int, int]
    out: int
    row_bytes: int
    own: int
    gathered: int
    gathered_row_bytes: int
    panel_rows: int
    chunk_rows: int
    chunks: int
    world_size: int


class Observer:
    """Receiver of a machine's events.

    "The program" is the task that runs when the method is called. Addresses are of bytes, without the number of their tensor,
    and in known extents; ``itemsize`` is in bytes; bits are unsigned integers of that size. The arrays of one event have one
    shape.
    """

    # --- accesses of kernels -----------------------------------------------------------------------------------------

    def load(self, places: Places, how: str, bits: np.ndarray) -> None:
        """Load that the program has made: "plain", "volatile", "tma" or "lamport"."""

    def store(self, places: Places, how: str, bits: np.ndarray) -> Landed:
        """Store that the program begins: "plain", "tma" or "lamport".

        Returns a function to call just before its bits are in memory.
        """

    def notified(self, address: int, bits: int, itemsize: int) -> Landed:
        """Release store of one thread at system scope that the program begins. Returns as ``store``."""

    def atomic(self, op: str, addresses: np.ndarray, old: np.ndarray, new: np.ndarray, order: Order) -> None:
        """Atomic that has taken effect on these elements (one-dimensional arrays)."""

    def reduced(self, op: str, addresses: np.ndarray, new: np.ndarray, scope: str) -> None:
        """Reduction of a descriptor that has taken effect on these elements (one-dimensional arrays)."""

    def copies(self, target: Places, source: Places, bits: np.ndarray, what: str) -> Landed:
        """Copy that the program begins: "put", "get" or "put_signal". Returns as ``store``."""

    def completed(self) -> None:
        """Start of the program's wait for all its copies."""

    def barrier(self) -> None:
        """CTA barrier of the program."""

    def drain(self, by_all: bool) -> None:
        """Arrival of the program's tensor-descriptor stores. ``by_all``: all threads have waited for them."""

    def fence(self, scope: str) -> None:
        """Fence at system scope in every thread of the program."""

    def fence_proxy(self) -> None:
        """Proxy fence, after which the program's descriptor loads see what it sees."""

    # --- spans of a timeline -----------------------------------------------------------------------------------------

    def computed(self, operations: int) -> None:
        """Matrix product of the program with this number of multiplications and additions."""

    def began(self) -> int:
        """Start of a span of the program. Returns a number below 2**31 for ``recorded``."""
        return 0

    def recorded(self, kind: str, began: int, address: int, peer: int, value: int) -> None:
        """End of a span that began at ``began``: "put" or "tile", as in ``lowering/tracing.py``."""

    def names_words(self, address: int) -> None:
        """Name of the exchange of the program's next Lamport load: the address of its puts in ``recorded``."""

    # --- epochs ------------------------------------------------------------------------------------------------------

    def epoch_began(self, address: int, itemsize: int) -> None:
        """Look of the program at the number of an epoch that begins, the word at ``address`` and one."""

    def epoch_ended(self, address: int, itemsize: int) -> None:
        """End of the program's part of that epoch."""

    # --- waits and deadlocks -----------------------------------------------------------------------------------------

    def waits(self, addresses: list[int], itemsize: int, wanted: int, comparison: str) -> None:
        """Start of a wait until one of the signals is ">=", "==" or "!=" ``wanted``."""

    def waited(self, addresses: list[int], index: int, itemsize: int, wanted: int, comparison: str) -> None:
        """End of a wait by signal ``index``, with acquire order for that one alone."""

    def waits_for_data(self, address: int) -> None:
        """Start of a wait for Lamport elements, the first one at ``address``."""

    def spins(self, address: int, line: CodeLine | None) -> None:
        """Pause of a program that repeats itself until memory changes; ``line`` reads ``address``."""

    def deadlocked(self, unstarted: list[Grid], tasks: list[str]) -> list[str]:
        """End of a run in which no task can go on. Returns further lines for the error.

        ``tasks``: descriptions of the waiting ones.
        """
        return []

    def note_named(self, who: str) -> None:
        """Message that names the program's present access by ``who``."""

    # --- tiles -------------------------------------------------------------------------------------------------------

    def tile_mapped(self, tile: MappedTile) -> None:
        """Tile that the program looks at, perhaps not for the first time."""

    def tile_began(self, tile: TileMark) -> None:
        """Start of the program's work at a tile."""

    def tile_ended(self) -> None:
        """End of it."""

    # --- kernels -----------------------------------------------------------------------------------------------------

    def launch(self, grid: Grid) -> None:
        """Launch of a kernel by its rank's host code, before its programs start."""

    def program_started(self, program: Program) -> None:
        """Start of a program, which is about to become ready."""

    def program_ended(self, program: Program) -> None:
        """End of a program, whose stores have arrived unless each is a separate task."""

    def grid_ended(self, grid: Grid) -> None:
        """End of a kernel without an error, as its launch returns or is settled."""

    def followed(self) -> None:
        """End of the program's wait for the previous kernel."""

    def let_next_start(self) -> None:
        """Permission by the program for the next kernel's programs to start."""

    # --- host code, streams, rendezvous ------------------------------------------------------------------------------

    def host(self, rank: int) -> AbstractContextManager[object]:
        """Scope of a rank's host code."""
        return nullcontext()

    def host_place(self) -> object:
        """Place of the calling host code, for ``disagreed``."""

    def disagreed(self, text: str, first: int, place: object, rank: int) -> None:
        """Collective call of ``rank`` that differs from that of rank ``first`` at ``place``."""

    def fork(self, stream: str) -> None:
        """Order of the calling rank's side stream after its main stream's work so far."""

    def joined(self, stream: str) -> None:
        """End of the wait of the calling rank's main stream for its side stream."""

    def enqueued(self, stream: str, label: str, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Operation put on a side stream of the calling rank. Returns a function that it calls first."""
        return _nothing

    def copied(self, target: int, source: int, nbytes: int, itemsize: int, is_signal: bool) -> None:
        """Bytes about to be copied by a side stream. ``is_signal``: after all its earlier work."""

    def published(self) -> object:
        """Knowledge of the calling task at this point, for ``learned`` in another."""

    def learned(self, known: object) -> None:
        """Order of the calling task after what was ``published``, at the end of a wait for it."""

    def issued(self) -> None:
        """Operation of the calling rank's main stream that its host code is about to issue."""

    def host_waited(self, rank: int) -> None:
        """End of the wait of a rank's host code for its main stream."""

    def synchronized(self, rank: int) -> None:
        """End of the wait of a rank's host code for all its streams."""

    def rendezvous_entered(self, rendezvous: str, rank: int, streams: bool) -> None:
        """Arrival of host code (``streams``: of the main stream) at a rendezvous, named uniquely."""

    def rendezvous_left(self, rendezvous: str, rank: int) -> None:
        """Departure of a member from a rendezvous at which all have arrived."""

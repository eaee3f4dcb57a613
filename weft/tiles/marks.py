"""Marks in kernels that tell a check which tile a program computes. They compile to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from weft.simulator.intrinsics import simulated

if TYPE_CHECKING:
    from weft.simulator.machine.machine import Machine


class Arrived(NamedTuple):
    """Rows of all ranks that a body may load: of the tile's owner the first ``chunks`` chunks.

    data  pointer to the panels, of panel_rows rows each in chunks of chunk_rows; None, and the rest 0: there are none
    """

    data: tl.tensor
    chunk_rows: tl.tensor
    panel_rows: tl.tensor
    chunks: tl.tensor


@triton.jit
def maps_tile(tile, rows_of_owner, chunk_rows, covers, world):
    """Mark a tile of a ``TileMap``.

    rows_of_owner and chunk_rows are 0 where ``tile.row`` is no row of the owner, or there are no chunks.
    """


@triton.jit
def begins_tile(tile, out, own, arrived, geometry, world, COLUMNS):
    """Mark the start of a body.

    It stores to the tile's part of ``out``, and loads rows of ``own``, this rank's shard, or rows that have ``arrived``.
    None: there is no such tensor.
    """


@triton.jit
def ends_tile():
    """Mark the end of a body."""


@simulated(maps_tile)
def _maps_tile(
    machine: Machine, tile: NamedTuple, rows_of_owner: object, chunk_rows: object, covers: object, world: object
) -> None:
    from weft.simulator.observer import MappedTile

    fields = {name: _int(getattr(tile, name)) for name in ("number", "owner", "row", "rows", "column")}
    sizes = {"rows_of_owner": rows_of_owner, "chunk_rows": chunk_rows, "covers": covers, "world_size": world}
    machine.observer.tile_mapped(MappedTile(**fields, **{name: _int(size) for name, size in sizes.items()}))


@simulated(begins_tile)
def _begins_tile(
    machine: Machine, tile: NamedTuple, out: tl.tensor | None, own: tl.tensor | None, arrived: Arrived, geometry: NamedTuple,
    world: object, COLUMNS: object,
) -> None:  # fmt: skip
    from weft.simulator.observer import TileMark

    N, K, columns, column = (_int(value) for value in (geometry.N, geometry.K, COLUMNS, tile.column))
    sizes = {name: getattr(arrived, name) for name in ("panel_rows", "chunk_rows", "chunks")} | {"world_size": world}
    machine.observer.tile_began(
        TileMark(
            **{name: _int(getattr(tile, name)) for name in ("number", "owner", "row", "rows")},
            columns=(column * columns, min((column + 1) * columns, N)),
            out=_address(out),
            row_bytes=N * _itemsize(out),
            own=_address(own),
            gathered=_address(arrived.data),
            gathered_row_bytes=K * _itemsize(arrived.data),
            **{name: _int(size) for name, size in sizes.items()},
        )
    )


@simulated(ends_tile)
def _ends_tile(machine: Machine) -> None:
    machine.observer.tile_ended()


def _int(value: object) -> int:
    from weft.simulator import interpreter as interp

    return int(interp.value_of(value))


def _itemsize(pointer: tl.tensor | None) -> int:
    from weft.simulator import interpreter as interp

    return 0 if pointer is None else (interp.element_dtype(pointer).primitive_bitwidth + 7) // 8


def _address(pointer: tl.tensor | None) -> int:
    """Address in a pointer; 0 for None."""
    from weft.simulator import interpreter as interp
    from weft.simulator.machine.pointers import ADDRESS

    return 0 if pointer is None else int(interp.addresses_of(pointer)[0]) & ADDRESS

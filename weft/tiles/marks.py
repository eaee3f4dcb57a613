"""Marks in kernels that tell a check which tile a program computes. They compile to nothing."""

from __future__ import annotations

from typing import Any

import triton

from weft.simulator.intrinsics import simulated


@triton.jit
def maps_tile(number, owner, row, rows, rows_of_rank, covers, world):
    """Mark a tile of a ``TileMap`` with its owner and rows."""


@triton.jit
def begins_tile(tile, out, gathered, geometry, chunk_rows, panel_rows, world, COLUMNS):
    """Mark the start of a body.

    It stores to the tile's part of ``out``, and loads rows of ``gathered`` that have arrived. None: there is no such tensor.
    """


@triton.jit
def ends_tile():
    """Mark the end of a body."""


@simulated(maps_tile)
def _maps_tile(
    machine: Any, number: Any, owner: Any, row: Any, rows: Any, rows_of_rank: Any, covers: Any, world: Any
) -> None:
    machine.observer.tile_mapped(*map(_int, (number, owner, row, rows, rows_of_rank, covers, world)))


@simulated(begins_tile)
def _begins_tile(
    machine: Any, tile: Any, out: Any, gathered: Any, geometry: Any, chunk_rows: Any, panel_rows: Any, world: Any,
    COLUMNS: Any,
) -> None:  # fmt: skip
    from weft.simulator.observer import TileMark

    rows, N, K = _int(geometry.rows), _int(geometry.N), _int(geometry.K)
    columns, column = _int(COLUMNS), _int(tile.column)
    machine.observer.tile_began(
        TileMark(
            number=_int(tile.number),
            owner=_int(tile.owner),
            row=_int(tile.row),
            owner_row=_int(tile.owner_row),
            rows=_int(tile.rows),
            columns=(column * columns, min((column + 1) * columns, N)),
            out=_place(machine, out),
            row_bytes=N * _itemsize(out),
            gathered=_place(machine, gathered),
            gathered_row_bytes=K * _itemsize(gathered),
            rows_of_rank=rows,
            chunk_rows=_int(chunk_rows),
            panel_rows=_int(panel_rows),
            world_size=_int(world),
        )
    )


@simulated(ends_tile)
def _ends_tile(machine: Any) -> None:
    machine.observer.tile_ended()


def _int(value: Any) -> int:
    from weft.simulator import interpreter as interp

    return int(interp.value_of(value))


def _itemsize(pointer: Any) -> int:
    from weft.simulator import interpreter as interp

    return 0 if pointer is None else (interp.element_dtype(pointer).primitive_bitwidth + 7) // 8


def _place(machine: Any, pointer: Any) -> int:
    """Address behind a pointer; 0 for None."""
    from weft.simulator import interpreter as interp
    from weft.simulator.machine.pointers import ADDRESS

    return 0 if pointer is None else int(interp.addresses_of(pointer)[0]) & ADDRESS

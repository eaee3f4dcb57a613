"""Marks in kernels that tell a check which tile a program computes. They compile to nothing."""

from __future__ import annotations

from typing import Any

import triton

from weft.simulator.intrinsics import simulated


@triton.jit
def maps_tile(tile, rows_of_owner, chunk_rows, covers, world):
    """Mark a tile of a ``TileMap``.

    rows_of_owner and chunk_rows are 0 where ``tile.row`` is no row of the owner, or there are no chunks.
    """


@triton.jit
def begins_tile(tile, out, own, gathered, geometry, chunk_rows, panel_rows, chunks, world, COLUMNS):
    """Mark the start of a body.

    It stores to the tile's part of ``out``, and loads rows of ``own``, this rank's shard, or of ``gathered``, of the owner's
    first ``chunks`` chunks. None: there is no such tensor.
    """


@triton.jit
def ends_tile():
    """Mark the end of a body."""


@simulated(maps_tile)
def _maps_tile(machine: Any, tile: Any, rows_of_owner: Any, chunk_rows: Any, covers: Any, world: Any) -> None:
    from weft.simulator.observer import MappedTile

    fields = {name: _int(getattr(tile, name)) for name in ("number", "owner", "row", "rows", "column")}
    sizes = {"rows_of_owner": rows_of_owner, "chunk_rows": chunk_rows, "covers": covers, "world_size": world}
    machine.observer.tile_mapped(MappedTile(**fields, **{name: _int(size) for name, size in sizes.items()}))


@simulated(begins_tile)
def _begins_tile(
    machine: Any, tile: Any, out: Any, own: Any, gathered: Any, geometry: Any, chunk_rows: Any, panel_rows: Any, chunks: Any,
    world: Any, COLUMNS: Any,
) -> None:  # fmt: skip
    from weft.simulator.observer import TileMark

    N, K, columns, column = (_int(value) for value in (geometry.N, geometry.K, COLUMNS, tile.column))
    sizes = {"panel_rows": panel_rows, "chunk_rows": chunk_rows, "chunks": chunks, "world_size": world}
    machine.observer.tile_began(
        TileMark(
            **{name: _int(getattr(tile, name)) for name in ("number", "owner", "row", "rows")},
            columns=(column * columns, min((column + 1) * columns, N)),
            out=_address(out),
            row_bytes=N * _itemsize(out),
            own=_address(own),
            gathered=_address(gathered),
            gathered_row_bytes=K * _itemsize(gathered),
            **{name: _int(size) for name, size in sizes.items()},
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


def _address(pointer: Any) -> int:
    """Address behind a pointer; 0 for None."""
    from weft.simulator import interpreter as interp
    from weft.simulator.machine.pointers import ADDRESS

    return 0 if pointer is None else int(interp.addresses_of(pointer)[0]) & ADDRESS

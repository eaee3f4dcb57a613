"""Findings about tiles of weft.tiles: what a body loads and stores, and what a map says."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from weft.check.detector.races import Races, elements_at
from weft.check.detector.thread_clocks import Access, ThreadClock
from weft.simulator.machine.grids import Grid
from weft.simulator.observer import MappedTile, TileMark


@dataclass(slots=True)
class _Body:
    """Work of a program: its present tile, and the chunks (rank, number) that it has waited for."""

    tile: TileMark | None = None
    chunks: set[tuple[int, int]] = field(default_factory=set)


_NONE = _Body()


class Tiles:
    """Tiles of a run. Each rank's n-th kernel with a map is the same call."""

    def __init__(self, races: Races) -> None:
        self._races = races
        self._bodies: WeakKeyDictionary[ThreadClock, _Body] = WeakKeyDictionary()
        self._calls: dict[int, list[Grid]] = {}  # by rank: its grids with a map
        self._maps: dict[Grid, dict[int, MappedTile]] = {}
        self._owners: dict[tuple[int, int], dict[int, int]] = {}  # (call, number) -> rank -> owner

    # --- maps --------------------------------------------------------------------------------------------------------

    def mapped(self, thread: ThreadClock, grid: Grid, tile: MappedTile) -> None:
        """Check a tile that a map describes, once in a grid."""
        seen = self._maps.get(grid)
        if seen is None:
            seen = self._maps[grid] = {}
            self._calls.setdefault(grid.rank, []).append(grid)
        if tile.number in seen:
            return
        seen[tile.number] = tile
        if tile.rows <= 0:
            return
        name, m = f"tile {tile.number}", tile.rows_of_owner
        if not 0 <= tile.owner < tile.world_size:
            self._report("tile-owner", f"{name} belongs to rank {tile.owner}, and no rank computes it", thread)
        elif m and not m * tile.owner <= tile.row <= tile.row + tile.rows <= m * (tile.owner + 1):
            chunk = f", chunk {tile.row % m // tile.chunk_rows}, for which it does not wait" if tile.chunk_rows else ""
            text = (
                f"{name} belongs to rank {tile.owner}, but its rows {tile.row} .. {tile.row + tile.rows - 1} begin with "
                f"rows of rank {tile.row // m}{chunk}"
            )
            self._report("tile-owner", text, thread)
        owners = self._owners.setdefault((len(self._calls[grid.rank]) - 1, tile.number), {})
        owners[grid.rank] = tile.owner
        if len(set(owners.values())) > 1:
            said = ", ".join(f"rank {owner} as rank {rank} has it" for rank, owner in sorted(owners.items()))
            self._report("tile-owner", f"{name} belongs to {said}: one waits for a part that no rank sends", thread)

    def grid_ended(self, grid: Grid, thread: ThreadClock) -> None:
        """Look for rows of an ended kernel's map that belong to no tile, or to two."""
        mapped = self._maps.pop(grid, {})
        covers = next((tile.covers for tile in mapped.values()), 0)
        by_column: dict[int, list[MappedTile]] = {}
        for tile in mapped.values():
            if tile.rows > 0 and covers:
                by_column.setdefault(tile.column, []).append(tile)
        for column, tiles in by_column.items():
            end, last = 0, None
            for tile in sorted(tiles, key=lambda tile: tile.row):
                if tile.row > end:
                    self._hole(thread, column, end, tile.row, last)
                elif tile.row < end and last is not None:
                    text = f"row {tile.row} of column tile {column} belongs to the tiles {last} and {tile.number}"
                    self._report("tile-map", text, thread)
                end, last = max(end, tile.row + tile.rows), tile.number
            if end < covers:
                self._hole(thread, column, end, covers, last)

    def _hole(self, thread: ThreadClock, column: int, begin: int, end: int, last: int | None) -> None:
        where = "at its start" if last is None else f"after tile {last}"
        text = f"rows {begin} .. {end - 1} of column tile {column} belong to no tile: the map has a hole {where}"
        self._report("tile-map", text, thread)

    # --- bodies ------------------------------------------------------------------------------------------------------

    def began(self, thread: ThreadClock, tile: TileMark) -> None:
        body = self._bodies.setdefault(thread, _Body())
        body.tile = tile
        body.chunks.update((tile.owner, chunk) for chunk in range(tile.chunks))

    def ended(self, thread: ThreadClock) -> None:
        self._bodies[thread].tile = None

    def loads(self, access: Access, addresses: np.ndarray) -> bool:
        """True, and a finding, if a body loads gathered rows for which the program has not waited."""
        body = self._bodies.get(access.thread, _NONE)
        tile = body.tile
        if tile is None or not tile.gathered:
            return False
        extent = self._races.memory.find(tile.gathered)
        inside = (addresses >= extent.base) & (addresses < extent.base + extent.size)
        offsets = addresses[inside].astype(np.int64) - tile.gathered
        for row in np.unique(offsets // tile.gathered_row_bytes).tolist():
            source, at = divmod(row, tile.panel_rows)
            chunk = at // tile.chunk_rows
            if (source, chunk) not in body.chunks:
                what = f"row {at} of rank {source}, in chunk {chunk}, for which no wait comes before it"
                if not 0 <= source < tile.world_size:
                    what = "a row that no rank has"
                elif source == access.thread.rank:
                    what = f"row {at} of this rank among the gathered rows, and not from shard"
                text = f"body of tile {tile.number} loads {what}: the tile needs rows of {_chunks(tile)}"
                self._found("tile-read", text, access, addresses, tile.gathered)
                return True
        return False

    def left_rows(self, thread: ThreadClock, tensor: str, rank: int) -> str:
        """Message for a body's access outside of ``tensor``, from which it loads rows; or ""."""
        tile = self._bodies.get(thread, _NONE).tile
        for address in (tile.own, tile.gathered) if tile is not None else ():
            extent = self._races.memory.find(address) if address else None
            if extent is not None and (extent.name, extent.rank) == (tensor, rank):
                return (
                    f"body of tile {tile.number} loads a row that no rank has: the tile needs rows of {_chunks(tile)}"
                )
        return ""

    def stores(self, access: Access, addresses: np.ndarray, itemsize: int) -> bool:
        """True, and a finding, if a body stores to the result outside its tile."""
        tile = self._bodies.get(access.thread, _NONE).tile
        if tile is None or not tile.out:
            return False
        extent = self._races.memory.find(tile.out)
        if extent is None:
            return False
        offsets = addresses.astype(np.int64) - tile.out
        offsets = offsets[(addresses >= extent.base) & (addresses < extent.base + extent.size)]
        rows, columns = offsets // tile.row_bytes, offsets % tile.row_bytes // itemsize
        first, end = tile.columns
        outside = (rows < tile.row) | (rows >= tile.row + tile.rows) | (columns < first) | (columns >= end)
        if not outside.any():
            return False
        at = int(outside.argmax())
        text = (
            f"body of tile {tile.number} stores row {int(rows[at])}, column {int(columns[at])} of the result, outside its rows "
            f"{tile.row} .. {tile.row + tile.rows - 1} and columns {first} .. {end - 1}"
        )
        self._found("tile-store", text, access, addresses, tile.out)
        return True

    # --- findings ----------------------------------------------------------------------------------------------------

    def _found(self, kind: str, text: str, access: Access, addresses: np.ndarray, base: int) -> None:
        extent = self._races.memory.find(base)
        elements = elements_at(extent, int(addresses.min()), int(addresses.max()))
        self._races.report(kind, text, (access,), elements)

    def _report(self, kind: str, text: str, thread: ThreadClock) -> None:
        """Report a map's error, one of each kind: the verb is the finding's identity."""
        self._races.report(kind, text, (Access.of(thread, "map of tiles"),))


def _chunks(tile: TileMark) -> str:
    """Chunks for which the program has waited before a tile of a peer; of this rank's own there are none."""
    chunks = {0: "", 1: ", chunk 0"}.get(tile.chunks, f", chunks 0 .. {tile.chunks - 1}")
    return f"rank {tile.owner}{chunks}"

"""Tile schedule of the GEMM kernels: the order of the output tiles, and the chunk and signal of each.

Each tile of the output has a number, the same on every rank. They are numbered panel by panel, in a panel chunk by
chunk, in a chunk in groups of tile rows: the rows of A and B in the L2 are reused before the next are read, and no group
straddles a chunk, so that no tile waits for rows it does not need.

    panel    rows that belong to one rank (a shard of A, a block of the scattered C); one panel of all rows otherwise
    chunk    tile rows of a panel that arrive under one signal
    owner    rank o owns the tiles o*T//W .. (o+1)*T//W - 1 of all T: its panel where panels are W, else an even share

A rank's order is a rotation of the numbers, from the next rank's first tile on: the peers' tiles come first, own tiles
last. Program p of P takes places p, p + P, p + 2 P … of the order. So no two ranks send to one peer at once, and no two
wait for one.

      order of rank 1 of 4   | 2 2 | 3 3 | 0 0 | 1 1 |     the owners of its tiles

Tiles that do not fill the last round of programs would leave most programs idle for as long as a whole tile takes: 400
tiles on 132 SMs are 3.03 rounds and cost 4. So the places from ``whole`` on are *split* along K, each over several programs
that leave split-K partials in scratch memory. The last program to arrive at a tile adds all partials up, in an
order that does not depend on which one is last.

      programs   | whole | whole | whole | 1/4 |       16 of 132 in the last round, 400 tiles, whole = 396

Panels of equal size are located by arithmetic. A schedule of other panels is data: a table with a row for each tile
(``tile_table``), which ``look_up`` reads.

The functions are plain integer arithmetic: kernels call them, and the host runs the same source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.runtime.arithmetic import cdiv

# Most programs that share a split tile. Adding one partial takes about 1.5 µs on H200 (128 x 256), and 33 take
# longer than the idle round that they save.
MAX_PARTIALS = tl.constexpr(4)


class Tiles(NamedTuple):
    """The tiles of one GEMM's output, passed to kernels as the argument ``tiles``.

    count    of all panels
    rows     of tiles in a panel
    columns  of tiles
    chunk    rows of tiles in a chunk; the last chunk of a panel may have fewer
    group    rows of tiles in a group; the last group of a chunk may have fewer
    whole    places whose tiles are not split along K, the first ones of the order
    """

    count: int
    rows: int
    columns: int
    chunk: int
    group: int
    whole: int


def make_tiles(
    rows: int, columns: int, *, panels: int, block_m: int, block_n: int, group: int, chunks: int = 1
) -> Tiles:
    """Tiles of block_m x block_n over ``panels`` panels of ``rows`` rows and ``columns`` columns."""
    tile_rows, tile_columns = cdiv(rows, block_m), cdiv(columns, block_n)
    return Tiles(
        count=panels * tile_rows * tile_columns,
        rows=tile_rows,
        columns=tile_columns,
        chunk=cdiv(tile_rows, chunks),
        group=group,
        whole=panels * tile_rows * tile_columns,
    )


def tile_table(panels: Sequence[int], columns: int, *, block_m: int, block_n: int, group: int) -> torch.Tensor:
    """Schedule as data, int32 [tiles, 4] on the CPU: owner, first row, row limit, tile column per tile.

    Panel p has ``panels[p]`` rows, perhaps none, after the rows of earlier panels; its owner is p. Rows of a tile from the
    limit on belong to the next panel.
    """
    entries: list[tuple[int, ...]] = []
    begin = 0
    for owner, rows in enumerate(panels):
        tiles = make_tiles(rows, columns, panels=1, block_m=block_m, block_n=block_n, group=group)
        for tile in range(tiles.count):
            *_, row, column = locate.fn(tile, tiles)
            entries.append((owner, begin + row * block_m, begin + rows, column))
        begin += rows
    return torch.tensor(entries, dtype=torch.int32).view(-1, 4)


def as_argument(tiles: Tiles) -> Tiles:
    """Kernel argument for ``tiles``, encoded as odd numbers above 1.

    Triton compiles another kernel for an integer that is 1 or a multiple of 16; one kernel is to serve all shapes.
    """
    return Tiles(*(2 * field + 3 for field in tiles))


@triton.jit
def from_argument(tiles):
    """The inverse of ``as_argument``."""
    return Tiles(
        (tiles.count - 3) // 2,
        (tiles.rows - 3) // 2,
        (tiles.columns - 3) // 2,
        (tiles.chunk - 3) // 2,
        (tiles.group - 3) // 2,
        (tiles.whole - 3) // 2,
    )


@triton.jit
def locate(tile, tiles):
    """(panel, chunk, row, column) of the tile with this number."""
    of_panel = tiles.rows * tiles.columns
    panel = tile // of_panel
    tile = tile % of_panel
    of_chunk = tiles.chunk * tiles.columns
    chunk = tile // of_chunk
    tile = tile % of_chunk
    of_group = tiles.group * tiles.columns
    first_row = tile // of_group * tiles.group
    tile = tile % of_group
    # Rows left in the panel, in the chunk, in the group: the last of each may be short.
    height = min(min(tiles.rows - chunk * tiles.chunk, tiles.chunk) - first_row, tiles.group)
    return panel, chunk, chunk * tiles.chunk + first_row + tile % height, tile // height


@triton.jit
def look_up(tile, table):
    """(owner, first row, row limit, tile column) of the tile with this number in a ``tile_table``."""
    entry = table + tile.to(tl.int64) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def first_tile(owner, tiles, world):
    """First tile number that ``owner`` owns; for ``owner == world`` the number of tiles."""
    return owner * tiles.count // world


@triton.jit
def owner_of(tile, tiles, world):
    """Rank that owns the tile with this number: the inverse of ``first_tile``."""
    return ((tile + 1) * world - 1) // tiles.count


@triton.jit
def at_place(place, start, tiles):
    """Number of the tile at ``place`` (0 .. count - 1) of the order that begins at ``start``."""
    return (start + place) % tiles.count


@triton.jit
def buffer_of(source, owner, world):
    """Index of ``source``'s receive buffer at ``owner``: buffer d of W - 1 is for rank owner + 1 + d."""
    return (source + world - owner - 1) % world


@triton.jit
def place_of(owner, rank, world, local_first: tl.constexpr):
    """Index of ``owner``'s row block at ``rank``: in rank order, or rotated, the own block first."""
    return (owner + world - rank) % world if local_first else owner


def whole_places(count: int, programs: int) -> int:
    """Number of ``count`` places whose tiles are not split along K.

    Every program has at most one partial tile, so a round that is more than half full is not split: programs with two would
    keep each other waiting (H200, 56 tiles of 128 x 256 x 6400 on 132 programs: 15 µs slower than not splitting).
    """
    rest = count % programs
    return count - rest if 2 * rest <= programs else count


@triton.jit
def partials_of(tiles, depth):
    """Number of programs that share each split tile. ``depth``: steps along K of a tile."""
    split = tl.maximum(tiles.count - tiles.whole, 1)
    return tl.minimum(tl.minimum(tl.num_programs(0) // split, depth), MAX_PARTIALS)


@triton.jit
def wholes_of(whole):
    """Number of whole tiles of this program."""
    programs = tl.num_programs(0)
    return (tl.maximum(whole - tl.program_id(0), 0) + programs - 1) // programs


@triton.jit
def work_steps(tiles, depth):
    """Number of pieces of work of this program: its whole tiles, then perhaps its share of a split one."""
    partials = partials_of(tiles, depth)
    return wholes_of(tiles.whole) + tl.where(tl.program_id(0) < (tiles.count - tiles.whole) * partials, 1, 0)


@triton.jit
def work_at(step, tiles, depth):
    """Piece of work ``step`` of this program: (place, first step along K, the step after its last one)."""
    program = tl.program_id(0)
    partials = partials_of(tiles, depth)
    part = program % partials
    split = step >= wholes_of(tiles.whole)
    place = tl.where(split, tiles.whole + program // partials, program + step * tl.num_programs(0))
    first = tl.where(split, part * depth // partials, 0)
    last = tl.where(split, (part + 1) * depth // partials, depth)
    return place, first, last


@triton.jit
def contributors(place, tiles, depth):
    """The programs that share the split tile at ``place``: the first, and the one after the last."""
    partials = partials_of(tiles, depth)
    return (place - tiles.whole) * partials, (place - tiles.whole + 1) * partials

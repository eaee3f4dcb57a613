"""Tiles as bodies get them, and the map from a tile's number to its owner and rows.

The default map is affine: panels of equal size in rank order, cut into tiles (weft.kernels.tile_schedule). Another map is a
pair of ``@triton.jit`` functions of the number, or an int32 table with a row for each tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.arguments import check_bool, check_instance, check_int, check_optional, quoted
from weft.kernels.tile_schedule import first_tile, locate, look_up
from weft.tiles import marks
from weft.triton_api import JITFunction

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class Tile(NamedTuple):
    """One output tile, an argument of bodies.

    number     in 0 .. tiles - 1, the same on all ranks
    owner      rank whose rows it needs (gather), or that gets it (scatter, exchange)
    row        its first row, counted over all ranks
    owner_row  the same row, counted from the owner's first one
    rows       rows of the tile, at most ROWS: mask the rest
    column     column tile: columns column * COLUMNS .. of the result
    share      in 0 .. shares - 1, of the tile's sum: this program's (``ExchangePlan.split``); 0 of 1 for a whole tile
    """

    number: tl.tensor
    owner: tl.tensor
    row: tl.tensor
    owner_row: tl.tensor
    rows: tl.tensor
    column: tl.tensor
    share: tl.tensor = 0
    shares: tl.constexpr = 1


class Shard(NamedTuple):
    """Rows of a tile's owner, where they are by now: an argument of a gather's body.

    data   pointer to the owner's first row, or a tensor descriptor (``GatherPlan.step``)
    first  the owner's first row in the descriptor; 0 with a pointer
    """

    data: tl.tensor
    first: tl.tensor


class Matrices(NamedTuple):
    """Up to two tensors or tensor descriptors that a body gets after its operands; None: not given."""

    first: tl.tensor
    second: tl.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMap:
    """Map of tiles to owners and rows, in place of the affine map.

    owner_of  ``@triton.jit`` function (number, operands) -> rank
    rows_of   ``@triton.jit`` function (number, operands) -> (row, rows, column); 0 rows for a number without a tile
    tiles     number of tiles
    covers    rows 0 .. covers - 1 belong to tiles, each to one, as a check verifies; None: the host does not know
    positions rows are positions in a list that the body looks up, not rows of their owner: a tile then waits for all of the
              owner's rows
    table     int32 [tiles, 4] that the two functions get in place of operands

    Both functions give the same on all ranks. ``row`` is counted over all ranks. ``TileMap.of`` makes the map of a table.
    """

    owner_of: JITFunction
    rows_of: JITFunction
    tiles: int
    covers: int | None = None
    positions: bool = False
    table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("owner_of", "rows_of"):
            check_body(name, getattr(self, name))
        check_int("tiles", self.tiles, 1)
        check_optional(check_int, "covers", self.covers, 1)
        check_bool("positions", self.positions)

    @classmethod
    def of(cls, table: torch.Tensor, covers: int | None = None, positions: bool = False) -> TileMap:
        """Map of a table, int32 [tiles, 4]: owner, first row, the row after the last, column tile.

        ``weft.kernels.tile_schedule.tile_table`` makes one for panels of different sizes; a kernel may fill one, and leave
        entries whose rows are empty.
        """
        check_instance("table", table, torch.Tensor, "an int32 tensor [tiles, 4]")
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[1] != 4 or not table.is_contiguous():
            raise ValueError(
                f"table has shape {tuple(table.shape)} and dtype {table.dtype}; pass a contiguous int32 tensor [tiles, 4]"
            )
        return cls(
            owner_of=table_owner, rows_of=table_rows, tiles=len(table), covers=covers, positions=positions, table=table
        )


@triton.jit
def table_owner(number, table):
    """``TileMap.owner_of`` of a table."""
    owner, row, limit, column = look_up(number, table)
    return owner


@triton.jit
def table_rows(number, table):
    """``TileMap.rows_of`` of a table."""
    owner, row, limit, column = look_up(number, table)
    return row, limit - row, column


class Geometry(NamedTuple):
    """Sizes of a call, passed to kernels as the argument ``geometry``.

    rows    of each rank
    N       columns of the result
    K       elements of a gathered row; 0 in an exchange
    count   tiles of all ranks
    covers  ``TileMap.covers``, or 0
    slots   tiles that a receive buffer holds; 0 in a gather
    """

    rows: tl.tensor
    N: tl.tensor
    K: tl.tensor
    count: tl.tensor
    covers: tl.tensor
    slots: tl.tensor


@triton.jit
def numbers_for(target, tiles, count, world, MAPPED: tl.constexpr):
    """This program's first number of a tile of rank ``target``, and the limit.

    Program p of P computes the numbers p, p + P, p + 2 P, … in all. ``tile_of`` skips tiles of other ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if MAPPED:
        return program, count
    else:
        begin = first_tile(target, tiles, world)
        return begin + (program + programs - begin % programs) % programs, first_tile(target + 1, tiles, world)


@triton.jit
def tile_of(
    number, target, about, geometry, tiles, chunk_rows, world,
    ROWS: tl.constexpr, OWNER_OF: tl.constexpr, ROWS_OF: tl.constexpr, PLACED: tl.constexpr, share=0, SHARES: tl.constexpr = 1,
):  # fmt: skip
    """``Tile`` with this number; it has 0 rows if its owner is not ``target``.

    PLACED: the rows of a map are rows of their owner. share, SHARES: of the tile's sum
    """
    if OWNER_OF is None:
        panel, chunk, tile_row, column = locate(number, tiles)
        row = tile_row * ROWS
        rows = tl.minimum(geometry.rows - row, ROWS)
        return Tile(number, target, target * geometry.rows + row, row, rows, column, share, SHARES)
    else:
        owner = OWNER_OF(number, about)
        row, rows, column = ROWS_OF(number, about)
        rows_of_owner = geometry.rows if PLACED else 0
        tile = Tile(number, owner, row, row - owner * geometry.rows, rows, column, share, SHARES)
        marks.maps_tile(tile, rows_of_owner, chunk_rows, geometry.covers, world)
        return Tile(number, owner, row, tile.owner_row, tl.where(owner == target, rows, 0), column, share, SHARES)


def check_body(name: str, body: object) -> None:
    """ValueError unless ``body`` is a ``@triton.jit`` function."""
    check_instance(name, body, JITFunction, "a function decorated with @triton.jit")


def check_map(op: str, map: object) -> None:
    """ValueError unless ``map`` is a TileMap or None."""
    check_optional(check_instance, f"{op}: map", map, TileMap, "a weft.tiles.TileMap, or None for panels in rank order")


def check_operands(op: str, operands: object, matrices: Sequence[object]) -> Matrices:
    """``matrices`` as arguments. ValueError for more than two, or a descriptor inside ``operands``."""
    if (
        not isinstance(matrices, (tuple, list))
        or len(matrices) > 2
        or not all(isinstance(one, (torch.Tensor, TensorDescriptor)) for one in matrices)
    ):
        raise ValueError(
            f"{op}: matrices={quoted(matrices)} is not a tuple of at most two tensors or tensor descriptors"
        )
    held = [operands]
    while held:
        one = held.pop()
        if isinstance(one, TensorDescriptor):
            raise ValueError(
                f"{op}: operands holds a tensor descriptor, which Triton takes by itself only; pass it in matrices"
            )
        held += one if isinstance(one, tuple) else ()
    return Matrices(*matrices, *(None,) * (2 - len(matrices)))


def check_sizes(plan: Any, **at_least: int) -> None:
    """ValueError unless fields are integers of at least these values, or powers of two if they must be."""
    for name, low in at_least.items():
        check_int(name, getattr(plan, name), low)
    for name in ("rows", "columns", "num_warps"):
        if (value := getattr(plan, name)) & (value - 1):
            raise ValueError(f"{name}={value} is not a power of two")


def about_of(map: TileMap | None, operands: object) -> object:
    """Argument of the map's functions."""
    return operands if map is None or map.table is None else map.table


def covers_of(map: TileMap | None) -> int:
    """``Geometry.covers``."""
    return 0 if map is None else map.covers or 0


def identity(map: TileMap | None) -> tuple[Any, ...]:
    """Key of the map's functions among a kernel's launches."""
    return () if map is None else (id(map.owner_of), id(map.rows_of), map.positions)


def launch_constants(plan: Any, map: TileMap | None, team: Team) -> dict[str, Any]:
    """Constants and compiler options that the kernels have in common."""
    functions = {"OWNER_OF": map and map.owner_of, "ROWS_OF": map and map.rows_of}
    # One program an SM: without the bound ptxas spills with small tiles, to leave room for more programs.
    bound = {"maxnreg": 255} if team.caps.arch.startswith("sm_") else {}
    sizes = {"ROWS": plan.rows, "COLUMNS": plan.columns}
    return functions | sizes | {"num_warps": plan.num_warps, "num_stages": plan.num_stages} | bound


def programs_for(team: Team, plan: Any, count: int) -> int:
    """Programs of a kernel of ``count`` tiles: all resident, one an SM."""
    return min(team.caps.sms, team.max_programs(plan.num_warps), count)

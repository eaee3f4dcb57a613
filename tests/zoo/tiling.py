"""Bugs of tile bodies and maps of weft.tiles."""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tests.zoo.exhibit import N
from tests.zoo.exhibit import exhibit as any_exhibit
from weft import tiles

ROWS, SHARD = 4, 8  # of a tile, of a rank
# Findings about tiles do not depend on the schedule.
exhibit = partial(any_exhibit, schedules=2)
PLAN = tiles.GatherPlan(rows=ROWS, columns=N, chunks=2)


class Planted(NamedTuple):
    """Operands of bodies and maps: the rank that runs them, and whether the bug is planted."""

    rank: int
    bug: tl.constexpr


@triton.jit
def double(shard, out, tile, o, ROWS: tl.constexpr, N: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(shard.data + (tile.owner_row + row) * N + column, mask=row < tile.rows)
    tl.store(out + (tile.row + row) * N + column, 2 * x, mask=row < tile.rows)


@triton.jit
def double_of_the_next_chunk(shard, out, tile, o, ROWS: tl.constexpr, N: tl.constexpr):
    """The second chunk's rows in the first one's place: they may not be here yet."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    source = (tile.owner_row + ROWS) % (2 * ROWS) if o.bug else tile.owner_row
    x = tl.load(shard.data + (source + row) * N + column)  # here
    tl.store(out + (tile.row + row) * N + column, 2 * x)


@triton.jit
def double_beyond_the_tile(shard, out, tile, o, ROWS: tl.constexpr, N: tl.constexpr):
    """The mask is that of a whole tile, where the last one of a rank has fewer rows."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    inside = row < (ROWS if o.bug else tile.rows)
    x = tl.load(shard.data + (tile.owner_row + row) * N + column, mask=row < tile.rows, other=0.0)
    tl.store(out + (tile.row + row) * N + column, 2 * x, mask=inside & (tile.row + row < 12))  # here


@triton.jit
def owner_by_parity(number, o):
    return number % 2 if o.bug else number // 2


@triton.jit
def owner_by_rank(number, o):
    return (number // 2 + o.rank) % 2 if o.bug else number // 2


@triton.jit
def rows_in_order(number, o):
    return number * 4, 4, 0


@triton.jit
def part(tile, o, ROWS: tl.constexpr, N: tl.constexpr):
    return tl.full((ROWS, N), 1.0, tl.float32)


def gather(team, bug, body, rows=SHARD, map=None):
    shard, out = (
        team.local((rows, N), torch.float32).fill_(1.0),
        team.zeros((2 * rows, N), torch.float32, name="result"),
    )
    tiles.gather(body, shard, out, Planted(team.rank, tl.constexpr(bug)), team, plan=PLAN, map=map)


@exhibit("tile-read", "gathered rows", "a body reads rows of another chunk than its tile's", double_of_the_next_chunk)
def body_that_reads_another_chunk(team, bug):
    gather(team, bug, double_of_the_next_chunk)


@exhibit("tile-store", "result", "a body stores rows of a whole tile where its tile has fewer", double_beyond_the_tile)
def body_that_stores_outside_its_tile(team, bug):
    gather(team, bug, double_beyond_the_tile, rows=6)


@exhibit(
    "tile-owner", "", "a map gives a tile to a rank whose rows it does not have", also=("tile-read", "out-of-bounds")
)
def owner_without_the_rows(team, bug):
    gather(team, bug, double, map=tiles.TileMap(owner_of=owner_by_parity, rows_of=rows_in_order, tiles=4, covers=16))


@exhibit("tile-owner", "", "a map gives a tile to different owners on different ranks")
def owners_that_differ_by_rank(team, bug):
    map = tiles.TileMap(owner_of=owner_by_rank, rows_of=rows_in_order, tiles=4, covers=16)
    plan, operands = tiles.ExchangePlan(rows=ROWS, columns=N), Planted(team.rank, tl.constexpr(bug))
    tiles.scatter(part, team.zeros((SHARD, N), torch.float32, name="result"), operands, team, plan=plan, map=map)


@triton.jit
def row_part(tile, o, ROWS: tl.constexpr, N: tl.constexpr):
    return (tl.full((ROWS, N), 1.0, tl.float32),)


@triton.jit
def sum_of_rows(total, part):
    return (total[0] + part[0],)


@triton.jit
def store_rows(total, source, out, tile, o, ROWS: tl.constexpr, N: tl.constexpr):
    """The row of all ranks together, where ``out`` has this rank's rows alone."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    first = tile.row % 12 if o.bug else tile.owner_row
    tl.store(out + (first + row) * N + column, total[0], mask=row < tile.rows)  # here


@exhibit("tile-store", "result", "the merged rows of an exchange are stored at another tile's place", store_rows)
def merge_stored_at_another_tile(team, bug):
    out = team.zeros((3 * ROWS, N), torch.float32, name="result")
    plan, operands = tiles.ExchangePlan(rows=ROWS, columns=N), Planted(team.rank, tl.constexpr(bug))
    here = out[: 2 * ROWS]
    tiles.exchange(row_part, store_rows, here, operands, team, part=ROWS * N, merge=sum_of_rows, plan=plan)


@exhibit("tile-map", "", "a map gives rows of a split sum to two tiles", also=("race",))
def rows_of_two_tiles(team, bug):
    entries = [(0, 0, 5 if bug else 4, 0), (0, 4, 8, 0), (1, 8, 12, 0), (1, 12, 16, 0)]
    map = tiles.TileMap.of(torch.tensor(entries, dtype=torch.int32), covers=16)
    plan, operands = tiles.ExchangePlan(rows=2 * ROWS, columns=N, split=2), Planted(team.rank, tl.constexpr(bug))
    tiles.scatter(part, team.zeros((SHARD, N), torch.float32, name="result"), operands, team, plan=plan, map=map)


@exhibit("tile-map", "", "a table leaves out rows: no tile computes them")
def table_with_a_hole(team, bug):
    entries = [(0, 0, 4, 0), (0, 4, 8, 0), (1, 8, 11 if bug else 12, 0), (1, 12, 16, 0)]
    map = tiles.TileMap.of(torch.tensor(entries, dtype=torch.int32), covers=16)
    gather(team, bug, double, map=map)

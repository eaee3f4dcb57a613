"""The tile schedule: its order has the properties that the kernels rely on, and kernels compute the same order."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.kernels import tile_schedule as schedule
from weft.kernels.tile_schedule import make_tiles

SIZES = st.integers(1, 40)


@st.composite
def panelled(draw, panels_are_ranks=True):
    """(tiles, world size): W panels, or one."""
    world = draw(st.integers(1, 8))
    tiles = make_tiles(
        draw(st.integers(1, 150)),
        draw(st.integers(1, 90)),
        panels=world if panels_are_ranks else 1,
        block_m=16,
        block_n=16,
        group=draw(st.integers(1, 9)),
        chunks=draw(st.integers(1, 8)) if panels_are_ranks else 1,
    )
    return tiles, world


class Place(NamedTuple):
    panel: int
    chunk: int
    row: int
    column: int


def plan(tiles, rank, world):
    """(number, owner, place) of every tile in the order of ``rank``."""
    start = schedule.first_tile.fn((rank + 1) % world, tiles, world)
    for place in range(tiles.count):
        tile = schedule.at_place.fn(place, start, tiles)
        yield tile, schedule.owner_of.fn(tile, tiles, world), Place(*schedule.locate.fn(tile, tiles))


def orders(tiles, world):
    return [list(plan(tiles, rank, world)) for rank in range(world)]


@given(panelled())
def test_every_tile_comes_once_and_belongs_to_its_panel(case):
    tiles, world = case
    rows, columns = tiles.rows, tiles.columns
    for order in orders(tiles, world):
        cells = {(place.panel, place.row, place.column) for _, _, place in order}
        assert cells == {(p, m, n) for p in range(world) for m in range(rows) for n in range(columns)}
        assert len(order) == tiles.count == len(cells)
        assert all(owner == place.panel for _, owner, place in order)


@given(panelled())
def test_own_tiles_come_last_and_no_two_ranks_turn_to_the_same_peer(case):
    tiles, world = case
    share = tiles.count // world
    for rank, order in enumerate(orders(tiles, world)):
        for place, (_, owner, _) in enumerate(order):
            assert owner == (rank + 1 + place // share) % world


@given(panelled())
def test_chunks_come_whole_and_in_order_and_no_group_straddles_them(case):
    tiles, world = case
    for order in orders(tiles, world)[-1:]:  # from tile 0 on
        by_signal = [(place.panel, place.chunk) for _, _, place in order]
        assert by_signal == sorted(by_signal)
        for _, _, place in order:
            assert place.chunk == place.row // tiles.chunk
        # A run of group x columns numbers spans at most `group` tile rows, all of one chunk.
        for chunk in set(by_signal):
            rows = [place.row for _, _, place in order if (place.panel, place.chunk) == chunk]
            for start in range(0, len(rows), tiles.group * tiles.columns):
                together = rows[start : start + tiles.group * tiles.columns]
                assert max(together) - min(together) < tiles.group


@given(panelled(panels_are_ranks=False))
def test_without_panels_tiles_are_dealt_out_evenly(case):
    tiles, world = case
    for rank, order in enumerate(orders(tiles, world)):
        assert sorted(number for number, _, _ in order) == list(range(tiles.count))
        owners = [owner for _, owner, _ in order]
        shares = [owners.count(owner) for owner in range(world)]
        assert max(shares) - min(shares) <= 1
        # First all tiles of the peers, then the own ones; numbers of an owner are consecutive from its first.
        mine = schedule.first_tile.fn(rank, tiles, world)
        assert owners[tiles.count - shares[rank] :] == [rank] * shares[rank]
        assert [number for number, owner, _ in order if owner == rank] == list(range(mine, mine + shares[rank]))


def test_slots_of_an_owner_are_each_for_one_peer():
    for world in range(2, 9):
        for owner in range(world):
            ranks_after = [(owner + 1 + d) % world for d in range(world - 1)]
            slots = [schedule.buffer_of.fn(source, owner, world) for source in ranks_after]
            assert slots == list(range(world - 1))


@triton.jit
def list_tiles(out, rank, world, tiles):
    start = schedule.first_tile((rank + 1) % world, tiles, world)
    for place in range(tl.program_id(0), tiles.count, tl.num_programs(0)):
        number = schedule.at_place(place, start, tiles)
        panel, chunk, row, column = schedule.locate(number, tiles)
        at = out + place * 6
        tl.store(at, number)
        tl.store(at + 1, schedule.owner_of(number, tiles, world))
        tl.store(at + 2, panel)
        tl.store(at + 3, chunk)
        tl.store(at + 4, row)
        tl.store(at + 5, column)


@settings(max_examples=5)
@given(panelled(), st.integers(0, 7))
def test_kernels_follow_the_plan(case, rank):
    tiles, world = case
    rank %= world
    expected = [[number, owner, *place] for number, owner, place in plan(tiles, rank, world)]

    def main(team):
        out = torch.zeros((tiles.count, 6), dtype=torch.int32)
        list_tiles[(3,)](out, rank, world, tiles)
        return out.tolist()

    assert weft.simulate(main, 1) == [expected]

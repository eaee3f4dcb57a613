"""The kernels of weft.tiles are free of races in calls in a row, which share buffers, by each transport and map."""

import pytest
import torch

import weft.check
from tests.sampled import sampled
from tests.tiles.test_exchange import scattered
from tests.tiles.test_gather import gathered
from weft import tiles


def copies(team):
    for call in range(3):
        gathered(team, tiles.GatherPlan(rows=16, columns=32, chunks=2), call)


def stores(team):
    for call in range(3):
        gathered(team, tiles.GatherPlan(rows=16, columns=32, chunks=2, transport="store"), call)


def mapped(team):
    for call in range(3):
        gathered(team, tiles.GatherPlan(rows=16, columns=32, chunks=2), call, map="functions")


def sums(team):
    return [scattered(team, call, torch.float32)[0] for call in range(4)]


def mapped_sums(team):
    return [scattered(team, call, torch.float32, mapped=True)[0] for call in range(4)]


@pytest.mark.parametrize(
    ("main", "world_size", "schedules"),
    sampled(
        [
            (main, world_size, schedules)
            for main in (copies, stores, mapped, sums, mapped_sums)
            for world_size, schedules in ((1, 1), (2, 1), (2, 16), (3, 12), (4, 8))
        ],
        lambda main, world_size, schedules: world_size == 2 and schedules == 1 and main in (stores, sums),
    ),
)
def test_calls_in_a_row_are_clean(main, world_size, schedules):
    report = weft.check.check(main, world_size, schedules=schedules)
    assert report.ok, str(report)

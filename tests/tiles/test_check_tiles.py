"""The kernels of weft.tiles are free of races in calls in a row, which share buffers, by each transport and map."""

import importlib

import pytest
import torch

import weft.check
from tests.ops.layer_cases import mutated
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


def split_sums(team):
    plan = tiles.ExchangePlan(rows=16, columns=32, split=2)
    return [scattered(team, call, torch.float32, plan=plan)[0] for call in range(2)]


def mapped_sums(team):
    return [scattered(team, call, torch.float32, mapped=True)[0] for call in range(4)]


@pytest.mark.parametrize(
    ("main", "world_size", "schedules"),
    sampled(
        [
            (main, world_size, schedules)
            for main in (copies, stores, mapped, sums, split_sums, mapped_sums)
            for world_size, schedules in ((1, 1), (2, 1), (2, 16), (3, 12), (4, 8))
        ],
        lambda main, world_size, schedules: world_size == 2 and schedules == 1 and main in (stores, split_sums),
    ),
)
def test_calls_in_a_row_are_clean(main, world_size, schedules):
    report = weft.check.check(main, world_size, schedules=schedules)
    assert report.ok, str(report)


# Source of the kernel of split tiles, what to, the finding. Its twin is the kernel as it is, above.
BUGS = {
    "sum read before the last share is there": ("    return is_last\n", "    return is_last == 0\n", "race"),
    "share counted before its stores": ("    wl.gather_stores()\n    is_last", "    is_last", "missing-barrier"),
    "relaxed count of shares": ('"acq_rel", scope="gpu") == SPLIT', '"relaxed", scope="gpu") == SPLIT', "relaxed-order"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "sum" in name else pytest.mark.sweep) for name in BUGS]
)
def test_the_check_finds_a_planted_bug_in_split_tiles(name, tmp_path, monkeypatch):
    module = importlib.import_module("weft.tiles.exchange")  # the package has a function of this name
    *change, kind = BUGS[name]
    mutant = mutated(module, *change, f"split_mutant_{list(BUGS).index(name)}", tmp_path)
    monkeypatch.setattr(module, "exchange_kernel", mutant.exchange_kernel)
    report = weft.check.check(split_sums, 1, schedules=8)
    assert [found.finding.kind for found in report.findings] == [kind], str(report)

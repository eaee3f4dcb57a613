"""Order, number and time limit of measured rounds: pure functions, and a wait that is given up."""

import pickle
import types
from collections import Counter
from itertools import pairwise

import pytest
import torch

from tests.bench import canned
from weft.bench.harness import meters


def test_work_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "Event", type("Never", (), {"record": lambda self: None, "query": lambda self: False})
    )
    team = types.SimpleNamespace(device=torch.device("cuda", 0), rank=3)
    with pytest.raises(meters.Stuck, match=r"rank 3: nccl at 4 KiB did not end within 0.05 s.*--providers") as e:
        meters.finish(team, "nccl at 4 KiB", 0.05)
    e.value.reports = [canned.all_reduce()]
    assert pickle.loads(pickle.dumps(e.value)).reports == [canned.all_reduce()]


def test_a_spread_is_of_the_samples():
    found = meters.spread([float(value) for value in range(101)][::-1])
    assert (found.median, found.p10, found.p90, found.samples) == (50.0, 10.0, 90.0, 101)
    assert meters.spread([3.0]).p90 == 3.0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 15])
def test_every_meter_follows_every_other_equally_often(count):
    rounds = max(2, meters.balanced_rounds(count))
    orders = [meters.in_turn(count, number) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs.values()) <= {1 + count % 2} and len(pairs) == count * (count - 1)
    for place in zip(*orders, strict=True):
        assert set(Counter(place).values()) == {1 + count % 2}
    assert meters.in_turn(count, rounds) == orders[0]


def test_the_last_replica_takes_the_set_whose_answer_is_known():
    assert meters.order(3, 7) == [0, 2, 1, 0, 2, 1, 0]
    for sets in range(1, 9):
        for replicas in range(1, 20):
            taken = meters.order(sets, replicas)
            assert taken[-1] == 0
            assert len(set(taken)) == min(sets, replicas)


def test_short_calls_are_many_in_a_row():
    """So that what only the first one costs is divided by many."""
    assert [meters.calls_in_a_row(us) for us in (0.5, 3.0, 62.0, 100.0, 400.0, 1999.0)] == [64, 64, 64, 40, 10, 8]


def test_rounds_fill_the_time_within_bounds():
    assert meters.rounds_for(0.1, quick=False, count=1) == 11
    assert meters.rounds_for(1e-9, quick=False, count=1) == 50
    assert meters.rounds_for(9.0, quick=True, count=1) == 3


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("count", [2, 5, 8, 15, 16])
def test_short_rounds_are_so_many_that_neighbours_are_balanced(count, quick):
    rounds = meters.rounds_for(0.005, quick, count)
    pairs = Counter(pair for number in range(rounds) for pair in pairwise(meters.in_turn(count, number)))
    assert len(pairs) == count * (count - 1) and len(set(pairs.values())) == 1


def test_long_rounds_are_no_more_than_time_allows():
    assert meters.rounds_for(0.35 / 12, quick=True, count=16) == 16  # 1.33 times as long
    assert meters.rounds_for(0.35 / 12, quick=True, count=8) == 16
    assert meters.rounds_for(0.35 / 11, quick=True, count=8) == 8
    assert meters.rounds_for(0.35 / 12, quick=True, count=15) == 12  # not balanced
    assert meters.rounds_for(9.0, quick=True, count=5) == 3  # nor these

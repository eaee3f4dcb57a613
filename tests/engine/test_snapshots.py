"""Snapshots of states: whatever comes and goes, a sequence goes on from the states of its own tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_prefix_caching import PAGE, Device, Pool, events
from weft.engine.answers import Load
from weft.engine.scheduler import Scheduler
from weft.engine.snapshots import SnapshotCounts, Snapshots
from weft.serve.metrics import Metrics


class Stateful(Scheduler):
    """A scheduler whose copies of states are made beside the chunks that it chooses."""

    device = None

    def next_chunk(self):
        ranges = super().next_chunk()
        copies = self.snapshots.take_copies() if ranges else None
        if copies is not None:
            for slot, place in copies.restored.items():
                self.device.states[slot] = self.device.places[place]
        self.device.saved = {} if copies is None else copies.saved
        return ranges

    def next_decode(self, drafts=0):
        for place, slot in self.device.saved.items():
            self.device.places[place] = self.device.states[slot]
        self.device.saved = {}
        return super().next_decode(drafts)


class StatefulDevice(Device):
    """Device of a model with states: tokens stand for what they make of a state."""

    def __init__(self, pages, max_batch, chunk_tokens, places, interval):
        super().__init__(pages, max_batch, chunk_tokens)
        snapshots = Snapshots(places, PAGE, interval)
        options = {"prefix_caching": True, "snapshots": snapshots}
        self.scheduler = Stateful(Pool(1 + pages, PAGE), max_batch, chunk_tokens, **options)
        self.scheduler.device, self.states, self.places, self.saved = self, {}, {}, {}

    def run(self, one, start, end, chooses):
        text = self.texts[one.number]
        if start > 0:
            assert self.states[one.slot] == text[:start], "it goes on from a state of other tokens"
        self.states[one.slot] = text[:end]
        super().run(one, start, end, chooses)

    def keep(self):
        for place, slot in self.scheduler.kept_states().items():
            self.places[place] = self.states[slot]

    def collect(self):
        self.keep()
        super().collect()

    def fail(self):
        super().fail()
        self.places.clear()
        self.states.clear()

    def check(self):
        self.keep()
        super().check()
        snapshots = self.scheduler.snapshots
        used = [*snapshots._place_of.values(), *(one.snapshot[0] for one in self.open if one.snapshot is not None)]
        assert snapshots._reserved == sum(one.snapshot is not None for one in self.open)
        assert sorted([*used, *snapshots._free]) == list(range(snapshots.counts.places)), (
            "each place is used or free, once"
        )
        assert snapshots.counts.saved - snapshots.counts.dropped >= snapshots.counts.held


@settings(max_examples=150)
@given(
    events=st.lists(events, max_size=40),
    pages=st.integers(7, 14),
    max_batch=st.integers(1, 4),
    chunk_tokens=st.integers(1, 40),
    places=st.integers(1, 6),
    interval=st.sampled_from([1, 8, 12, 100]),
)
def test_states_are_those_of_a_sequences_own_tokens(events, pages, max_batch, chunk_tokens, places, interval):
    StatefulDevice(pages, max_batch, chunk_tokens, places, interval).play(events)


def test_the_least_recently_used_snapshot_gives_way():
    snapshots = Snapshots(2, PAGE, 8)
    for digest in (b"a", b"b"):
        snapshots.save(digest, 0)
    snapshots.use(b"a", 1)
    snapshots.save(b"c", 2)
    assert snapshots.longest([b"a", b"b"]) == 1 and snapshots.longest([b"b", b"d"]) == 0
    assert snapshots.counts == SnapshotCounts(saved=3, used=1, dropped=1, held=2, places=2)
    restored, saved = snapshots.take_copies()
    assert restored == {1: 0} and saved == {0: 0, 1: 2}, "the place of b, whose copy is made no more"
    assert snapshots.take_copies() == ({}, {})
    snapshots.withdraw([b"a", b"x"])
    assert b"a" not in snapshots and snapshots.counts.held == 1


@pytest.mark.parametrize(("pages", "due"), [(0, []), (1, [1]), (2, [2]), (5, [2, 4, 5]), (6, [2, 4, 6])])
def test_snapshots_are_due_at_intervals_and_the_end(pages, due):
    assert Snapshots(1, PAGE, 2 * PAGE + 1).due(pages) == due


def test_metrics_count_snapshots():
    load = [Load()]
    metrics = Metrics("adder", lambda: load[0])
    for counts in (SnapshotCounts(2, 1, 0, 2, 4), SnapshotCounts(5, 4, 2, 3, 4)):
        load[0] = Load(snapshots=counts)
        lines = metrics.text().decode().splitlines()
    for line in ("saved_total{name} 5.0", "used_total{name} 4.0", "dropped_total{name} 2.0", "usage_perc{name} 0.75"):
        assert "weft:state_snapshots_" + line.replace("{name}", '{model_name="adder"}') in lines

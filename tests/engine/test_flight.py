"""Decode steps in flight: groups of slots at different stages at once, with the tokens of one rank."""

from itertools import chain

import pytest

import weft
import weft.check
from weft.engine import Engine, SamplingParams
from weft.engine.graphs import CROSSING_BYTES, Flight, Graphs, Turn, pays, slots_of, turns_of
from weft.engine.params import Kind
from weft.errors import Deadlock
from weft.runtime.team.rail import Rail

pytestmark = pytest.mark.usefixtures("as_found")

STAGED = {"mode": "replicated", "page_size": 16, "microbatch_tokens": 1}


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_tokens_come_to_a_stage_in_order_and_before_its_groups_next_turn(stages):
    for stage in range(stages):
        steps = [turns_of(stage, stages, 8, continued=step > 0) for step in range(3)]
        turns = [(step, turn) for step, found in enumerate(steps) for turn in found]
        assert [turn.group for _, turn in turns] == [*range(stages)] * 3
        behind = stages - 1 - stage
        arriving = [turn.arriving for _, turn in turns]
        if stage == stages - 1:
            assert arriving == [None] * len(turns)
        else:
            assert arriving == [None] * behind + [turn.group for _, turn in turns[:-behind]]
    assert sorted(chain(*(range(8)[slots_of(group, 8, stages)] for group in range(stages)))) == list(range(8))


def test_groups_pay_by_what_attention_reads_beside_weights_and_crossings():
    least = 2 * CROSSING_BYTES
    assert pays(2, least, 0) and not pays(2, least - 1, 0) and not pays(3, least, 0)
    assert pays(2, 1 << 33, 1 << 36) and not pays(2, (1 << 33) - 1, 1 << 36)


def graphs_without_gpu(monkeypatch):
    """A graph's replay is what was captured."""

    class Graph:
        def __init__(self, run):
            self.replay = run

    monkeypatch.setattr(Graphs, "_prepare", lambda self, run: None)
    monkeypatch.setattr(Graphs, "_record", lambda self, key, run: self._graphs.update({key: Graph(run)}))


def test_turns_are_captured_at_start_and_replayed(byte_model, monkeypatch):
    def main(team, options):
        engine = Engine(byte_model, team, **STAGED, **options)
        runner = engine.batch.runner
        if team.size > 1:
            runner.cuda_graph = True
            runner.prompts.shape_of = lambda chunks: None
            monkeypatch.setattr(runner, "_warm_sizes", lambda: [(turn, Kind.GREEDY) for turn in runner._warm_flights()])
            runner.warm_up()
            known = set(runner.graphs)
        found = [one.token_ids for one in engine.generate([[1], [2, 3], [4]], max_tokens=6, ignore_eos=True)]
        if team.size > 1:
            turns = {key for key in runner.graphs if isinstance(key[0], Turn)}
            assert turns == known and len(known) == (6 if runner.pipeline.is_last else 9)
        return found

    graphs_without_gpu(monkeypatch)
    [alone] = weft.simulate(main, 1, args=({"max_batch": 8},))
    assert weft.simulate(main, 2, node_size=1, args=({"max_batch": 8, "pipeline_parallel": 2},)) == [alone] * 2


def steps(team, directory, node_size, fused):
    team = weft.init(node_size=node_size)
    engine = Engine(directory, team, fused=fused, pages=9, pipeline_parallel=2, **STAGED)
    for first in (1, 3):
        engine.submit([first, 2], SamplingParams(max_tokens=5, ignore_eos=True))
    found = []
    while engine.has_work:
        found += [piece.token_id for piece in engine.step()]
    return found


def test_steps_in_flight_have_no_race(byte_model):
    report = weft.check.check(steps, 2, schedules=3, args=(byte_model, 1, False))
    assert report.ok, str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [True, False])
def test_steps_in_flight_over_stages_of_two_ranks_have_no_race(byte_model, fused):
    report = weft.check.check(steps, 4, schedules=3, args=(byte_model, 2, fused))
    assert report.ok, str(report)


def test_a_stage_that_reads_tokens_before_they_have_come_is_a_race(byte_model, monkeypatch):
    monkeypatch.setattr(Rail, "join", lambda self: None)
    report = weft.check.check(steps, 2, schedules=1, args=(byte_model, 1, False))
    assert "race" in {found.finding.kind for found in report.wrong}, str(report)
    assert "tensor of the rail" in str(report)


def test_a_step_that_is_never_settled_is_a_deadlock_with_both_ends(byte_model, monkeypatch):
    def settle(flight, arrived=None):
        if flight.in_flight:
            flight._flying = None
            arrived()

    monkeypatch.setattr(Flight, "settle", settle)
    with pytest.raises(Deadlock, match="waits for piece|has sent piece"):
        weft.simulate(steps, 2, args=(byte_model, 1, False))

"""Stages of a pipeline: what each has, how a pass is cut, what is refused, and no race between stages."""

import pytest

import weft
import weft.check
from weft.engine import Engine, SamplingParams
from weft.engine import StructuredOutputsParams as Structured
from weft.engine.answers import join_pieces
from weft.engine.pipeline import Pipeline, layers_of, ranges_between
from weft.errors import Deadlock
from weft.runtime.team.rail import Rail

pytestmark = pytest.mark.usefixtures("as_found")

STAGED = {"mode": "replicated", "page_size": 16, "pipeline_parallel": 2, "microbatch_tokens": 1}


def test_layers_are_split_evenly_and_the_last_stage_has_none_too_many():
    for stages in range(1, 6):
        for layers in range(stages, 12):
            spans = [layers_of(stage, stages, layers) for stage in range(stages)]
            assert [layer for span in spans for layer in span] == list(range(layers))
            assert sorted(map(len, spans), reverse=True) == list(map(len, spans)) and len(spans[0]) - len(spans[-1]) < 2


def test_passes_are_cut_into_as_many_microbatches_as_stages_but_not_into_small_ones():
    def main(team):
        pipeline = Pipeline.of(team, 4, 5, 8)
        assert Pipeline.of(team, 1, 5, 8).cuts(1000) == [(0, 1000)]
        assert [len(pipeline.cuts(tokens)) for tokens in (1, 15, 16, 24, 31, 32, 1000)] == [1, 1, 2, 3, 3, 4, 4]
        assert [len(pipeline.cuts(pipeline.most_uncut + more)) for more in (0, 1)] == [1, 2]
        return pipeline.cuts(33), len(pipeline.layers), pipeline.stage.size

    cuts = [(0, 8), (8, 16), (16, 24), (24, 33)]
    assert weft.simulate(main, 4) == [(cuts, layers, 1) for layers in (2, 1, 1, 1)]


def test_a_microbatch_has_the_sequences_and_parts_of_them_between_its_ends():
    sequences = [(0, 3), (16, 5), (2, 1)]
    assert ranges_between(sequences, 0, 9) == (0, sequences)
    assert ranges_between(sequences, 0, 4) == (0, [(0, 3), (16, 1)])
    assert ranges_between(sequences, 4, 7) == (1, [(17, 3)])
    assert ranges_between(sequences, 7, 9) == (1, [(20, 1), (2, 1)])
    assert ranges_between(sequences, 8, 9) == (2, [(2, 1)])


@pytest.mark.parametrize(
    ("world_size", "node_size", "options", "message"),
    [
        (4, 2, {"pipeline_parallel": 3}, "pipeline_parallel=3 does not divide world_size=4"),
        (3, 1, {"pipeline_parallel": 3}, "pipeline_parallel=3 is more than the model's 2 layers"),
        (
            6,
            2,
            {"pipeline_parallel": 2},
            "stages of 3 ranks are neither whole nodes of 2 ranks nor equal parts of one; pass 3",
        ),
        (2, 1, {"pipeline_parallel": 0}, "pipeline_parallel=0"),
        (2, 1, {"microbatch_tokens": 0}, "microbatch_tokens=0"),
        (2, 1, {"pipeline_parallel_size": 2}, "weft's name is pipeline_parallel"),
    ],
)
def test_stages_that_do_not_fit_are_refused_on_all_ranks(byte_model, world_size, node_size, options, message):
    def main(team):
        with pytest.raises((ValueError, TypeError), match=message):
            Engine(byte_model, team, **options)
        return True

    assert all(weft.simulate(main, world_size, node_size=node_size))


def test_a_rank_reads_the_weights_of_its_stage_alone(byte_model, caplog):
    def main(team):
        read = []
        engine = Engine(byte_model, team, progress=lambda done, total: read.append(total), **STAGED)
        parts = engine.model.embed_tokens, engine.model.norm, engine.model.lm_head
        cache = engine.batch.runner.cache
        return (
            read[0],
            [part is not None for part in parts],
            cache.data.shape[0],
            cache.pages,
            list(engine.model.shards()),
        )

    first, last = weft.simulate(main, 2, node_size=1)
    assert first[1:3] == ([True, False, False], 1) and last[1:3] == ([False, True, True], 1)
    assert first[3] == last[3]
    assert not set(first[4]) & set(last[4]) and not caplog.records, "no tensor is unknown to all stages"


def test_a_page_has_the_keys_and_values_of_a_stage_alone(byte_model, monkeypatch):
    monkeypatch.setattr("weft.engine.sizes.VIRTUAL_CACHE_BYTES", 40_960)

    def main(team):
        return Engine(byte_model, team, **STAGED | {"pipeline_parallel": 1 + (team.size > 1)}).batch.runner.cache.pages

    [alone] = weft.simulate(main, 1)
    first, second = weft.simulate(main, 2, node_size=1)
    assert first == second == 2 * alone


def test_an_llm_takes_stages_of_one_machine():
    with weft.LLM(world_size=2, device="sim", pipeline_parallel=2) as llm:
        assert [answer.text for answer in llm.generate("12+30=")] == ["42"]


def guided(team, directory, options):
    params = SamplingParams(structured_outputs=Structured(choice=["positive", "negative"]), max_tokens=10)
    engine = Engine(directory, team, **{"mode": "replicated"} | options)
    engine.batch._steps_late = 1  # as on GPUs
    answer, other = join_pieces(engine.answer(["x", "yz"], [params, SamplingParams(max_tokens=3)]), 2)
    return answer.text, other.token_ids


def test_grammars_are_followed_over_stages(byte_model):
    pytest.importorskip("llguidance")
    [alone] = weft.simulate(guided, 1, args=(byte_model, {}))
    assert alone[0] in ("positive", "negative")
    assert weft.simulate(guided, 2, node_size=1, args=(byte_model, STAGED)) == [alone] * 2


def step(team, directory, node_size, fused):
    team = weft.init(node_size=node_size)
    engine = Engine(directory, team, fused=fused, pages=9, **STAGED)
    for first in (1, 3):
        engine.submit([first, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    return [piece.token_id for piece in engine.step()]


def test_a_step_over_stages_has_no_race(byte_model):
    report = weft.check.check(step, 2, schedules=3, args=(byte_model, 1, False))
    assert report.ok, str(report)


def test_a_stage_that_does_not_wait_for_its_pieces_is_a_race(byte_model, monkeypatch):
    monkeypatch.setattr(Rail, "after", lambda self, mark: None)
    report = weft.check.check(step, 2, schedules=1, args=(byte_model, 1, False))
    assert {found.finding.kind for found in report.wrong} == {"race"}, str(report)
    assert "tensor of the rail" in str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_over_stages_of_two_ranks_has_no_race(byte_model, fused):
    report = weft.check.check(step, 4, schedules=3, args=(byte_model, 2, fused))
    assert report.ok, str(report)


def test_a_piece_that_a_stage_leaves_out_is_a_deadlock_with_both_ends(byte_model, monkeypatch):
    send = Pipeline.send
    sent = []
    monkeypatch.setattr(Pipeline, "send", lambda self, rows: sent.append(1) or (len(sent) < 2 and send(self, rows)))
    with pytest.raises(Deadlock, match="waits for piece 2 from rank 0 of node 0, which has sent 1"):
        weft.simulate(step, 2, args=(byte_model, 1, False))

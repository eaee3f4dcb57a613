"""Predicted steps: the launches are the recipe's, and the errors on committed steps are what the page says."""

import dataclasses
import statistics

import pytest
import torch

import weft
from benchmarks import recipes, step_errors
from weft.bench.models.steps import TINY_CONFIG, config_of
from weft.engine.config import EngineConfig
from weft.engine.runner import Runner
from weft.models import Decoder, DecoderConfig
from weft.models.families import PUBLISHED
from weft.models.steps import Layout, _Layer, launches, layer_in, recipe_of, step_time, tokens_of
from weft.parallel.step_plan import plan_step
from weft.plan.asked import recorded

ROWS = step_errors.rows()
SEEN = [row for row in ROWS if row.is_fitted]
UNSEEN = [row for row in ROWS if not row.is_fitted and not row.is_alike]
RECIPES = {"FusedNorm": "fused_norm", "Replicated": "replicated", "SequenceParallel": "sequence_parallel"}


@pytest.mark.parametrize("rows", [SEEN, UNSEEN], ids=["seen", "unseen"])
def test_errors_on_committed_steps(rows):
    """Else fit again: python -m benchmarks.step_errors --fit."""
    errors = [abs(step_errors.error(row)) for row in rows]
    assert len(errors) > 20
    assert statistics.mean(errors) < 0.07
    assert sum(one <= step_errors.GOAL for one in errors) >= 0.8 * len(errors)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_recipe_is_the_plan_s(world_size):
    config, layout, tokens = config_of("qwen3-8b"), Layout(world_size=world_size), (1, 128, 129, 600, 1023, 1024, 8192)
    sizes = {"hidden_size": 4096, "dtype": torch.bfloat16, "layer": layer_in(config, layout)}

    def main(team):
        return [plan_step(count, mode="auto", team=team, **sizes).recipe for count in tokens]

    recipes = [RECIPES[type(recipe).__name__] for recipe in weft.simulate(main, world_size)[0]]
    assert recipes == [recipe_of(config, count, layout, "h200") for count in tokens]
    assert recipes[-1] == ("sequence_parallel" if world_size > 1 else "replicated")


@pytest.mark.parametrize("world_size", [1, 2])
def test_launches_of_a_decode_step_are_the_ops_that_a_decoder_runs(world_size):
    """Elementwise kernels apart, which have no plan."""

    def main(team):
        runner = Runner(Decoder(TINY_CONFIG, team).fill_dummy(), EngineConfig(max_batch=2, max_seq_len=64, pages=4))
        with recorded() as calls:
            runner.run_empty(2)
        return {op for op, _, _ in calls}

    # Parts of other ops' plans, and the order of choices.
    planned = weft.simulate(main, world_size)[0] - {"matmul_parts", "embed", "sample_argmax"}
    listed = {one.op for one in launches(TINY_CONFIG, (2, 64, 1), Layout(world_size=world_size), "fused_norm")}
    assert planned - {"all_reduce_rms_norm"} == listed - {"memory", "all_reduce_rms_norm"}
    assert ("all_reduce_rms_norm" in listed) == (world_size > 1)


def test_a_dense_layer_has_seven_launches():
    config = dataclasses.replace(config_of("qwen3-32b"), num_hidden_layers=1)
    ops = [one.what for one in launches(config, (1, 128, 1), Layout(world_size=2), "fused_norm")]
    assert ops[:7] == ["all-reduce + norm", "qkv", "attention", "o", "all-reduce + norm", "gate, up", "down"]
    assert ops[7:] == ["embedding", "last norm", "head", "choice", "choice over ranks"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_has_a_time(name):
    config = DecoderConfig.named(name)
    for world_size in (1, 2):
        for step in ((1, 512, 1), (64, 2048, 1), (1, 1024, 1024), (4, 1024, 512), (8, 512, 1, 4)):
            made = step_time(config, step, Layout(world_size=world_size), "h200")
            assert 1e-5 < made.seconds < 60
            assert 0 < made.error < 1
            assert made.seconds == pytest.approx(sum(part.seconds for part in made.parts))


def test_more_work_takes_longer_and_more_ranks_less():
    config = config_of("qwen3-32b")
    times = [step_time(config, (batch, 1024, 1), Layout(world_size=2), "h200").seconds for batch in (1, 8, 64, 512)]
    assert times == sorted(times)
    by_ranks = [step_time(config, (8, 1024, 1), Layout(world_size=w), "h200").seconds for w in (1, 2, 4)]
    assert by_ranks == sorted(by_ranks, reverse=True)
    assert step_time(config, (8, 1024, 1), Layout(quantization="fp8"), "h200").seconds < by_ranks[0]
    longer = step_time(config, (8, 1 << 17, 1), Layout(world_size=2), "h200").seconds
    assert longer > step_time(config, (8, 1024, 1), Layout(world_size=2), "h200").seconds


def test_drafts_cost_less_than_steps_of_their_own():
    config, layout = config_of("qwen3-8b"), Layout(world_size=2)
    one, four = (step_time(config, (1, 2048, 1, queries), layout, "h200").seconds for queries in (1, 4))
    assert one < four < 2 * one
    assert tokens_of((2, 2048, 1, 4)) == 8


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v2-lite", "gemma-2-9b"])
def test_chunks_of_a_prompt_attend_as_long_as_the_whole(name):
    config, layout = dataclasses.replace(config_of(name), max_position_embeddings=1 << 15), Layout()

    def attention(step):
        made = step_time(config, step, layout, "h200")
        return sum(part.seconds for part in made.parts if part.launch.op == "paged_prefill_attention")

    chunks = sum(attention((1, at, 4096)) for at in range(4096, 32769, 4096))
    assert chunks == pytest.approx(attention((1, 32768, 32768)), rel=0.1)


@pytest.mark.parametrize("window", [None, 4096, 16384])
@pytest.mark.parametrize(("length", "new"), [(8192, 8192), (8192, 1024), (5000, 2000)])
def test_pairs_of_a_prompt_are_counted_with_windows_and_cached_tokens(length, new, window):
    layer = _Layer(config_of("qwen3-8b"), (1, length, new), Layout(), "replicated")
    pairs = sum(min(place + 1, window or length) for place in range(length - new, length))
    assert layer._side(window) ** 2 / 2 == pytest.approx(pairs, rel=1e-3)


def test_the_page_has_the_errors_of_these_costs():
    """Else write it again: python -m benchmarks.step_errors prints both tables."""
    page = (step_errors.RESULTS.parent.parent / "docs" / "planning.md").read_text().splitlines()
    for line in step_errors.summary(ROWS).splitlines()[2:]:
        name, rows, mean, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        [written] = (row for row in page if row.startswith(f"| {name} |"))
        _, rows_there, mean_there, *_ = (cell.strip() for cell in written.strip("|").split("|"))
        assert rows_there == rows
        assert abs(float(mean_there[:-1]) - float(mean[:-1])) < 2


def test_the_recipe_of_mode_auto_is_near_the_least_predicted_time():
    regrets = [ms[taken] / min(ms.values()) for *_, ms, taken in recipes.rows()]
    assert len(regrets) == 54 and max(regrets) < 1.05 and sum(regret < 1.03 for regret in regrets) >= 53

"""Recipes by predicted times: they are the measured ones, change once, and follow the sizes of a model and its GPU."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import step_errors
from weft.bench.harness.report import from_json
from weft.bench.models.steps import config_of
from weft.costs.gpu import named
from weft.costs.predicted import predict
from weft.costs.recipes import FUSED_NORM, REPLICATED, SEQUENCE_PARALLEL, Layer, change, changes, times
from weft.models import DecoderConfig, step_costs
from weft.models.families import PUBLISHED
from weft.models.layer_sizes import layer_of
from weft.models.steps import Layout, launches, layer_in, recipe_of
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.parallel.sequence_parallel import GatheredMLP
from weft.parallel.step_plan import plan_step
from weft.plan.planned import machine
from weft.runtime import capabilities

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Measured times over the least one that count as equal: two runs of one recipe differ by as much.
TIE = 1.03
# ms of a prompt of Qwen3-32B on two H200s, by recipe (lab/h200-x2-modes.json@4c5a438).
PROMPTS = {
    256: (17.13, 17.64, 17.67), 512: (29.49, 30.37, 30.56), 768: (43.78, 45.02, 44.48), 1024: (56.65, 58.22, 56.61),
    1536: (87.34, 84.86, 87.05), 2048: (116.98, 114.92, 109.73),
}  # fmt: skip


def recipes_at(name, world_size, gpu):
    return changes(layer_of(config_of(name), world_size), world_size, named(gpu))


@pytest.mark.parametrize("tokens", PROMPTS)
def test_recipes_of_whole_prompts_are_the_measured_ones(tokens):
    measured = dict(zip((FUSED_NORM, REPLICATED, SEQUENCE_PARALLEL), PROMPTS[tokens], strict=True))
    assert measured[recipes_at("qwen3-32b", 2, "h200").recipe(tokens)] <= TIE * min(measured.values())


def fp8_prompts(turned=False):
    """{(model, tokens): {recipe: ms}} of prompts of weights in fp8 on two H200s; mode "replicated" took "fused_norm".

    turned  of the commit whose MLPs turned rows alone
    """
    prompts = {}
    for report in from_json((RESULTS / "h200-x2-fp8-prompts" / "model.w2.json").read_text()):
        if turned and report.machine["commit"] != step_errors.TURNED:
            continue
        for row in report.rows:
            recipe = {"weft.replicated": FUSED_NORM, "weft.sequence_parallel": SEQUENCE_PARALLEL}[row.provider]
            prompts.setdefault((report.subject.split(",")[0], row.shape[2]), {})[recipe] = row.median_us / 1e3
    return prompts


def test_plans_of_fp8_prompts_are_the_measured_ones():
    prompts = fp8_prompts()
    assert len(prompts) == 8 and all(len(ms) == 2 for ms in prompts.values())
    team = SimpleNamespace(rail=None, size=2, is_simulated=False, caps=capabilities.simulated(2))
    for (model, tokens), ms in prompts.items():
        config = config_of(model)
        layer, sizes = layer_of(config.quantized("fp8"), 2), {"hidden_size": config.hidden_size, "dtype": config.dtype}
        plan = plan_step(tokens, mode="auto", team=team, layer=layer, **sizes)
        few = plan_step(tokens, mode=SEQUENCE_PARALLEL, team=team, layer=layer, **sizes)
        assert isinstance(few.recipe, GatheredMLP) == (tokens <= 1024)  # turns no rows
        assert plan.mode == (SEQUENCE_PARALLEL if ms[SEQUENCE_PARALLEL] < ms[FUSED_NORM] else REPLICATED), (
            model,
            tokens,
        )


# (model, tokens) -> designs that plans of 285370a5 had for qkv, gate and up, o and down: pipelined or sequential.
TURNED = {
    ("qwen3-32b", 512): "ssss", ("qwen3-32b", 768): "ppss", ("qwen3-32b", 1024): "psss",
    ("qwen3-8b", 512): "spss", ("qwen3-8b", 768): "spss", ("qwen3-8b", 1024): "ppss",
}  # fmt: skip


def test_prompts_whose_mlps_turned_rows_took_as_long_as_turning_costs():
    """And from 3 to 11 % less is predicted without."""
    kinds, layout, prompts = (
        {"s": "sequential", "p": "pipelined"},
        Layout(world_size=2, quantization="fp8"),
        fp8_prompts(turned=True),
    )
    errors = {True: [], False: []}
    for (model, tokens), designs in TURNED.items():
        by_what = dict(zip(("qkv", "gate, up", "o", "down"), designs, strict=True))
        for turns in errors:
            us = 0.0
            for one in launches(config_of(model), (1, tokens, tokens), layout, SEQUENCE_PARALLEL):
                op = one.op if turns else one.op.removesuffix("+local_first")
                made = predict(op, tuple(max(1, int(size)) for size in one.shape), world_size=2)
                seconds = made.by_design[kinds[by_what[one.what]]] if one.what in by_what else made.seconds
                us += one.count * step_costs.fitted().seconds(op, seconds, tokens) * 1e6
            errors[turns].append(us / 1e3 / prompts[model, tokens][SEQUENCE_PARALLEL] - 1)
    assert max(map(abs, errors[True])) < 0.06 and abs(statistics.mean(errors[True])) < 0.02
    assert max(errors[False]) < -0.02 and statistics.mean(errors[False]) < -0.06


def test_rows_that_an_overlapped_gemm_would_turn_in_sequence_go_pipelined():
    """Where the turn takes longer than what a pipelined GEMM takes besides."""
    here = machine(capabilities.simulated(2), 2)
    call = GemmCall(512, 5120, 12800, torch.bfloat16, block_fp8=True)
    assert MATMUL_REDUCE_SCATTER.plan(call, here).name == "sequential"
    turned = MATMUL_REDUCE_SCATTER.plan(call._replace(local_first=True), here)
    assert turned.name == "pipelined" and "sequential" in turned.reason


@pytest.mark.parametrize(("folder", "world_size"), [("h200-x2", 2), ("h100-x2", 2), ("h200-x4", 4)])
def test_recipes_of_layers_are_the_measured_ones(folder, world_size):
    """Of layers by themselves, in which no norm adds up: replicated or split."""
    modes = {"weft.replicated": False, "weft.sequence_parallel": True}
    for part in ("attn", "mlp"):
        by_step = {}
        [report] = from_json((RESULTS / folder / f"{part}.w{world_size}.json").read_text())
        for row in report.rows:
            if row.provider in modes and row.median_us is not None:
                by_step.setdefault(tuple(row.shape), {})[modes[row.provider]] = row.median_us
        assert len(by_step) >= 3
        at = recipes_at("qwen3-32b", world_size, folder[:4])
        for (batch, _, new), measured in by_step.items():
            taken = at.recipe(batch * new) == SEQUENCE_PARALLEL
            assert measured[taken] <= TIE * min(measured.values()), (part, batch, new)


def test_a_change_has_the_least_regret_and_the_earlier_one_in_ties():
    assert change([1, 1, 2, 2], [2, 2, 1, 1]) == 2
    assert change([1, 1, 1], [1, 1.005, 1]) == 3
    assert change([2, 2], [1, 1]) == 0
    assert change([1, 1.2, 1, 1.4], [1.1, 1, 1.1, 1]) == 1  # once, not there and back


@pytest.mark.parametrize("gpu", ["h200", "h100", "b200", "a100"])
def test_published_models_split_prompts_and_not_decode_steps(gpu):
    for name in PUBLISHED:
        config = DecoderConfig.named(name)
        for world_size in (2, 4, 8):
            at = changes(layer_of(config, world_size), world_size, named(gpu))
            assert at.fused_norm >= 128 and at.sharded >= 256, (name, world_size, at)
            # Few rows of experts are gathered in one hop by AG-MoE too.
            assert config.experts is not None or at.gathered >= 128, (name, world_size, at)
            assert at.recipe(1) == FUSED_NORM
            if config.hidden_size >= 4096 and config.experts is None:
                assert at.sharded <= 8192, (name, world_size, at)


def test_few_rows_are_split_on_no_number_of_ranks():
    for world_size in (16, 64):
        assert changes(Layer.dense(4096, world_size), world_size, named("b200")).sharded > 128


def test_one_rank_splits_nothing_and_its_norm_adds_up_parts():
    at = changes(Layer.dense(4096, 1), 1, named("h200"))
    assert at.sharded == math.inf and [at.recipe(tokens) for tokens in (128, 129)] == [FUSED_NORM, REPLICATED]
    assert at.gathered == 128  # in mode sequence_parallel silu is in the GEMM of few rows, as on more ranks


def test_slower_links_split_later():
    layer, of = Layer.dense(4096, 4), named("h200")
    slow = of.__class__(
        **{name: getattr(of, name) for name in of.__slots__} | {"stores": 2e4, "one_link": 2e4, "link": 2e4}
    )
    assert changes(layer, 4, slow).sharded > changes(layer, 4, of).sharded


@pytest.mark.parametrize(
    ("quantization", "few", "many"),
    [
        ("fp8", (0.6, 0.8), (0.6, 0.8)),
        ("fp8_per_channel", (0.6, 0.8), (0.55, 0.75)),
        ("mxfp4", (0.6, 0.85), (1.05, 1.3)),
        ("int4", (0.6, 0.85), (1.05, 1.3)),
    ],
)
def test_quantized_weights_have_times_of_their_own(quantization, few, many):
    """Over those of 16 bits, of one token and of many."""
    config, of = config_of("qwen3-32b"), named("h200")
    layer, plain = layer_of(config.quantized(quantization), 2), layer_of(config, 2)
    for tokens, (least, most) in ((1, few), (4096, many)):
        known = times(tokens, plain, 2, of)
        for recipe in (FUSED_NORM, SEQUENCE_PARALLEL) if tokens > 1 else (FUSED_NORM,):
            assert least < times(tokens, layer, 2, of)[recipe] / known[recipe] < most
    at = changes(layer, 2, of)
    assert at.fused_norm >= 128 and 256 <= at.sharded <= 4096 and at.recipe(1) == FUSED_NORM


def test_layers_have_the_format_of_their_weights():
    config = config_of("qwen3-30b-a3b")
    variants = {"fp8": "+block_fp8", "fp8_per_channel": "+channel_fp8", "mxfp4": "+four_bit", "int4": "+int4", None: ""}
    for quantization, variant in variants.items():
        layer = layer_of(config.quantized(quantization), 2)
        assert (layer.variant, layer.mixture.variant) == (variant, variant)
    # As gpt-oss has it; and activations in fp32, for which weights are converted.
    experts = config.quantized("mxfp4")
    experts = replace(experts, quantization=replace(experts.quantization, ignored=("self_attn",)))
    assert (layer_of(experts, 2).variant, layer_of(experts, 2).mixture.variant) == ("", "+four_bit")
    assert layer_of(config.quantized("fp8"), 2, item=4) == layer_of(config, 2, item=4)


def test_matrices_that_a_checkpoint_names_one_by_one_count_as_not_quantized():
    def variants(name, *ignored):
        config = config_of(name).quantized("fp8")
        layer = layer_of(replace(config, quantization=replace(config.quantization, ignored=ignored)), 2)
        return layer.variant, layer.mixture and layer.mixture.variant

    attention = [f"model.layers.{at}.self_attn.{one}_proj" for at in range(48) for one in "qkvo"]
    assert variants("qwen3-30b-a3b", *attention) == ("", "+block_fp8")
    assert variants("qwen3-30b-a3b", r"re:.*mlp\.experts.*", "mlp.gate") == ("+block_fp8", "")
    assert variants("qwen3-30b-a3b", "model.layers.0", "model.layers.47") == ("+block_fp8", "+block_fp8")
    # Layers of linear attention have a matrix of this name; the last layer is none of them.
    assert config_of("qwen3.6-27b").linear_attention.layers[-1] is False
    linear = [f"model.layers.{at}.linear_attn.out_proj" for at in range(63)]
    assert variants("qwen3.6-27b", *linear) == ("", None)


def test_layers_predictions_and_plans_have_one_recipe():
    """The engine's plan of a quantized model takes the recipe that ``weft predict`` and ``weft plan`` print, at each change."""
    config = config_of("qwen3-8b").quantized("fp8")
    layer, of = layer_of(config, 2), named("h200")
    assert layer == layer_in(config_of("qwen3-8b"), Layout(world_size=2, quantization="fp8"))
    team = SimpleNamespace(rail=None, size=2, is_simulated=False, caps=capabilities.simulated(2))
    at = changes(layer, 2, of)
    for tokens in (1, at.sharded - 1, at.sharded, 8192):
        plan = plan_step(tokens, mode="auto", hidden_size=4096, dtype=torch.bfloat16, team=team, layer=layer)
        assert (plan.mode == SEQUENCE_PARALLEL) == (at.recipe(tokens) == SEQUENCE_PARALLEL)
        assert "predicted µs of a layer: " in plan.reason
        assert recipe_of(config, tokens, Layout(world_size=2), "h200") == at.recipe(tokens)

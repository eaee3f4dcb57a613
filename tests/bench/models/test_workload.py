"""`weft bench` on the levels of layers, models and whole answers: on simulated ranks, with the tiny model."""

import gc
import re
import types
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

import weft
from tests.bench import canned
from tests.teacher_forced import all_logits
from weft.bench.command import command as bench
from weft.bench.harness import report, runner
from weft.bench.harness.bench import Options
from weft.bench.harness.limits import Limits
from weft.bench.models import baseline, generate
from weft.bench.models.baseline import Baseline, Functions
from weft.bench.models.breakdown import KINDS, Kernel, _started, breakdown, by_name, kind_of
from weft.bench.models.flags import ModelFlags
from weft.bench.models.problem import StepProblem, cold_layers
from weft.bench.models.roofline import roofline, weights
from weft.bench.models.sessions import TorchSession, WeftSession, build, in_mode, of_all_ranks
from weft.bench.models.speculate import speculation_of
from weft.bench.models.step import FORCED_PROMPT
from weft.bench.models.steps import TINY_CONFIG, check_split, config_of, parse_steps, words_of
from weft.bench.models.workload import ModelWorkload
from weft.bench.render.sheets import sheets
from weft.bench.workloads import read
from weft.engine.config import EngineConfig
from weft.models.config import DecoderConfig
from weft.models.families import PUBLISHED
from weft.models.family import AttentionOptions, BlockOptions, ExpertOptions
from weft.parallel.reference import Reference
from weft.parallel.rotary import Rotary, Yarn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
app = typer.Typer(pretty_exceptions_enable=False)
app.command("bench")(bench)
# 390 GB/s of NVLink and 5 µs an all-reduce: what the sums below were done with by hand.
ASSUMED = Limits(link=390e9, flops=780e12, memory=4.3e12, latency=5e-6)


def workload(level, *words, providers=(), **more):
    return ModelWorkload(
        name=level, model="tiny", shapes=parse_steps(level, words, TINY_CONFIG), words=providers, **more
    )


def run(made, world_size=2, check_only=False):
    def main(team):
        return runner.run_workloads(team, [made], Options(check_only=check_only), None, lambda line: None)

    return weft.simulate(main, world_size)[0][0]


def give_few_tokens(monkeypatch):
    """Two given tokens after the prompt, not eight, where a model is compared first: they take the same path."""
    for module in ("step", "problem"):
        monkeypatch.setattr(f"weft.bench.models.{module}.FORCED_STEPS", 2)


# --- words ---------------------------------------------------------------------------------------------------------------


def test_words_name_steps():
    repeated, with_commas = (
        ["decode:1x128,32x1024", "prefill:32x128", "decode:1x128"],
        ["decode:1x128,32x1024,prefill:32x128"],
    )
    for words in (repeated, with_commas):
        found = parse_steps("model", words, config_of("qwen3-32b"))
        assert [(shape.size, shape.label) for shape in found] == [
            ((1, 128, 1), "decode 1x128"),
            ((32, 1024, 1), "decode 32x1024"),
            ((32, 128, 128), "prefill 32x128"),
        ]
    assert words_of("attn", "decode", (1, 2), (8,)) == ("decode:1x8,2x8",)
    assert words_of("model", None, (), (8,)) == ("decode:1x8", "prefill:1x8")
    (shape,) = parse_steps("generate", ["2x6+3"], TINY_CONFIG)
    assert (shape.size, shape.label) == ((2, 6, 3), "2 prompts of 6, 3 new")


def test_shares_are_equal_or_refused():
    for world_size in (1, 8, 16):
        check_split("qwen3-32b", config_of("qwen3-32b"), world_size)
    with pytest.raises(ValueError, match="--world-size 40 does not divide the intermediate_size=17408 of .*; take 8"):
        check_split("qwen3-14b", config_of("qwen3-14b"), 40)


def test_the_simulator_takes_the_steps_that_its_refusals_name():
    for level, word, smaller in (
        ("model", "prefill:9999x100", "prefill:10x100"),
        ("attn", "decode:9999x3", "decode:341x3"),
        ("generate", "9999x60+4", "16x60+4"),
    ):
        assert len(parse_steps(level, [word], TINY_CONFIG)) == 1
        with pytest.raises(ValueError, match="take " + re.escape(smaller)):
            parse_steps(level, [word], TINY_CONFIG, tiny=True)
        assert parse_steps(level, [smaller], TINY_CONFIG, tiny=True) == parse_steps(level, [smaller], TINY_CONFIG)


# --- the roofline --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "shape", "memory_ms", "with_all_reduces_ms"),
    [
        (2, (1, 128, 1), 7.44, 8.09),
        (2, (32, 1024, 1), 8.44, 9.18),
        (2, (128, 4096, 1), 23.42, 24.49),
        (4, (1, 128, 1), 3.72, 4.37),
        (4, (32, 1024, 1), 4.22, 5.02),
        (4, (128, 128, 1), 3.97, 5.25),
        (4, (128, 4096, 1), 11.71, 12.99),
    ],
)
def test_the_roofline_of_decoding_is_what_was_computed_by_hand(world_size, shape, memory_ms, with_all_reduces_ms):
    """Qwen3-32B: 487.6 M weights a layer, a head of 1.56 GB, 256 KiB of keys and values a token."""
    found = roofline("model", config_of("qwen3-32b"), world_size, shape, "bf16", ASSUMED)
    assert (found.gemms + found.head + found.attention) / 1e3 == pytest.approx(memory_ms, abs=0.006)
    assert (found.floor + found.wire) / 1e3 == pytest.approx(with_all_reduces_ms, abs=0.006)
    assert found.exposed == 0


def test_the_roofline_of_prefill_and_of_single_layers():
    config = config_of("qwen3-32b")
    found = roofline("model", config, 4, (32, 128, 128), "bf16", ASSUMED)
    assert found.gemms / 64 == pytest.approx(1280, abs=1)
    assert found.wire / 128 == pytest.approx(161, abs=0.5)  # 2 * 3/4 * 4096 * 5120 * 2 bytes at 390 GB/s
    assert (found.floor - found.exposed + found.wire) / 1e3 == pytest.approx(103.5, abs=0.1)
    qkv_and_o, gate_up_and_down = (
        roofline(level, config, 4, (1, 1, 1), "bf16", ASSUMED).gemms for level in ("attn", "mlp")
    )
    assert qkv_and_o == pytest.approx((12.2 + 9.8) / 2 * 10**0, abs=0.1)
    assert gate_up_and_down == pytest.approx((61.0 + 30.5) / 2, abs=0.1)
    # O has 2048 of K on each of four ranks: its GEMM of 4096 rows is shorter than the wire, QKV's and its together are not.
    alone = roofline("attn", config, 4, (32, 128, 128), "bf16", ASSUMED)
    assert alone.exposed == max(0, alone.wire - alone.gemms)
    assert roofline("mlp", config, 1, (1, 128, 1), "bf16", ASSUMED).latency == 0
    assert roofline("model", config, 4, (1, 128, 1), "fp32", ASSUMED) is None
    assert roofline("model", config, 4, (1, 128, 1), "bf16", None) is None


def test_the_roofline_counts_windows_and_biases():
    """Mistral 7B of version 0.1 has a window of 4096 tokens in all layers, that of 0.3 none."""

    def attention(model, *shape):
        return roofline("model", config_of(model), 1, shape, "bf16", ASSUMED).attention

    assert attention("mistral-7b", 8, 8192, 1) == attention("mistral-7b-v0.3", 8, 4096, 1)
    assert attention("mistral-7b", 8, 4000, 1) == attention("mistral-7b-v0.3", 8, 4000, 1)
    pairs = 4096 * 4097 / 2 + 4096 * 4096
    assert attention("mistral-7b", 1, 8192, 8192) == pytest.approx(32 * 4 * pairs * 32 * 128 / ASSUMED.flops * 1e6)
    # In one of two layers it counts once.
    half = replace(TINY_CONFIG, attention=AttentionOptions(windows=(None, 8)))
    found, plain, windowed = (
        roofline(
            "model", replace(half, attention=AttentionOptions(windows=windows)), 1, (1, 64, 1), "bf16", ASSUMED
        ).attention
        for windows in ((None, 8), (None,), (8,))
    )
    assert found == pytest.approx((plain + windowed) / 2)
    with_bias = weights(replace(TINY_CONFIG, attention=AttentionOptions(bias=True)), 2)["qkv"]
    assert with_bias - weights(TINY_CONFIG, 2)["qkv"] == (4 + 2 * 2) * 16


def test_the_roofline_counts_the_experts_that_tokens_choose():
    """Qwen3-30B-A3B, 128 experts of which a token chooses 8; of a few tokens nearly no two choose the same."""

    def of(tokens):
        return roofline("mlp", config_of("qwen3-30b-a3b"), 2, (tokens, 128, 1), "bf16", ASSUMED).gemms

    active = 3 * 768 * 2048 * 64 * 2  # of one rank's 64, all of their bytes
    router = 128 * 2048 * 2
    assert of(1) == pytest.approx(8 / 128 * (active + router) / ASSUMED.memory * 1e6)
    assert of(2) == pytest.approx((1 - (120 / 128) ** 2) * (active + router) / ASSUMED.memory * 1e6)
    assert of(1000) == pytest.approx((active + router) / ASSUMED.memory * 1e6)
    assert config_of("qwen3-30b-a3b").parameters == pytest.approx(30.5e9, rel=0.01)
    assert config_of("qwen3-235b-a22b").parameters == pytest.approx(235e9, rel=0.01)
    assert config_of("mixtral-8x7b").parameters == pytest.approx(46.7e9, rel=0.01)


def test_layers_are_cold_again_by_what_a_step_reads_of_them():
    """A token of Qwen3-30B-A3B meets 4 of a rank's 64 experts, 38 MB of a layer's 604."""
    config = config_of("qwen3-30b-a3b")
    for level, tokens, layers in (("mlp", 1, 5), ("mlp", 4096, 2), ("attn", 1, 8)):
        shape = parse_steps(level, [f"decode:{tokens}x1"], config)[0]
        assert cold_layers(level, config, 2, torch.bfloat16, shape) == layers, (level, tokens)


# --- the baseline --------------------------------------------------------------------------------------------------------


# Two blocks of rows a rank, so that scales differ.
OF_FP8 = replace(TINY_CONFIG, hidden_size=256, intermediate_size=512)
WITH_ALL_OPTIONS = replace(
    TINY_CONFIG,
    model_type="qwen2",
    attention=AttentionOptions(bias=True, windows=(4, None)),
    rotary=Rotary(theta=1e4, scaling=Yarn(factor=4.0, original_max_position_embeddings=64)),
)
EXPERTS = ExpertOptions(num_experts=6, num_experts_per_tok=2, intermediate_size=32)
WITH_EXPERTS = replace(TINY_CONFIG, model_type="qwen3_moe", experts=EXPERTS)
WITH_SHARED = replace(WITH_EXPERTS, experts=replace(EXPERTS, shared_intermediate_size=48, shared_gate=True))
COMPILED = ("torch.compile", "torch.compile+symm", "torch.compile+async_tp")
GEMMA = replace(
    TINY_CONFIG,
    model_type="gemma2",
    attention=AttentionOptions(qk_norm=True, windows=(4, None), scale=0.2, softcap=2.0),
    window_rotary=Rotary(theta=50.0),
    block=BlockOptions(norms_after=True, one_plus_norms=True, activation="gelu_tanh", logits_softcap=2.0),
)
OLMO = replace(
    TINY_CONFIG,
    model_type="olmo2",
    attention=AttentionOptions(qk_norm=True, norm_all_heads=True),
    block=BlockOptions(norms_before=False, norms_after=True, residual_scale=0.5, embedding_scale=3.0),
)
PUBLISHED_SIZES = {
    "vocab_size": 130, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
OF_GPT_OSS = PUBLISHED_SIZES | {
    "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
}  # fmt: skip
IN_16_BITS = ["self_attn", "router", "embed_tokens", "lm_head"]
GPT_OSS = DecoderConfig.from_dict(OF_GPT_OSS)
MXFP4 = DecoderConfig.from_dict(
    OF_GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": IN_16_BITS}}
)
DELTA_NETS = DecoderConfig.from_dict(
    PUBLISHED_SIZES
    | {"model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
)
LATENTS = DecoderConfig.from_dict(
    PUBLISHED_SIZES
    | {"model_type": "deepseek_v2", "num_key_value_heads": 8, "kv_lora_rank": 32, "q_lora_rank": None, "v_head_dim": 16}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
)
CONFIGS = {
    "qwen3": TINY_CONFIG, "all options": WITH_ALL_OPTIONS, "experts": WITH_EXPERTS, "shared expert": WITH_SHARED,
    "gemma": GEMMA, "olmo": OLMO, "gpt-oss": GPT_OSS,
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_baseline_is_the_model(world_size, config):
    """Logits of the model's own mode "torch", prefilled and decoded, in fp32."""

    def main(team):
        model = build(config, team, "torch", torch.float32)
        tokens = torch.randint(130, (3, 9), generator=torch.Generator().manual_seed(0))
        expected = all_logits(model, tokens)
        session = TorchSession(Baseline(model), 3, 9)
        found = [session.prefill(tokens[:, :6], session.prompts(6))]
        found += [session.decode(tokens[:, place], torch.full((3,), place)) for place in (6, 7, 8)]
        for place, logits in enumerate(found, start=5):
            whole = model.lm_head.gather(logits)
            torch.testing.assert_close(whole, expected[:, place], atol=1e-4, rtol=1e-4)
            assert torch.equal(session.choose(logits), whole.argmax(-1))
        return True

    assert all(weft.simulate(main, world_size))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_torch_compile_traces_a_layer_whole(config):
    """Without breaks of the graph, prefilled and decoded. Its backend does not compile here."""
    torch._dynamo.reset()  # all configurations together would pass its limit of graphs of one function

    def main(team):
        # torch traces a grouped GEMM of bf16 only.
        dtype = torch.float32 if config.experts is None else torch.bfloat16
        baseline = Baseline(build(config, team, "torch", dtype))
        layer = torch.compile(Reference.decoder_layer, fullgraph=True, dynamic=False, backend="eager")
        functions = Functions(recipe=baseline.eager.recipe, layer=layer)
        tokens = torch.randint(130, (2, 9), generator=torch.Generator().manual_seed(0))
        sessions = [TorchSession(baseline, 2, 9, run) for run in (None, functions)]
        for logits in (
            [session.prefill(tokens[:, :8], session.prompts(8)) for session in sessions],
            [session.decode(tokens[:, 8], torch.full((2,), 8)) for session in sessions],
        ):
            assert torch.equal(*logits)

    weft.simulate(main, 1)


def test_modes_share_weights():
    def main(team):
        for config in (TINY_CONFIG, replace(TINY_CONFIG, tie_word_embeddings=True)):
            owner = build(config, team, "torch", torch.bfloat16)
            other, fresh = in_mode(owner, "gemm_ar"), build(config, team, "gemm_ar", torch.bfloat16)
            assert [plain(module) for module in other.modules()] == [plain(module) for module in fresh.modules()]
            pairs = zip(other.named_parameters(), owner.named_parameters(), fresh.named_parameters(), strict=True)
            for (name, mine), (_, theirs), (_, same) in pairs:
                assert mine.data_ptr() == theirs.data_ptr() and mine is not theirs, name
                assert torch.equal(mine, same), name
            assert other.angles is owner.angles
        return True

    def plain(module):
        return type(module), {k: v for k, v in vars(module).items() if k[0] != "_" and not isinstance(v, torch.Tensor)}

    assert weft.simulate(main, 1) == [True]


def test_weights_exist_once_beside_an_engine(monkeypatch):
    heads = []

    class Counted(generate.Engine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            shape = self.model.lm_head.weight.shape
            alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.shape == shape]
            heads.append(len({x.data_ptr() for x in alive}))

    monkeypatch.setattr(generate, "Engine", Counted)
    found = run(
        workload("generate", "2x5+3", modes=("ag_rs", "gemm_ar"), providers=("weft", "torch.eager")), world_size=1
    )
    assert [row.reason for row in found.rows] == [None] * 3
    assert heads == [2, 2]  # the embedding has the head's shape


def test_an_engine_has_the_layout_of_experts_that_is_asked_for(monkeypatch):
    given = {}
    made = types.SimpleNamespace(model=None)
    monkeypatch.setattr(generate, "Engine", lambda *sizes, **options: given.update(options) or made)
    of_step = types.SimpleNamespace(share=lambda model: None, config=None, dtype=None)
    fields = {"batch": 1, "length": 4, "new": 2, "speculative": None, "expert_layout": "slices", "team": None}
    generate.weft(types.SimpleNamespace(of_step=of_step, prompts=torch.zeros(1, 4), **fields), "auto")
    assert given["expert_layout"] == "slices"


# --- checking ------------------------------------------------------------------------------------------------------------


def test_a_model_is_checked_and_timed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    give_few_tokens(monkeypatch)
    file, picture = tmp_path / "x.json", tmp_path / "x.svg"
    flags = ["--mode", "gemm_ar", "--check", "--json", str(file), "--plot", str(picture)]
    result = CliRunner().invoke(app, ["model", "--shapes", "decode:3x4", *flags])
    assert result.exit_code == 0, result.output
    assert "times mean nothing" in result.stdout
    (found,) = read(file)
    assert (found.op, found.subject, found.is_simulated) == ("model", "tiny", True)
    assert "relative RMS" not in result.stdout
    rows = {row.provider: row for row in found.rows}
    assert list(rows) == ["weft.replicated", "torch.eager", *COMPILED]
    for name in ("weft.replicated", "torch.eager"):
        assert rows[name].median_us > 0
        assert rows[name].reason is None
    assert 0 < rows["weft.replicated"].rms_error < 0.05
    for name in COMPILED:
        assert "does not run on simulated ranks" in rows[name].reason
    assert "given tokens" in found.protocol["check"]
    assert picture.read_text().startswith("<svg")


def neighbours_experts(model):
    for layer in model.layers:
        layer.mlp.down.data = layer.mlp.down.data.roll(1, 0)


def drop_bias(model):
    for layer in model.layers:
        layer.self_attn.qkv_proj.bias.data = torch.zeros_like(layer.self_attn.qkv_proj.bias)


@pytest.mark.parametrize(
    ("name", "spoil", "complaint"),
    [
        ("llama-3.1-70b", None, None),
        pytest.param("qwen2.5-72b", None, None, marks=pytest.mark.sweep),
        ("qwen2.5-72b", drop_bias, "wrong answer: relative RMS"),
        ("mistral-7b", None, None),
        pytest.param("qwen3-30b-a3b", None, None, marks=pytest.mark.sweep),
        ("qwen3-30b-a3b", neighbours_experts, "wrong answer: relative RMS"),
        ("mixtral-8x7b", None, None),
    ],
)
def test_published_models_with_tiny_sizes_run_and_are_checked(name, spoil, complaint, monkeypatch):
    sizes = {
        name: getattr(TINY_CONFIG, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    }
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"sliding_window": 4} if name == "mistral-7b" else {}
    sizes |= (
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if name == "qwen3-30b-a3b" else {}
    )
    monkeypatch.setitem(PUBLISHED, name, PUBLISHED[name] | sizes)

    def spoiled(model, mode):
        made = in_mode(model, mode)
        spoil(made)
        return made

    if spoil is not None:
        monkeypatch.setattr("weft.bench.models.problem.in_mode", spoiled)
    give_few_tokens(monkeypatch)
    made = replace(workload("model", "decode:2x6", modes=("gemm_ar",), providers=("weft",)), model=name)
    [row] = run(replace(made, teacher_forced=True), check_only=True).rows
    assert row.reason is None if complaint is None else re.search(complaint, row.reason)


def with_config(monkeypatch, config):
    """Take ``config`` for the tiny model."""
    for module in ("steps", "workload"):
        monkeypatch.setattr(f"weft.bench.models.{module}.config_of", lambda model, layers=None: config)


def test_experts_stored_in_4_bits_are_checked(monkeypatch):
    """By weights in 16 bits, which eager torch makes for the check and is not timed with."""
    with_config(monkeypatch, MXFP4)
    made = workload("model", "prefill:1x4", modes=("auto",))
    [row] = run(made, 1, check_only=True).rows
    assert (row.provider, row.reason) == ("weft.auto", None) and 0 < row.rms_error < 0.08

    def spoiled(model, mode):
        made = in_mode(model, mode)
        neighbours_experts(made)
        return made

    monkeypatch.setattr("weft.bench.models.problem.in_mode", spoiled)
    assert "wrong answer: " in run(made, 1, check_only=True).rows[0].reason


@pytest.mark.parametrize(
    ("config", "lacked"),
    [(DELTA_NETS, "gated delta nets"), (LATENTS, "latent attention")],
    ids=["delta nets", "latents"],
)
def test_what_eager_torch_does_not_compute_runs_alone_and_is_named(config, lacked, monkeypatch):
    with_config(monkeypatch, config)
    steps, only = (
        ["model@prefill:2x5,decode:2x6", "--check-only", "--mode", "auto"],
        ["--providers", "weft,torch.eager"],
    )
    result = CliRunner().invoke(app, [*steps, *only])
    assert result.exit_code == 0, result.output
    for step in ("prefill 2x5", "decode 2x6"):
        line = next(line.split() for line in result.stdout.splitlines() if line.startswith(step))
        assert line[2:4] == ["right", "–"]
    assert f"torch.eager: it does not compute {lacked}\n" in result.stdout
    assert f"Eager torch does not compute {lacked}: answers are only checked to be finite" in result.stdout
    for words, message in (
        (["attn"], f"attn does not time {lacked}"),
        (["model", "--check"], f"not compute {lacked} of"),
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and message in refused.stderr

    def spoiled(model, mode):
        made = in_mode(model, mode)
        made.norm.weight.data = torch.full_like(made.norm.weight, torch.nan)
        return made

    monkeypatch.setattr("weft.bench.models.problem.in_mode", spoiled)
    found = run(workload("model", "prefill:2x5", modes=("auto",), providers=("weft",)), check_only=True)
    assert "NaN or infinite numbers" in found.rows[0].reason


def test_answers_that_are_compared_with_nothing_are_counted(monkeypatch):
    with_config(monkeypatch, LATENTS)
    made = workload("generate", "1x3+2", modes=("auto",), providers=("weft",))
    [row] = run(made, 1, check_only=True).rows
    assert row.reason is None and made.check_rule == generate.COUNTED


def test_prompts_need_no_answer_of_eager_torch_beside_a_random_cache(monkeypatch):
    def expected(problem, local=False):
        raise AssertionError("compared")

    monkeypatch.setattr(StepProblem, "answer", expected)
    made = replace(workload("model", "prefill:2x5", providers=("weft.auto",)), random_cache=True)
    assert [row.reason for row in run(made, check_only=True).rows] == [None]
    assert made.check_rule.startswith("finite logits")
    # More tokens than the model has positions.
    [shape] = parse_steps("model", ["prefill:1x300"], TINY_CONFIG, random_cache=True)
    assert shape.size == (1, 300, 300)


@pytest.mark.parametrize("layout", [None, "slices", (2, 4)])
@pytest.mark.parametrize(("layers", "quantization"), [(None, None), (3, None), (3, "fp8_per_channel")])
def test_a_reports_subject_names_its_workload(layers, quantization, layout):
    made = ModelWorkload(
        name="mlp", shapes=(), dtype="fp16", model="qwen3-30b-a3b", layers=layers, expert_layout=layout,
        quantization=quantization, speculate="3:2.5" if layers else None,
    )  # fmt: skip
    assert ModelWorkload.of_subject("mlp", made.subject, "fp16") == made
    with pytest.raises(ValueError, match="heads"):
        ModelWorkload.of_subject("mlp", "tiny, 4 heads", "fp16")


def other_half_of_features(model):
    for layer in model.layers:
        layer.mlp.down.data = layer.mlp.down.data.flip(-1)


@pytest.mark.parametrize(("layout", "words"), [("slices", "experts slices"), ((1, 2), "experts 1x2")])
def test_experts_in_another_layout_are_checked_and_named(layout, words, monkeypatch):
    """Both ranks hold half of the features of all 6 experts."""
    monkeypatch.setattr("weft.bench.models.workload.config_of", lambda model, layers: WITH_EXPERTS)
    made = workload("model", "decode:2x6", "prefill:1x3", modes=("auto",), providers=("weft", "torch.eager"))
    made = replace(made, expert_layout=layout)
    found = run(made, check_only=True)
    assert [row.reason for row in found.rows] == [None] * 4
    assert found.subject == f"tiny, {words}"
    assert f"model of tiny, {words}" in sheets(found)[0].title
    held = []

    def spoiled(model, mode):
        made = in_mode(model, mode)
        held.append(made.layers[0].mlp.down.shape)
        other_half_of_features(made)
        return made

    monkeypatch.setattr("weft.bench.models.problem.in_mode", spoiled)
    rows = run(made, check_only=True).rows
    assert {tuple(shape) for shape in held} == {(6, TINY_CONFIG.hidden_size, 16)}
    assert all("relative RMS" in row.reason for row in rows if row.provider == "weft.auto")


def half_of_scales_too_large(model):
    for layer in model.layers:
        scales = layer.mlp.down_proj.scales.scales
        right, wrong = scales.data.chunk(2)
        scales.data = torch.cat((right, 1.5 * wrong))


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel"])
def test_weights_in_fp8_are_checked_and_named(quantization, monkeypatch):
    monkeypatch.setattr("weft.bench.models.workload.config_of", lambda model, layers: OF_FP8)
    made = replace(workload("mlp", "decode:2x6", modes=("gemm_ar",), teacher_forced=True), quantization=quantization)
    report = run(made, check_only=True)
    # Eager torch converts weights in each call, so it only checks.
    assert [(row.provider, row.reason) for row in report.rows] == [("weft.replicated", None)]
    assert report.subject == f"tiny, weights in {quantization}"

    def spoiled(model, mode):
        made = in_mode(model, mode)
        half_of_scales_too_large(made)
        return made

    monkeypatch.setattr("weft.bench.models.problem.in_mode", spoiled)
    [row] = run(made, check_only=True).rows
    assert re.search("relative RMS .* of layer 0, more than 0.08", row.reason or "")


def test_the_roofline_counts_a_byte_for_a_weight_in_fp8():
    config = config_of("qwen3-32b")
    for shape in ((1, 128, 1), (32, 128, 128)):
        whole, half = (roofline("model", one, 2, shape, "bf16", ASSUMED) for one in (config, config.quantized("fp8")))
        assert half.gemms == pytest.approx(whole.gemms / 2)
        assert half.head == whole.head


def test_the_roofline_reads_weights_of_4_bits_and_multiplies_16():
    config = config_of("qwen3-32b")
    quarter = config.quantized("mxfp4")
    few, many = ([roofline("model", one, 2, shape, "bf16", ASSUMED).gemms for one in (config, quarter)]
                 for shape in ((1, 128, 1), (32, 128, 128)))  # fmt: skip
    assert few[1] == pytest.approx(few[0] * 4.25 / 16) and many[1] == pytest.approx(many[0])


@pytest.mark.parametrize("level", ["mlp", "attn"])
@pytest.mark.parametrize("mode", ["ag_rs", "gemm_ar"])
def test_layers_are_checked_in_both_modes(level, mode):
    """3 tokens over 2 ranks: sharded, one of the rows is padding."""
    found = run(workload(level, "decode:3x4", "prefill:1x3", modes=(mode,), providers=("weft",)), check_only=True)
    assert [row.reason for row in found.rows] == [None, None]
    assert all(0 < row.rms_error < 0.02 for row in found.rows)


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("model", "; logits after a prompt and 8 given tokens, likewise"),
        ("mlp", "; outputs of all layers that the timing rotates through, likewise"),
        ("attn", "; outputs of all layers that the timing rotates through, likewise"),
        ("generate", ""),
    ],
)
def test_the_protocol_says_what_is_compared_first(level, said):
    step = "2x5+3" if level == "generate" else "decode:2x6"
    found, plain = (
        runner.protocol(workload(level, step, teacher_forced=first), Options(), False, None) for first in (True, False)
    )
    assert found["check"] == plain["check"] + said


def test_modes_and_their_providers_have_a_former_name_too():
    for name in ("replicated", "gemm_ar"):
        ModelFlags(mode=name).check_ops({"model": ()}, False)
        for asked in ({"modes": (name,), "providers": ("weft",)}, {"providers": (f"weft.{name}",)}):
            assert [one.name for one in workload("model", "decode:2x6", **asked).providers()] == ["weft.replicated"]
    flags = next(one for one in typer.main.get_command(app).params if one.name == "mode")
    assert "auto, sequence_parallel, replicated" in flags.help and "gemm_ar" not in flags.help
    made = canned.model()
    made.rows = [replace(made.rows[0], provider="weft.gemm_ar")]
    assert [row.provider for row in report.from_json(report.to_json([made]))[0].rows] == ["weft.replicated"]


def test_the_protocol_of_answers_says_nothing_of_graphs_and_events():
    made = runner.protocol(workload("generate", "2x5+3"), Options(quick=True), False, 1.25)
    assert list(made) == ["timing", "alternation", "rounds", "data", "statistic", "check"]
    assert made["rounds"] == "3 of whole answers"
    assert not any(word in str(made) for word in ("event", "graph", "120 MB", "in a row"))
    simulated = runner.protocol(workload("generate", "2x5+3"), Options(), True, None)
    assert "times mean nothing" in simulated["timing"] and simulated["check"] == made["check"]


def swap_gate_and_up(model):
    for layer in model.layers:
        weight = layer.mlp.gate_up_proj.weight
        gate, up = weight.data.chunk(2)
        weight.data = torch.cat((up, gate))


def swap_norms(model):
    for layer in model.layers:
        mixing = layer.self_attn
        mixing.q_norm.weight.data, mixing.k_norm.weight.data = (
            mixing.k_norm.weight.data,
            mixing.q_norm.weight.data * 1.2,
        )


def other_theta(model):
    model.angles = model.angles.roll(1, 0)


def rolled_choice(model):
    best = model.lm_head.argmax
    model.lm_head.argmax = lambda logits: (best(logits) + 1) % 130


@pytest.mark.parametrize(
    ("spoil", "level", "complaint"),
    [
        pytest.param(swap_gate_and_up, "model", "wrong answer: relative RMS", marks=pytest.mark.sweep),
        pytest.param(swap_norms, "model", "wrong answer: relative RMS", marks=pytest.mark.sweep),
        (other_theta, "model", "wrong answer: relative RMS"),
        (rolled_choice, "model", "is not the likeliest"),
        (swap_gate_and_up, "mlp", "relative RMS .* of layer 0, more than 0.02"),
        (swap_norms, "attn", "relative RMS .* of layer 0, more than 0.02"),
    ],
)
def test_a_wrong_model_is_caught(spoil, level, complaint, monkeypatch):
    """Of weft's models only: the baseline has the right weights."""

    def spoiled(model, mode):
        made = in_mode(model, mode)
        spoil(made)
        return made

    monkeypatch.setattr("weft.bench.models.problem.in_mode", spoiled)
    if spoil is not swap_gate_and_up:  # which the first tokens do not show
        give_few_tokens(monkeypatch)
    found = run(
        workload(level, "decode:2x6", modes=("gemm_ar",), providers=("weft", "torch.eager"), teacher_forced=True)
    )
    wrong, right = found.rows
    assert re.search(complaint, wrong.reason)
    assert wrong.reason.startswith("wrong")
    assert wrong.median_us is None
    assert right.reason is None and right.median_us > 0
    assert sheets(found)[0].rows[0][1] == "WRONG"


CONTEXT = ("weft.context_parallel",)


@pytest.mark.parametrize(
    ("level", "step"), [("model", "decode:2x70"), ("model", "prefill:1x5"), ("attn", "decode:1x66")]
)
def test_a_cache_over_the_ranks_is_checked_against_the_baseline(level, step, monkeypatch):
    """70 tokens: a page of 64 at rank 0, 6 tokens at rank 1."""
    made = workload(level, step, providers=CONTEXT, dtype="fp32")
    [row] = run(made, check_only=True).rows
    assert (row.provider, row.reason) == ("weft.context_parallel", None)
    monkeypatch.setattr("weft.bench.models.sessions.of_all_ranks", lambda *given: of_all_ranks(*given).roll(1, 0))
    [row] = run(made, check_only=True).rows
    assert "relative RMS" in row.reason


def test_a_random_cache_may_be_longer_than_the_model_s_positions(monkeypatch):
    shapes = parse_steps("model", ["decode:1x300"], TINY_CONFIG, random_cache=True)
    made = ModelWorkload(name="model", model="tiny", shapes=shapes, words=("weft.auto", *CONTEXT), random_cache=True)
    assert [row.reason for row in run(made, check_only=True).rows] == [None, None]
    monkeypatch.setattr(WeftSession, "fill_at_random", lambda session: session.cache.data.fill_(torch.nan))
    assert all("NaN or infinite numbers" in row.reason for row in run(made, check_only=True).rows)


def test_a_check_that_fails_on_one_rank_is_a_row_with_its_reason(monkeypatch):
    judge = StepProblem.judge

    def failing(problem, actual, local=False):
        if problem.team.rank == 1:
            raise RuntimeError("no memory left")
        return judge(problem, actual, local)

    monkeypatch.setattr(StepProblem, "judge", failing)
    (row,) = run(workload("model", "decode:2x6", providers=("torch.eager",))).rows
    assert row.reason == "could not be checked: rank 1: RuntimeError: no memory left"


# --- what the time goes to -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn_align8>(...)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(...)", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>(...)", "gemm"),
        ("matmul_kernel", "gemm"),
        ("triton_red_fused_mm_0", "gemm"),
        ("matmul_reduce_kernel", "gemm+communication"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("all_reduce_rms_norm_kernel", "all-reduce + norm"),
        ("small_m_kernel", "gemm"),
        ("narrow_kernel", "gemm"),
        ("sum_partials_kernel", "gemm"),
        ("grouped_matmul_kernel", "gemm"),
        ("router_parts_kernel", "routing"),
        ("matmul_route_schedule_kernel", "routing"),
        ("moe_sum_kernel", "routing"),
        ("place_tokens_kernel", "routing"),
        ("gather_words_kernel", "communication"),
        ("moe_combine_kernel", "communication"),
        ("vocab_embedding_kernel", "other"),
        ("all_reduce_kernel", "communication"),
        ("sum_kernel", "communication"),
        ("share_kernel", "communication"),
        ("copy_kernel", "communication"),
        ("add_kernel", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("paged_attention_kernel", "attention"),
        ("decode_attention_kernel", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>(...)", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)", "attention"),
        ("qk_norm_rope_kernel", "pointwise"),
        ("add_rms_norm_kernel", "norms"),
        ("triton_red_fused__fused_rms_norm_mm_0", "gemm"),
        ("silu_mul_kernel", "pointwise"),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(...)",
            "norms",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(...)",
            "pointwise",
        ),
        ("triton_red_fused__fused_rms_norm_add_mul_1", "pointwise"),
        ("triton_poi_fused_mul_silu_split_3", "pointwise"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(...)",
            "other",
        ),
    ],
)
def test_kernels_are_told_by_their_names(name, kind):
    assert kind_of(name) == kind


def test_time_goes_to_kinds_and_gaps():
    """Two steps after two barriers. What comes before their first kernels is nobody's; overlapping time is the first one's."""
    step = [("barrier_kernel", 0, 10), ("matmul_kernel", 12, 20), ("nccl", 18, 30), ("silu_mul_kernel", 31, 32)]
    kernels = [Kernel("fill", -5, -1)] + [Kernel(name, a + at, b + at) for at in (0, 100) for name, a, b in step]
    found = breakdown(kernels[::-1])
    assert found == dict.fromkeys(KINDS, 0.0) | {"gap": 1.0, "gemm": 8.0, "communication": 10.0, "pointwise": 1.0}
    assert sum(found.values()) == 20
    assert breakdown(kernels[:1]) == {}
    assert by_name([*kernels, Kernel("nccl", 130, 132)]) == [
        "      13.0 us in 1.5 launches, median 12.0: nccl",
        "       8.0 us in 1 launches, median 8.0: matmul_kernel",
        "       1.0 us in 1 launches, median 1.0: silu_mul_kernel",
    ]
    assert by_name(kernels[:1]) == []
    # A kernel that runs inside another takes no time of its own.
    assert breakdown([*kernels[:3], Kernel("nccl", 13, 14)])["communication"] == 0


def test_kernels_that_wait_have_what_the_others_leave():
    """Two wait beside the GEMM, the one from before its start, the other until after its end; the copy is within the second's
    time, and after it a third waits alone."""
    step = [
        ("barrier_kernel", 0, 10), ("wait_kernel", 11, 15), ("nvjet_tst_128x256", 12, 20),
        ("wait_kernel", 14, 24), ("Memcpy PtoP (Device -> Device)", 21, 23), ("wait_kernel", 26, 27),
    ]  # fmt: skip
    found = breakdown([Kernel(*one) for one in step])
    assert found == dict.fromkeys(KINDS, 0.0) | {"gemm": 8.0, "communication": 1 + 1 + 2 + 1 + 1, "gap": 2}


# --- whole answers -------------------------------------------------------------------------------------------------------


def test_answers_are_checked_and_timed():
    (row, other) = run(workload("generate", "2x5+3", modes=("gemm_ar",), providers=("weft", "torch.eager"))).rows
    for found in (row, other):
        assert found.reason is None
        assert found.mode == "host"
        assert found.median_us > 0 and found.first_us > 0
        assert found.tokens_per_second > 0


@pytest.mark.parametrize(
    ("steps", "first", "each"),
    [
        ([1, 1, 1, 1], 1.0, 1.0),
        ([2, 1, 1], 1.0, 1.0),  # two tokens of each prompt arrive together
        ([0, 2, 2], 2.0, 0.5),
        ([4], 1.0, 0.25),  # none after the first: the whole time, over all tokens
    ],
)
def test_the_time_per_token_counts_the_tokens_that_arrive_after_the_first(monkeypatch, steps, first, each):
    now = 0.0
    monkeypatch.setattr(generate.time, "perf_counter", lambda: now)

    def answers():
        nonlocal now
        for tokens in steps:
            now += 1.0
            yield [(prompt, 7) for _ in range(tokens) for prompt in range(2)]

    times, found = generate.drawn(types.SimpleNamespace(batch=2, new=4), answers)
    assert (times.first, times.each, times.whole) == (first, each, float(len(steps)))
    assert found == [[7] * 4] * 2


def test_times_of_answers_are_those_of_the_slowest_rank():
    def times(*each):
        return [generate.Times(first=0.002, each=value * 1e-6, whole=0.01) for value in each]

    found = generate.timed([times(10, 11, 90), times(12, 13, 14)], tokens=6)
    assert (found["p10_us"], found["median_us"], found["p90_us"]) == pytest.approx((12, 13, 14))
    assert (found["samples"], found["first_us"], found["tokens_per_second"]) == pytest.approx((3, 2000, 600))


def test_wrong_answers_are_caught(monkeypatch):
    def stuck(problem):
        steps = range(problem.new)
        return generate.answering(problem, lambda: ([(prompt, 7) for prompt in range(problem.batch)] for _ in steps))

    def short(problem):
        return generate.answering(problem, lambda: ([(prompt, 7)] for prompt in range(problem.batch)))

    for make, complaint in ((stuck, r"token \d lies .* RMS below eager torch's choice"), (short, "1 tokens, not 3")):
        monkeypatch.setattr(generate, "eager", make)
        (row,) = run(workload("generate", "2x5+3", providers=("torch.eager",))).rows
        assert re.search("wrong answer: .*" + complaint, row.reason)
        assert row.median_us is None


def test_a_wrong_token_is_found_in_every_group_of_prompts_that_is_checked_at_once(monkeypatch):
    monkeypatch.setattr(generate, "CHECKED_TOKENS", 16)  # of three prompts with 5 + 3 - 1 tokens: two and one
    right = generate.eager

    for wrong in range(3):

        def one_wrong(problem, wrong=wrong):
            prepared = right(problem)

            def run(number):
                times, answers = prepared.run(number)
                answers[wrong][-1] = (answers[wrong][-1] + 7) % problem.of_step.config.vocab_size
                return times, answers

            return replace(prepared, run=run)

        monkeypatch.setattr(generate, "eager", one_wrong)
        (row,) = run(workload("generate", "3x5+3", providers=("torch.eager",)), check_only=True).rows
        assert row.reason.startswith(f"wrong answer: prompt {wrong}: token 2 lies")
    monkeypatch.setattr(generate, "eager", right)
    (row,) = run(workload("generate", "3x5+3", providers=("torch.eager",)), check_only=True).rows
    assert row.reason is None


def test_the_baseline_reads_many_prompts_in_several_passes(monkeypatch):
    """Equal logits and cached keys of every prompt, in one pass of five and in passes of two, two and one."""
    inner = Baseline._logits

    def read(most):
        monkeypatch.setattr(baseline, "PREFILL_TOKENS", most)

        def main(team):
            sizes = []

            def noted(self, tokens, *rest):
                sizes.append(len(tokens))
                return inner(self, tokens, *rest)

            model = Baseline(build(TINY_CONFIG, team, "torch", torch.float32))
            model._logits = types.MethodType(noted, model)
            tokens = torch.randint(TINY_CONFIG.vocab_size, (5, 7), generator=torch.Generator().manual_seed(3))
            session = TorchSession(model, 5, 9)
            return session.prefill(tokens, session.prompts(7)), *session.cache, sizes

        return weft.simulate(main, 2)

    for (*one, at_once), (*other, in_turn) in zip(read(35), read(20), strict=True):
        assert (at_once, in_turn) == ([35], [14, 14, 7])
        for expected, found in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected)


def test_symmetric_memory_grows_with_the_tokens_of_a_pass():
    """Not with those that a decode step finds in its cache, or that an engine reads in later chunks."""
    row = TINY_CONFIG.hidden_size * 2

    def rows(level, *words, **more):
        return workload(level, *words, dtype="bf16", **more).moved_bytes() // row

    assert rows("model", "decode:3x50", "prefill:2x5") == 10
    assert rows("model", "decode:3x50", teacher_forced=True) == 3 * FORCED_PROMPT
    assert rows("attn", "decode:3x50", teacher_forced=True) == 3
    assert rows("generate", "3x5+3") == 15
    assert rows("generate", "1000x50+3") == EngineConfig().chunk_tokens
    assert rows("generate", "9000x50+3") == 9000


def test_a_check_of_answers_that_fails_on_one_rank_is_a_row_with_its_reason(monkeypatch):
    class Failing(TorchSession):
        def __init__(self, model, batch, max_len, functions=None):
            if model.team.rank == 1 and max_len == 5 + 3 - 1:  # the check's: of all tokens but the last
                raise RuntimeError("no memory left")
            super().__init__(model, batch, max_len, functions)

    monkeypatch.setattr(generate, "TorchSession", Failing)
    (row,) = run(workload("generate", "2x5+3", providers=("torch.eager",))).rows
    assert row.reason == "could not be checked: rank 1: RuntimeError: no memory left"


def test_generate_checks_every_token_with_check_or_without():
    how = {"simulated": True, "dtype": "bf16", "words": ()}
    made = ModelFlags(check=True).workload("generate", ("2x5+3",), 2, **how)
    ModelFlags(check=True).check_ops({"generate": ()}, False)
    assert made == ModelFlags().workload("generate", ("2x5+3",), 2, **how)


# --- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--model", "qwen4"], "--model qwen4 is unknown; choose one of qwen3-0.6b"),
        (["model", "--model", "qwen3-32b"], "a machine with GPUs, or run --model tiny"),
        (["model", "--layers", "3"], "--layers 3: tiny has 1 to 2"),
        (["model", "--run-type", "train"], "choose one of prefill, decode"),
        (["generate", "--run-type", "decode"], "leave it out"),
        (
            ["model", "--bsz", "1,999999", "--ctx", "4", "--run-type", "prefill"],
            "take prefill:256x4, or a machine with GPUs",
        ),
        (["generate", "--shapes", "11x90+10"], "at most 1,024 tokens, of all sequences together; take 10x90+10, or"),
        (["mlp", "--shapes", "decode:5x256"], "take decode:4x256, or"),
        (["generate", "--breakdown"], "--breakdown belongs to single steps (mlp, attn, model); generate times whole"),
        (["generate", "--eager", "--check-only"], "--eager belongs to single steps"),
        (["model", "--bsz", "0"], "--bsz 0 is not a list of positive numbers"),
        (["model", "--bsz", "1", "--shapes", "decode:1x4"], "leave one of them out"),
        (["model", "--ctx", "300"], "300 tokens, but the model has 256 positions"),
        (["attn", "--mode", " , "], "--mode ' , ' names nothing"),
        (["attn", "--mode", "torch"], "--mode torch is unknown; choose from auto, sequence_parallel, replicated"),
        (["mlp", "--shapes", "4,5,6"], "is no step of mlp"),
        (["mlp", "--shapes", "decode:1x4x5"], "is no step of mlp"),
        (["generate", "--shapes", "decode:1x4"], "is nothing to generate"),
        (
            ["model", "--providers", "nccl"],
            "model has no provider nccl; it has weft.auto, weft.sequence_parallel, weft.replicated, torch.eager, torch.compile",
        ),
        (
            ["model", "--providers", "vllm"],
            "provider 'vllm' is unknown; model has weft.auto, weft.sequence_parallel, weft.replicated",
        ),
        (
            ["model", "--mode", "auto", "--providers", "weft.sequence_parallel"],
            "model has weft.auto, torch.eager, torch.compile",
        ),
        (
            ["model", "--world-size", "3"],
            "--model tiny: num_attention_heads=8 (num_key_value_heads=4) cannot be split over world_size=3; use a world size "
            "of 1, 2, 4, 8",
        ),
        (["model", "--dtype", "int8"], "--dtype int8 is unknown"),
        (["all-reduce", "--bsz", "4"], "--bsz belongs to mlp, attn, model, generate"),
        (["gemm", "--check"], "--check belongs to mlp, attn, model, generate"),
        (["gemm", "--breakdown"], "--breakdown belongs to mlp, attn, model; gemm takes --shapes"),
        (["gemm", "--layers", "0"], "--layers belongs to mlp"),
        (["model", "--random-cache", "--check"], "--check compares answers, which --random-cache makes meaningless"),
        (["generate", "--random-cache"], "--random-cache belongs to single steps"),
        (["model", "--expert-layout", "slices"], "--expert-layout slices: tiny has no experts; leave it out"),
        (["model", "--quantization", "awq"], "--quantization awq is unknown; choose one of fp8, fp8_per_block"),
        (["all-reduce", "--expert-layout", "slices"], "--expert-layout belongs to mlp, attn, model, generate"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_profiler_that_does_not_start_is_named(monkeypatch, caplog):
    def no_profiler(**_):
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(torch.profiler, "profile", no_profiler)
    assert _started() is None
    assert caplog.messages == ["no breakdown: torch's profiler does not start: CUPTI is in use"]


def test_speculation_is_timed_at_a_stated_acceptance():
    made = replace(workload("generate", "1x6+9", modes=("gemm_ar",)), speculate="3:2.5")
    report = run(made, check_only=True)
    assert [(row.provider, row.reason) for row in report.rows] == [("weft.replicated", None)]
    assert report.subject == "tiny, speculating 3:2.5"
    for words, message in (
        ("3", "is not DRAFTS:TOKENS"),
        ("3:5", "is not in 1 .. num_speculative_tokens"),
        ("0:1", "1 .. 8"),
    ):
        with pytest.raises(ValueError, match=message):
            speculation_of(words)

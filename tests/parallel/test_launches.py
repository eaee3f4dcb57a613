"""Launches of one decoder layer on a rank, by recipe: the difference between a model of two layers and one of one."""

import dataclasses
from collections import Counter

import pytest
import torch

import weft
from weft.kernels.deferred_norm import normed
from weft.layers import MoE
from weft.models import Decoder, DecoderConfig, Qwen3Config
from weft.ops.gemm import cublas, matmul_deferred_norm
from weft.parallel.quantized import Fp8Format
from weft.runtime.virtual_rank import rank_of_this_thread

TINY = dataclasses.replace(
    Qwen3Config.named("qwen3-0.6b"), hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=64,
)  # fmt: skip
PROMPT = [1, 2, 3]
NORMS, GATHERED = {"all_reduce_rms_norm": 2}, {"reduce_scatter": 2, "add_rms_norm": 2, "all_gather": 2}
PROMPTED = {"qk_norm_rope": 1, "paged_prefill_attention": 1}
# By mode and dtype: of a prompt, and of a decode step. A bf16 layer of a decode step is seven launches.
LAUNCHES = [
    ("replicated", torch.bfloat16, {**NORMS, "small_m": 2, "cublas": 2}),
    ("replicated", torch.float32, {**NORMS, "cublas": 4, "silu_mul": 1}),
    ("sequence_parallel", torch.bfloat16, {**GATHERED, "cublas": 4, "silu_mul": 1}),
]

# Heads of 128, and groups of 128 columns that no rank's edge cuts.
WIDE = dataclasses.replace(TINY, hidden_size=256, intermediate_size=512, head_dim=128)
SMALL_M = {**NORMS, "small_m": 4}
# A layer with weights in fp8, by ranks, --quantization and mode. Blocks: seven launches of a decode step, as in bf16, since the
# kernels before GEMMs write rows in fp8. Exceptions: a scale for each token takes a kernel before each GEMM, since several
# programs compute a row; rows that are gathered before an MLP have 16 bits.
FP8 = [
    (1, "fp8", "replicated", SMALL_M),
    (2, "fp8", "replicated", SMALL_M),
    (2, "fp8_per_channel", "replicated", {**SMALL_M, "quantize_rows": 4}),
    pytest.param(
        2, "fp8", "sequence_parallel", {**GATHERED, "all_gather": 3, "small_m": 4, "quantize_rows": 1},
        marks=pytest.mark.sweep,
    ),
]  # fmt: skip


def launches(monkeypatch, layers, tokens, sizes=TINY, world_size=2, like="h200", **options):
    """Launches of rank 0, by kernel; "cublas" for the library's GEMMs."""
    found, run = Counter(), cublas._run

    def main(team):
        config = dataclasses.replace(sizes, num_hidden_layers=layers)
        engine = weft.Engine(config, team, page_size=16, max_seq_len=32, **options)
        engine.generate([PROMPT], max_tokens=tokens, ignore_eos=True)

    def counted(*arguments):
        found["cublas"] += rank_of_this_thread() == 0
        return run(*arguments)

    def note(event):
        _, task, kind, detail = event
        if kind == "launch" and task.startswith("rank 0"):
            found[detail.split()[0].removesuffix("_kernel")] += 1

    with monkeypatch.context() as patch:
        patch.setattr(cublas, "_run", counted)
        weft.simulate(main, world_size, on_event=note, like=like)
    return found


@pytest.mark.parametrize(("mode", "dtype", "expected"), LAUNCHES, ids=lambda value: str(value)[:20])
def test_launches_of_a_layer(mode, dtype, expected, monkeypatch):
    options = {"mode": mode, "dtype": dtype}
    prompt, both = (
        launches(monkeypatch, 2, tokens, **options) - launches(monkeypatch, 1, tokens, **options) for tokens in (1, 2)
    )
    assert prompt == {**expected, **PROMPTED}
    assert both - prompt == {**expected, "decode_attention": 1}


def test_gates_are_a_launch_of_a_prompt_and_none_of_a_decode_step(monkeypatch):
    """Before ``o_proj`` in fp8, whose rows the same kernels write."""
    sizes = dataclasses.replace(WIDE, attention=dataclasses.replace(WIDE.attention, gated=True))
    options = {"mode": "replicated", "dtype": torch.bfloat16, "quantization": "fp8"}
    prompt, both = (
        launches(monkeypatch, 2, tokens, sizes, **options) - launches(monkeypatch, 1, tokens, sizes, **options)
        for tokens in (1, 2)
    )
    assert prompt == {**SMALL_M, **PROMPTED, "sigmoid_mul": 1}
    assert both - prompt == {**SMALL_M, "decode_attention": 1}


@pytest.mark.parametrize(
    ("mode", "like", "expected"),
    [
        ("replicated", "h200", {**NORMS, "small_m": 5, "quantize_rows": 1}),
        # Norms are whole there, so they write rows in fp8 beside the ones of b and a.
        ("replicated", "b200", {**NORMS, "small_m": 4, "cublas": 1}),
        pytest.param(
            "sequence_parallel",
            "h200",
            {**GATHERED, "all_gather": 4, "small_m": 4, "cublas": 1, "quantize_rows": 2},
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_launches_of_a_gated_delta_net_in_fp8(mode, like, expected, monkeypatch):
    """Two more than in 16 bits before the rule, where a norm's scale is deferred: b and a take its rows in 16 bits, and q, k, v
    and z quantize them.

    In a prompt a further one quantizes what the rule gives, for ``out_proj``.
    """
    published = DecoderConfig.named("qwen3.6-27b")
    fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = dataclasses.replace(published, **{name: getattr(WIDE, name) for name in fields})
    options = {"mode": mode, "dtype": torch.bfloat16, "quantization": "fp8", "like": like}

    def of_layers(number, tokens):
        linear = dataclasses.replace(
            published.linear_attention, key_heads=2, value_heads=4, layers=(False, *[True] * number)
        )
        sizes = dataclasses.replace(config, linear_attention=linear)
        return launches(monkeypatch, 1 + number, tokens, sizes, **options)

    prompt, both = (of_layers(2, tokens) - of_layers(1, tokens) for tokens in (1, 2))
    kernels = ("causal_conv1d", "prepare", "scan", "outputs", "rms_norm_gated")
    assert prompt == {**expected, "quantize_rows": expected.get("quantize_rows", 0) + 1, **dict.fromkeys(kernels, 1)}
    assert both - prompt == {**expected, "gated_delta_net_step": 1}


MIXTURE = dataclasses.replace(
    WIDE,
    experts=dataclasses.replace(
        DecoderConfig.named("qwen3-30b-a3b").experts, num_experts=8, num_experts_per_tok=2, intermediate_size=256
    ),
)
EXPERTS = {"matmul_route_schedule": 1, "grouped_matmul": 2}
# The router's GEMM of several tokens is in parts.
OF_A_PROMPT = {"router_parts": 1, "route": 1, "moe_schedule": 1, "grouped_matmul": 2}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("quantization", "gemms"), [(None, {"small_m": 1, "cublas": 1}), ("fp8", {"small_m": 2})], ids=["bf16", "fp8"]
)
def test_launches_of_experts_in_a_layer(quantization, gemms, world_size, monkeypatch):
    """Eight of a decode step, in fp8 as in 16 bits: norms write rows in fp8, before experts beside those of the router."""
    options = {"mode": "replicated", "dtype": torch.bfloat16, "quantization": quantization}
    prompt, both = (
        launches(monkeypatch, 2, tokens, MIXTURE, world_size, **options)
        - launches(monkeypatch, 1, tokens, MIXTURE, world_size, **options)
        for tokens in (1, 2)
    )
    assert prompt == {**NORMS, **gemms, **OF_A_PROMPT, **PROMPTED}
    assert both - prompt == {**NORMS, **gemms, **EXPERTS, "decode_attention": 1}


@pytest.mark.parametrize("world_size", [1, 2])
def test_gated_delta_nets_after_experts_in_fp8(world_size, monkeypatch):
    """The norm after experts writes rows in one form: q, k, v and z quantize rows of 16 bits, also where norms are whole."""
    published = DecoderConfig.named("qwen3.6-35b-a3b")
    fields = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    linear = dataclasses.replace(published.linear_attention, key_heads=2, value_heads=4, layers=(True, True, False))
    experts = dataclasses.replace(
        published.experts, num_experts=8, num_experts_per_tok=2, intermediate_size=256, shared_intermediate_size=256
    )
    sizes = dataclasses.replace(
        published, **{name: getattr(WIDE, name) for name in fields}, linear_attention=linear, experts=experts
    )
    options = {"mode": "replicated", "dtype": torch.bfloat16, "quantization": "fp8", "like": "b200"}
    found = launches(monkeypatch, 3, 2, sizes, world_size, **options)
    assert found["gated_delta_net_step"] == 2 and found["grouped_matmul"] > 0 and found["quantize_rows"] > 0


def test_launches_of_a_layer_of_the_same_bits(monkeypatch):
    """Of a decode step: the tree of the all-reduce, the residual and the norm are one; attention adds up the nodes of qkv."""
    options = {"mode": "invariant", "dtype": torch.bfloat16}
    sizes = dataclasses.replace(WIDE, num_attention_heads=8)
    prompt, both = (
        launches(monkeypatch, 2, tokens, sizes, **options) - launches(monkeypatch, 1, tokens, sizes, **options)
        for tokens in (1, 2)
    )
    # Nodes of gate_up: of a larger one a program adds up both, and a layer is nine launches.
    expected = {**NORMS, "sliced": 4, "sum_nodes": 1, "qk_norm_rope": 1, "fixed_runs": 1, "silu_mul": 1}
    assert prompt == expected and both - prompt == expected


def test_experts_of_the_same_bits_round_their_rows(monkeypatch):
    """Their GEMMs in slices take rows of 16 bits."""
    options = {"mode": "invariant", "dtype": torch.bfloat16, "quantization": "fp8"}
    sizes = dataclasses.replace(MIXTURE, num_attention_heads=8)  # eight slices of 128 columns
    found = launches(monkeypatch, 1, 1, sizes, 1, **options)
    assert found["quantize_rows"] > 0 and found["grouped_matmul"] > 0


@pytest.mark.parametrize(("changed", "more"), [("norms after rotary", {"qk_norm_rope": 1}), ("no gate", {})])
def test_launches_of_norms_after_rotary_and_of_an_mlp_without_a_gate(changed, more, monkeypatch):
    """One more turns q and k; without a gate the same, and torch's operations, which are not counted here."""
    if changed == "no gate":
        sizes = dataclasses.replace(TINY, block=dataclasses.replace(TINY.block, activation="relu2"))
    else:
        sizes = dataclasses.replace(TINY, attention=dataclasses.replace(TINY.attention, norm_after_rotary=True))
    options = {"mode": "replicated", "dtype": torch.bfloat16}
    prompt, both = (
        launches(monkeypatch, 2, tokens, sizes, **options) - launches(monkeypatch, 1, tokens, sizes, **options)
        for tokens in (1, 2)
    )
    gemms = {"small_m": 2, "cublas": 2}
    assert prompt == Counter({**NORMS, **gemms, **PROMPTED}) + Counter(more)
    assert both - prompt == Counter({**NORMS, **gemms, "decode_attention": 1}) + Counter(more)


@pytest.mark.parametrize(
    ("sequences", "gated", "activation"),
    [(65, True, "silu"), (65, False, "silu"), (3, True, "silu"), (65, False, "relu2")],
)
def test_no_operation_of_torch_applies_a_scale(sequences, gated, activation, monkeypatch):
    """cuBLAS computes more than 64 rows; of gated attention, and of MLPs without a gate, no kernel after it would apply one."""
    sizes = dataclasses.replace(TINY, num_hidden_layers=2, attention=dataclasses.replace(TINY.attention, gated=gated))
    sizes = dataclasses.replace(sizes, block=dataclasses.replace(sizes.block, activation=activation))
    by_torch, deferred = [], []
    monkeypatch.setattr(matmul_deferred_norm, "normed", lambda *arguments: by_torch.append(1) or normed(*arguments))

    def main(team):
        model = Decoder(sizes, team, mode="replicated", dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
        table = torch.arange(1, sequences + 1, dtype=torch.int32)[:, None]
        step = model.decode_step(torch.full((sequences,), 5), table, 16)
        deferred.append(step.plan.recipe.deferred_scale)
        model(torch.arange(sequences) % 64, step, model.new_cache(sequences + 1, 16))

    weft.simulate(main, 2)
    assert deferred == [True, True] and not by_torch


def experts_launches(scheme, mode, tokens, world_size=2):
    """Launches of rank 0 for a mixture of experts: by kernel."""
    found = Counter()

    def main(team):
        format = None if scheme is None else Fp8Format(scheme=scheme)
        sizes = {"hidden_size": 256, "intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2}
        options = {"mode": mode, "dtype": torch.bfloat16, "layout": "slices", "formats": lambda names: format}
        moe = MoE(**sizes, team=team, **options)
        for name, parameter in moe.named_parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        moe(torch.ones(tokens, 256).bfloat16())

    def note(event):
        _, task, kind, detail = event
        if kind == "launch" and task.startswith("rank 0"):
            found[detail.split()[0].removesuffix("_kernel").replace("gather_fp8", "gather")] += 1

    weft.simulate(main, world_size, on_event=note)
    return found


@pytest.mark.parametrize(
    ("scheme", "mode", "more"),
    [
        # The rows of the first GEMM; those of the second one are written in fp8.
        ("block", "replicated", {"quantize_rows": 1}),
        ("channel", "replicated", {"quantize_rows": 2}),
        # They are quantized by the kernel that sends them.
        ("block", "sequence_parallel", {}),
        ("channel", "sequence_parallel", {"quantize_rows": 2}),
    ],
)
def test_launches_of_experts_in_fp8_beside_those_of_16_bits(scheme, mode, more):
    plain = experts_launches(None, mode, 6)
    assert plain["grouped_matmul"] == 2
    assert experts_launches(scheme, mode, 6) == plain + Counter(more)


@pytest.mark.parametrize(("world_size", "quantization", "mode", "expected"), FP8)
def test_launches_of_a_layer_in_fp8(world_size, quantization, mode, expected, monkeypatch):
    options = {"mode": mode, "dtype": torch.bfloat16, "quantization": quantization}
    prompt, both = (
        launches(monkeypatch, 2, tokens, WIDE, world_size, **options)
        - launches(monkeypatch, 1, tokens, WIDE, world_size, **options)
        for tokens in (1, 2)
    )
    assert prompt == {**expected, **PROMPTED}
    decode = both - prompt
    assert decode == {**expected, "decode_attention": 1}
    assert (decode.total() == 7) == (expected == SMALL_M)

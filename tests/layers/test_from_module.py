"""Modules of other models: each is computed rightly over ranks, or refused by what is different in it."""

import importlib

import pytest
import torch
from torch import nn

import weft
from weft.layers import TPMLP, PagedCache, Step, TPAttention, plan_layer, rotary_angles

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip


def module_of(name, kind, layer=0, **changes):
    """(attention or MLP with random weights, its config)"""
    folders = {"Qwen3Moe": "qwen3_moe", "Glm4Moe": "glm4_moe", "SeedOss": "seed_oss"}
    folder, stem = folders.get(name, name.lower()), name
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config_of = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{stem}Config")
    config = getattr(transformers, config_of)(**SIZES | changes)
    config._attn_implementation = "eager"
    made = getattr(modeling, f"{stem}{kind}")
    module = made(config, layer_idx=layer) if kind == "Attention" else made(config)
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return module.eval().requires_grad_(False), config, modeling


NORMS = "that is not x / sqrt(mean(x^2) + 1e-06) * weight"
HALVES = "does not pair element i of a head with element i + head_dim / 2"
REFUSED = [
    ("Llama", {"attention_bias": True}, ["lacks nothing and has ['o_proj.bias'] that this layer does not use"]),
    ("Mistral", {"sliding_window": 0}, ["sliding_window=0"]),
    ("SeedOss", {"attention_out_bias": True}, ["has ['o_proj.bias']"]),
    ("Starcoder2", {}, ["has ['o_proj.bias']"]),
    ("Granite", {"attention_multiplier": 0.5}, ["scaling=0.5 instead of head_dim**-0.5=0.25"]),
    ("Gemma2", {"query_pre_attn_scalar": 64}, ["attn_logit_softcapping=50.0", "scaling=0.125"]),
    ("SmolLM3", {"layer": 3, "num_hidden_layers": 4}, ["gives another result for the same weights"]),  # no rotation there
    ("Gemma3", {"layer_types": ["full_attention"]}, [f"q_norm=Gemma3RMSNorm {NORMS}", "scaling=0.0625"]),
    ("Gemma3", {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"]}, [f"k_norm=Gemma3RMSNorm {NORMS}"]),
    ("Phi3", {}, ["a fused qkv_proj (split it"]),
    ("Cohere", {"use_qk_norm": True}, ["a config without rms_norm_eps", "instead of (16,)", HALVES]),
    ("Cohere2", {}, [HALVES]),
    ("Olmo2", {}, ["q_norm=Olmo2RMSNorm with a weight of shape (64,) instead of (16,)"]),
    ("Glm", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", HALVES]),
    ("Glm4Moe", {"use_qk_norm": True, "partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
    ("Qwen3", {"attention_bias": True}, ["has ['o_proj.bias']"]),
    ("Qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5.0, "factor": 4.0}}, ["rope_type='dynamic'"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "messages"), REFUSED, ids=lambda value: str(value)[:40])
def test_attention_that_is_something_else_is_refused_by_what_it_is(name, changes, messages):
    module, config, _ = module_of(name, "Attention", **changes)
    with pytest.raises(ValueError) as caught:
        weft.simulate(lambda team: TPAttention.from_module(module, config, team, "torch"), 1)
    assert "\n" not in str(caught.value) and f"module={type(module).__name__} " in str(caught.value)
    for message in messages:
        assert message in str(caught.value)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16}
SAME = [
    ("Qwen3", {}, None),
    ("Qwen3", {"rope_parameters": YARN}, None),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, 3),
    ("Qwen3Moe", {}, None),
    ("Llama", {"rope_parameters": LLAMA3}, None),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}}, None),
    ("Qwen2", {}, None),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}, 2),
    ("Mistral", {"sliding_window": 4}, 4),
    ("Mistral", {"sliding_window": None}, None),
    ("Llama", {"sliding_window": 4}, None),  # which its code does not read
    ("SeedOss", {}, None),
    ("Gemma", {}, None),
    ("Mixtral", {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "window"), SAME, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("world_size", [2, 4])  # with 4 ranks, two share a KV head
def test_attention_that_is_the_same_gives_the_same(name, changes, window, world_size):
    module, config, modeling = module_of(name, "Attention", **changes)
    x, length = torch.randn(1, 6, 32), 6
    embedding = getattr(modeling, f"{name}RotaryEmbedding")(config)
    behind = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (behind < 0) | (behind >= (window or length))
    mask = torch.zeros(length, length).masked_fill(hidden, float("-inf"))[None, None]
    expected, _ = module(x, position_embeddings=embedding(x, torch.arange(length)[None]), attention_mask=mask)
    computed = rotary_angles(64, 16, (embedding.inv_freq, embedding.attention_scaling), torch.device("cpu"))
    angles = rotary_angles(64, 16, config.rope_parameters, torch.device("cpu"))
    assert torch.equal(angles, computed)

    def main(team):
        attention = TPAttention.from_module(module, config, team, "torch")
        assert attention.window == window
        pages = torch.ones(1, 1, dtype=torch.int32)
        cache = PagedCache(1, 2, attention.num_kv_heads, 16, 16, dtype=torch.float32, device="cpu").layer(0)
        plan = plan_layer(length, mode="reference", team=team)
        step = Step.prefill([(0, length)], pages, 16, angles, plan, 2, torch.float32)
        return attention(x[0], step, cache)

    for found in weft.simulate(main, world_size):
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """An MLP with a multiplier, as in FalconH1."""

    def __init__(self, whole):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = whole.gate_proj, whole.up_proj, whole.down_proj
        self.act_fn = whole.act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(0.5 * self.gate_proj(x)) * self.up_proj(x))


MLPS = [
    ("Qwen3", {}, None),
    ("Llama", {}, None),
    ("Mistral", {}, None),
    ("Cohere", {}, None),
    ("Olmo2", {}, None),
    ("Llama", {"mlp_bias": True}, "has ['down_proj.bias', 'gate_proj.bias', 'up_proj.bias']"),
    ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}, "has act_fn=GELUTanh; TPMLP computes silu"),
    ("Gemma3", {}, "has act_fn=GELUTanh"),
    ("Phi3", {}, "has a fused gate_up_proj; split it"),
    ("Glm", {}, "has a fused gate_up_proj; split it"),
    ("Starcoder2", {}, "has no gate_proj, up_proj, down_proj"),
]


@pytest.mark.parametrize(("name", "changes", "message"), MLPS, ids=lambda value: str(value)[:40])
def test_an_mlp_gives_the_same_or_is_refused(name, changes, message):
    check_mlp(module_of(name, "MLP", **changes)[0], message)


def test_an_mlp_with_a_multiplier_is_refused():
    check_mlp(Scaled(module_of("Qwen3", "MLP")[0]), "another result than down(silu(gate(x)) * up(x)), by a multiplier")


def check_mlp(module, message):
    x = torch.randn(5, 32)

    def main(team):
        return TPMLP.from_module(module, team, "torch")(x)

    if message is not None:
        with pytest.raises(ValueError) as caught:
            weft.simulate(main, 1)
        assert message in str(caught.value)
        return
    for found in weft.simulate(main, 2):
        torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}, "rope_type='dynamic' is not supported"),
        (
            {"type": "longrope", "rope_theta": 1e6, "factor": 4.0},
            "'longrope' needs short_factor, long_factor, original_max",
        ),
        ({"rope_type": "default", "rope_theta": 1e6, "attention_factor": 1.2}, "attention_factor=1.2 is not supported"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"full_attention": {"rope_theta": 1e6}}, "has an object under 'full_attention', parameters by type of layer"),
        ((torch.ones(4), 1.0), r"inv_freq has shape \(4,\) instead of \(8,\); weft rotates whole heads"),
        ({"rope_type": "default"}, "theta=None is not a positive number"),
        (float("inf"), "theta=inf is not a positive number"),
        (True, "theta=True is not a positive number"),
        (0.0, "theta=0.0 is not a positive number"),
    ],
    ids=str,
)
def test_angles_of_another_kind_are_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        rotary_angles(8, 16, rope, torch.device("cpu"))


def test_angles_of_rope_parameters_are_those_of_their_theta():
    plain = {"rope_type": "default", "rope_theta": 50.0}
    assert torch.equal(*(rotary_angles(8, 16, theta, torch.device("cpu")) for theta in (50.0, plain)))

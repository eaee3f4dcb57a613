"""Rooflines of steps: every weight of every layer once, whatever its kind."""

from collections import Counter
from dataclasses import replace

import pytest

from weft.bench.harness.limits import Limits
from weft.bench.models.roofline import Kind, roofline, weights
from weft.models.config import DecoderConfig

LIMITS = Limits(memory=4.8e12, flops=989e12, link=450e9, latency=1e-6)
MODELS = [
    "qwen3-32b",
    "qwen3-30b-a3b",
    "gemma-3-27b",
    "deepseek-v3",
    "glm-4.5-air",
    "qwen3-next-80b-a3b",
    "qwen3.6-27b",
]


def kinds(config):
    return Counter(Kind(config.has_state(at), config.has_experts(at)) for at in range(config.num_hidden_layers))


@pytest.mark.parametrize("model", MODELS)
def test_the_layers_have_the_model_s_weights(model):
    """Beside what the config counts by other code, where biases are not counted."""
    config = DecoderConfig.named(model)
    counted = sum(many * sum(weights(config, 1, kind).values()) for kind, many in kinds(config).items())
    embeddings = config.hidden_size * config.vocab_size * (1 if config.tie_word_embeddings else 2)
    assert counted + embeddings == pytest.approx(config.parameters, rel=1e-3)


@pytest.mark.parametrize("model", ["deepseek-v3", "glm-4.5-air", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_experts_and_dense_layers_are_read_once_by_many_tokens(model, world_size):
    """A thousand tokens choose every expert: at least all bytes once or all products, at most both one after the other."""
    config = DecoderConfig.named(model).quantized("fp8")
    got = roofline("model", config, world_size, (1, 1024, 1024), "bf16", LIMITS).gemms
    nbytes = sum(many * sum(weights(config, world_size, kind).values()) for kind, many in kinds(config).items())
    active = 0.0
    for kind, many in kinds(config).items():
        sizes = weights(config, world_size, kind)
        share = config.experts.num_experts_per_tok / config.experts.num_experts if kind.experts else 1.0
        active += many * sum(size * (share if name in ("gate_up", "down") else 1.0) for name, size in sizes.items())
    assert max(nbytes / 4.8e12, 2 * 1024 * active / (2 * 989e12)) * 1e6 <= got * (1 + 1e-6)
    assert got <= (nbytes / 4.8e12 + 2 * 1024 * active / (2 * 989e12)) * 1e6


def test_a_gated_delta_net_reads_its_state_and_writes_it():
    """Whatever the length; layers of attention read keys and values."""
    config = DecoderConfig.named("qwen3-next-80b-a3b")
    linear, of_state = config.linear_attention, sum(config.linear_attention.layers)
    states = 2 * 4 * linear.value_heads * linear.value_dim * linear.key_dim / 4.8e12 * 1e6
    keys = 2 * config.num_key_value_heads * config.head_dim * 2 / 4.8e12 * 1e6
    for length in (1024, 4096):
        got = roofline("model", config, 1, (8, length, 1), "bf16", LIMITS).attention
        layers = config.num_hidden_layers - of_state
        assert got == pytest.approx(8 * (of_state * states + layers * length * keys))


def test_fewer_layers_have_the_first_one_s_kind():
    """DeepSeek-V3's first three layers have no experts."""
    whole = DecoderConfig.named("deepseek-v3")
    times = [
        roofline("model", replace(whole, num_hidden_layers=many), 1, (1, 1024, 1), "bf16", LIMITS).gemms
        for many in (3, 4, 5)
    ]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    of_experts, dense = (sum(weights(whole, 1, Kind(False, experts)).values()) for experts in (True, False))
    assert times[0] == pytest.approx(3 * dense * 2 / 4.8e12 * 1e6) and of_experts > 10 * dense

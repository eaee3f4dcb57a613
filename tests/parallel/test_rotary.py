"""Scaled rotary embedding: transformers' frequencies to the bit, and one line for parameters that make no sense."""

import logging
import random

import pytest
import torch

from weft.parallel.rotary import Linear, Llama3, Rotary, Yarn, rotary_angles

CPU = torch.device("cpu")


def random_parameters(kind, rng):
    found = {
        "rope_type": kind,
        "rope_theta": rng.choice([50.0, 10000, 1e6]),
        "factor": rng.choice([1.0, 4, rng.uniform(1, 40)]),
    }
    if kind == "llama3":
        low = rng.uniform(0.5, 4)
        found |= {"low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.1, 8)}
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rng.choice([64, 4096, 32768])
    if kind == "yarn":
        options = {name: rng.uniform(0.5, 2) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        options |= {"beta_fast": rng.uniform(8, 40), "beta_slow": rng.uniform(0.5, 4), "truncate": rng.random() < 0.5}
        found |= {name: value for name, value in options.items() if rng.random() < 0.5}
    return found


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_and_the_attention_factor_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)  # it warns of odd factors
    rng = random.Random(kind)
    for _ in range(100):
        parameters, head_dim = random_parameters(kind, rng), rng.choice([16, 64, 80, 128])
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(parameters)
        )
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config)
        found, factor = Rotary.of(parameters).frequencies(head_dim, CPU)
        assert torch.equal(found, expected) and factor == expected_factor, parameters


def test_cosines_and_sines_are_times_the_attention_factor():
    plain = rotary_angles(8, 16, 50.0, CPU)
    doubled = rotary_angles(8, 16, (Rotary(theta=50.0).frequencies(16, CPU)[0], 2.0), CPU)
    assert torch.equal(doubled, 2 * plain)


def test_positions_are_yarns_where_there_is_yarn():
    assert Rotary(theta=1e6).positions(40960) == 40960
    assert Rotary(theta=1e6, scaling=Linear(factor=4.0)).positions(40960) == 40960
    yarn = Yarn(factor=4.0, original_max_position_embeddings=32768)
    assert Rotary(theta=1e6, scaling=yarn).positions(40960) == 131072


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def test_parameters_become_one_frozen_value():
    scaling = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    assert Rotary.of(LLAMA3) == Rotary(theta=5e5, scaling=scaling)
    old = {**YARN, "type": YARN["rope_type"], "rope_type": None, "beta_fast": None}
    assert hash(Rotary.of(old)) == hash(Rotary.of(YARN))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (YARN | {"factor": 0.5}, "factor=0.5 is not a number from 1 to 1000000"),
        (YARN | {"factor": "4"}, "factor='4' is not a number"),
        (YARN | {"factor": True}, "factor=True is not a number"),
        (YARN | {"factor": None}, "of type 'yarn' needs factor; add what it was made with"),
        (YARN | {"original_max_position_embeddings": None}, "'yarn' needs original_max_position_embeddings"),
        (YARN | {"original_max_position_embeddings": 1.5}, "original_max_position_embeddings=1.5 is not a positive integer"),
        (YARN | {"attention_factor": 0}, "attention_factor=0 is not a number from 0.000001 to 1000000"),
        (YARN | {"mscale": -1.0}, "mscale=-1.0 is not a number"),
        (YARN | {"beta_slow": 0}, "beta_slow=0 is not a number"),
        (YARN | {"beta_fast": 1e308}, "beta_fast=1e\\+308 is not a number from"),
        (YARN | {"factor": float("inf")}, "factor=inf is not a number from"),
        (YARN | {"original_max_position_embeddings": 10**400}, "is not a positive integer below"),
        (LLAMA3 | {"low_freq_factor": float("nan")}, "low_freq_factor=nan is not a number from"),
        (YARN | {"truncate": 1}, "truncate=1 is not true or false"),
        (YARN | {"rope_theta": 1.0}, "rope_theta=1.0 is not above 1, as YaRN needs it"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; weft runs 'yarn' with 1.0"),
        (YARN | {"short_factor": [1]}, r"short_factor=\[1\] is a key that weft does not know of .* 'yarn'"),
        (LLAMA3 | {"low_freq_factor": None, "high_freq_factor": None}, "needs low_freq_factor, high_freq_factor; add"),
        (LLAMA3 | {"low_freq_factor": 4}, "low_freq_factor=4 is not below high_freq_factor=4.0"),
        (LLAMA3 | {"attention_factor": 1.0}, "attention_factor=1.0 is a key that weft does not know"),
        (YARN | {"rope_type": "proportional"}, "rope_type='proportional' is not supported; weft runs 'default', "),
        (YARN | {"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] is not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_that_make_no_sense_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match="^rope_parameters: .*" + message) as caught:
        Rotary.of(changes)
    assert "\n" not in str(caught.value)

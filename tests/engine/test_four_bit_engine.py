"""The engine with weights in 4 bits: the built-in models still add, with an fp8 cache too."""

import pytest
import torch

import weft
from tests.engine.test_fp8_engine import SUMS
from tests.sampled import sampled
from weft.models.builtin import PATHS


def answers(team, name, options):
    engine = weft.Engine(PATHS[name], team, max_seq_len=64, max_batch=8, warn=False, **options)
    assert torch.uint8 in {parameter.dtype for parameter in engine.model.parameters()}
    return [answer.text.strip() for answer in engine.generate(list(SUMS), max_tokens=8, temperature=0)]


@pytest.mark.parametrize(
    ("name", "quantization", "world_size", "mode", "kv_cache_dtype"),
    sampled(
        (
            (name, quantization, world_size, mode, kv_cache_dtype)
            for name in PATHS
            for quantization in ("mxfp4", "int4")
            for world_size in (1, 2, 4)
            for mode in ("reference", "replicated", "sequence_parallel")
            for kv_cache_dtype in ("auto", "fp8")
        ),
        lambda *one: one in {
            ("adder", "mxfp4", 1, "reference", "auto"), ("adder", "int4", 2, "reference", "fp8"),
            ("adder-moe", "mxfp4", 2, "reference", "auto"), ("adder-moe", "int4", 1, "reference", "fp8"),
        },
    ),
)  # fmt: skip
def test_built_in_models_in_4_bits_add(name, quantization, world_size, mode, kv_cache_dtype):
    options = {"quantization": quantization, "mode": mode, "kv_cache_dtype": kv_cache_dtype, "fused": False}
    for said in weft.simulate(answers, world_size, args=(name, options)):
        assert said == list(SUMS.values())

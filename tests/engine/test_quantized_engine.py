"""The engine with weights in 8 and 4 bits: the built-in models still add, with an fp8 cache too."""

import pytest
import torch

import weft
from tests.engine.replaying import Way, graphs_and_eager, replayed
from tests.sampled import sampled
from weft.engine import EngineConfig
from weft.models.builtin import PATHS

SUMS = {"12+34=": "46", "123+456=": "579", "7+8=": "15", "250+399=": "649", "99+1=": "100"}
DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_per_channel": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "int4": torch.uint8,
}


def answers(team, name, options):
    engine = weft.Engine(PATHS[name], team, max_seq_len=64, max_batch=8, warn=False, **options)
    assert DTYPES[options["quantization"]] in {parameter.dtype for parameter in engine.model.parameters()}
    return [answer.text.strip() for answer in engine.generate(list(SUMS), max_tokens=8, temperature=0)]


@pytest.mark.parametrize(
    ("name", "quantization", "world_size", "mode", "kv_cache_dtype"),
    sampled(
        (
            (name, quantization, world_size, mode, kv_cache_dtype)
            for name in PATHS
            for quantization in DTYPES
            for world_size in (1, 2, 4, 8)
            for mode in ("reference", "replicated", "sequence_parallel")
            for kv_cache_dtype in ("auto", "fp8")
        ),
        lambda *one: one in {
            ("adder", "fp8", 1, "reference", "auto"), ("adder", "fp8_per_channel", 2, "reference", "fp8"),
            ("adder", "mxfp4", 1, "reference", "auto"), ("adder", "int4", 2, "reference", "fp8"),
            ("adder-moe", "fp8", 2, "reference", "auto"), ("adder-moe", "fp8_per_channel", 1, "reference", "fp8"),
            ("adder-moe", "mxfp4", 2, "reference", "auto"), ("adder-moe", "int4", 1, "reference", "fp8"),
        },
    ),
)  # fmt: skip
def test_built_in_models_add(name, quantization, world_size, mode, kv_cache_dtype):
    options = {"quantization": quantization, "mode": mode, "kv_cache_dtype": kv_cache_dtype, "fused": False}
    for said in weft.simulate(answers, world_size, args=(name, options)):
        assert said == list(SUMS.values())


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize("quantization", DTYPES)
@pytest.mark.parametrize("name", PATHS)
def test_built_in_models_add_over_simulated_kernels(name, quantization, mode):
    options = {"quantization": quantization, "mode": mode, "dtype": torch.bfloat16, "fused": True}
    for said in weft.simulate(answers, 2, args=(name, options)):
        assert said == list(SUMS.values())


def graphs_and_sums(team):
    """{(model, format): (its sums, bits of a step by each way)}; on virtual ranks eager, sums without kernels."""
    found, on_gpu = {}, team.device.type == "cuda"
    for name in PATHS:
        for quantization in DTYPES:
            form = {"quantization": quantization, "dtype": torch.bfloat16}
            ways = graphs_and_eager(100) if on_gpu else (Way(count=2), Way())
            said = answers(team, name, form if on_gpu else form | {"fused": False})
            found[name, quantization] = said, replayed(team, PATHS[name], ways, fused=True, **form)
    return found


def check_graphs_and_sums(by_rank):
    for found in by_rank:
        for key, (said, (exact, *others)) in found.items():
            assert said == list(SUMS.values()), key
            # A step in another bucket may run other kernels.
            for tokens, cached in others[-2:] if len(others) > 1 else others:
                assert torch.equal(tokens, exact[0]) and torch.equal(cached, exact[1]), key


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (1, 2)])
def test_graphs_give_the_bits_of_eager_steps(world_size):
    check_graphs_and_sums(weft.launch(graphs_and_sums, world_size, "cuda"))


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_give_the_same_bits_again(world_size):
    check_graphs_and_sums(weft.simulate(graphs_and_sums, world_size))


def test_other_names_are_refused():
    with pytest.raises(
        ValueError, match="quantization='int8' is not one of fp8, fp8_per_block, fp8_per_channel, mxfp4, int4"
    ):
        EngineConfig(quantization="int8")

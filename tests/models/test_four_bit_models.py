"""Checkpoints in 4 bits are what a plain-torch model of their format computes, on all numbers of ranks, in every recipe."""

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, prompt, reference_greedy, reference_logits, relative_rms
from tests.four_bit_checkpoints import CONFIGS, reference, write
from tests.models.test_adapters import ATTENTION, MLP, make_adapter, of_rows
from tests.models.test_fp8_models import MODES, SIZES, adapted_logits
from tests.quantized_checkpoints import answers, check_cut, heads_of, made_once, matrices_of
from tests.sampled import sampled
from tests.teacher_forced import all_logits
from weft.models import Decoder
from weft.parallel import quantized

# In fp32 numbers times scales are exact, and nothing else is rounded.
TOLERANCE = 1e-5
MOE = FAMILIES["qwen3-moe"] | {"moe_intermediate_size": 192}
SHARED = FAMILIES["qwen2-moe"] | {"moe_intermediate_size": 192, "initializer_range": 0.06, "num_hidden_layers": 2}
MIXTURES = {
    "qwen3-moe": MOE,
    "qwen2-moe": SHARED | {"shared_expert_intermediate_size": 192},
    "mixtral": FAMILIES["mixtral"],
}


@pytest.fixture(scope="session")
def in_four_bits(make_checkpoint, tmp_path_factory):
    return made_once(make_checkpoint, tmp_path_factory, SIZES, write)


def check(directory, model, matrices, mode, world_size, *, batch=2, steps=8, fused=False, **options):
    expected = reference(model, matrices)
    tokens = prompt(batch, 9)
    logits, ids = reference_logits(expected, tokens), reference_greedy(expected, tokens, steps)
    assert (
        relative_rms(reference_logits(model, tokens), logits) > 1000 * TOLERANCE
    )  # what rounding to 4 bits itself does
    arguments = (directory, mode, tokens, steps, fused, options)
    for answered, generated in weft.simulate(answers, world_size, args=arguments):
        assert relative_rms(answered, logits) <= TOLERANCE
        assert torch.equal(generated.T, ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_format_is_its_plain_model(in_four_bits, name):
    directory, _, model, matrices = in_four_bits(name)
    check(directory, model, matrices, "reference", 1)


@pytest.mark.parametrize(
    ("name", "world_size", "mode"),
    sampled(
        ((name, world_size, mode) for name in CONFIGS for world_size in (1, 2, 3, 4, 8) for mode in MODES),
        lambda name, world_size, mode: (name, world_size, mode) in {
            ("mxfp4", 2, "replicated"), ("mxfp4", 3, "sequence_parallel"), ("mxfp4", 8, "reference"),
            ("int4", 4, "replicated"), ("int4-zeros", 3, "reference"), ("int4-channel-zeros", 2, "sequence_parallel"),
        },
    ),
)  # fmt: skip
def test_the_recipes_are_the_plain_model(in_four_bits, plain_ops, name, world_size, mode):
    directory, _, model, matrices = in_four_bits(name, world_size=world_size)
    check(directory, model, matrices, mode, world_size)


@pytest.mark.parametrize(
    ("family", "name", "world_size", "mode", "layout"),
    sampled(
        (
            (family, name, world_size, mode, layout)
            for family in MIXTURES
            for name in ("mxfp4", "int4-zeros", "int4-channel")
            for world_size in (1, 2, 3, 4, 8)
            for mode in MODES
            for layout in (("slices",) if world_size == 3 else ("whole", "slices"))
        ),
        lambda *case: case in {
            ("qwen3-moe", "mxfp4", 1, "reference", "whole"), ("qwen3-moe", "mxfp4", 4, "replicated", "slices"),
            ("qwen2-moe", "mxfp4", 2, "sequence_parallel", "whole"), ("qwen2-moe", "int4-zeros", 2, "replicated", "slices"),
            ("mixtral", "mxfp4", 2, "reference", "slices"),
        },
    ),
)  # fmt: skip
def test_mixtures_are_the_plain_model(in_four_bits, plain_ops, family, name, world_size, mode, layout):
    sizes = MIXTURES[family]
    heads = heads_of(3) if world_size == 3 else {}
    directory, _, model, matrices = in_four_bits(name, world_size=world_size, **sizes | heads)
    check(directory, model, matrices, mode, world_size, steps=4, expert_layout=layout)


@pytest.mark.parametrize(
    ("name", "world_size", "targets", "mode"),
    [
        ("mxfp4", 2, [*ATTENTION, *MLP], "auto"),
        ("int4-zeros", 1, ["q_proj", "down_proj"], "replicated"),
        ("int4-channel", 3, ["o_proj", "up_proj"], "sequence_parallel"),
    ],
)
def test_rows_with_adapters_are_those_of_merged_weights(
    in_four_bits, plain_ops, tmp_path, name, world_size, targets, mode
):
    """Beside rows without one, which are the plain model's."""
    directory, _, model, matrices = in_four_bits(name, world_size=world_size)
    base = reference(model, matrices)
    merged, tokens = make_adapter(tmp_path / "one", base, targets, 4, 1), prompt(3, 7)
    rows = [(merged if number % 2 else base, row[None]) for number, row in enumerate(tokens)]
    expected = torch.cat([reference_logits(*row) for row in rows])
    assert relative_rms(reference_logits(base, tokens[1:2]), expected[1:2]) > 0.1, "the adapter changes nothing"
    arguments = (directory, {"one": tmp_path / "one"}, [None, "one", None], tokens, mode)
    for logits in weft.simulate(of_rows, world_size, args=arguments):
        for one, other in zip(logits, expected, strict=True):
            assert relative_rms(one, other) <= TOLERANCE


@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_adapters_over_weights_made_at_load_by_simulated_kernels(in_four_bits, tmp_path, name):
    """In bf16 they are as near to the plain model as torch's operations."""
    _, source, model, matrices = in_four_bits(name)
    base, tokens = reference(model, matrices), prompt(2, 3)
    merged = make_adapter(tmp_path / "one", base, ["v_proj", "o_proj", "gate_proj"], 4, 1)
    expected = torch.cat([reference_logits(one, row[None]) for one, row in zip((base, merged), tokens, strict=True)])
    options = {"dtype": torch.bfloat16, "quantization": name}
    by_torch, by_kernels = (
        weft.simulate(adapted_logits, 2, args=(source, tmp_path / "one", tokens, options | {"fused": fused}))[0]
        for fused in (False, True)
    )
    assert relative_rms(by_kernels, expected) <= 1.2 * relative_rms(by_torch, expected) < 0.1


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["mxfp4", "int4", "int4-channel-zeros", "made mxfp4", "made int4"])
def test_dequantized_weights_are_bit_for_bit_those_of_one_rank(in_four_bits, name, world_size):
    """Groups are cut by edges of ranks; made at load from 16 bits, too."""
    made = name.startswith("made")
    directory, source, *_ = in_four_bits(name.removeprefix("made "), world_size=world_size)
    made_at_load = source, torch.uint8, {"quantization": name.removeprefix("made ")}
    arguments = made_at_load if made else (directory, torch.uint8, {})
    [alone] = weft.simulate(matrices_of, 1, args=arguments)
    check_cut(alone, weft.simulate(matrices_of, world_size, args=arguments), SIZES["head_dim"])


@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_weights_made_at_load_are_those_of_the_checkpoint(in_four_bits, name):
    """The same rounding as by the test's own functions."""
    directory, source, *_ = in_four_bits(name)
    [stored] = weft.simulate(matrices_of, 1, args=(directory, torch.uint8, {}))
    [made] = weft.simulate(matrices_of, 1, args=(source, torch.uint8, {"quantization": name}))
    for key, matrix in stored.items():
        assert torch.equal(made[key], matrix), key


def logits_in_bf16(team, directory, mode, fused, tokens):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused, dtype=torch.bfloat16)
    return all_logits(model, tokens)


@pytest.mark.parametrize(("name", "mode"), [("mxfp4", "replicated"), ("int4-zeros", "sequence_parallel")])
def test_rows_of_16_bits_go_to_kernels_that_read_4_bits(in_four_bits, name, mode):
    """In bf16 weft's kernels are as near to the plain model as torch's operations."""
    directory, _, model, matrices = in_four_bits(name)
    tokens = prompt(2, 9)
    expected = reference_logits(reference(model, matrices), tokens)

    by_torch = weft.simulate(logits_in_bf16, 2, args=(directory, "reference", False, tokens))[0]
    for answered in weft.simulate(logits_in_bf16, 2, args=(directory, mode, True, tokens)):
        assert relative_rms(answered, expected) <= 1.3 * relative_rms(by_torch, expected)


def test_experts_of_few_tokens_are_read_in_4_bits(in_four_bits, monkeypatch):
    """A decode step converts no weight before its GEMMs."""
    directory, _, model, matrices = in_four_bits("mxfp4", **MOE)
    tokens = prompt(2, 4)
    expected = reference_logits(reference(model, matrices), tokens)

    by_torch = weft.simulate(logits_in_bf16, 2, args=(directory, "reference", False, tokens))[0]

    def refuse(weight, dtype):
        raise AssertionError("the weight is converted before the op")

    monkeypatch.setattr(quantized, "widened", refuse)
    for answered in weft.simulate(logits_in_bf16, 2, args=(directory, "replicated", True, tokens)):
        # Rounding may choose another expert.
        assert relative_rms(answered, expected) <= 2 * relative_rms(by_torch, expected)


def test_gradients_are_refused(in_four_bits):
    directory, *_ = in_four_bits("mxfp4")

    def main(team):
        mlp = Decoder.from_pretrained(directory, team, mode="replicated", fused=False).layers[0].mlp
        x = torch.zeros(2, SIZES["hidden_size"], requires_grad=True)
        with pytest.raises(RuntimeError, match="weights in 4 bits have no gradients"):
            mlp(x)
        with torch.no_grad():
            return mlp(x).shape

    assert weft.simulate(main, 1) == [(2, SIZES["hidden_size"])]


def swap_halves(layer):
    data = layer.mlp.gate_up_proj.weight.data
    data.copy_(data << 4 | data >> 4)


def another_row(layer):
    scales = layer.mlp.gate_up_proj.scales.scales.data
    scales.copy_(scales.roll(1, 0))


def another_group(layer):
    scales = layer.self_attn.o_proj.scales.scales.data
    scales.copy_(scales.roll(1, 1))


def another_zero(layer):
    layer.mlp.down_proj.scales.zeros.data.add_(1)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("mxfp4", swap_halves), ("mxfp4", another_row), ("mxfp4", another_group), ("int4", swap_halves),
        ("int4", another_row), ("int4-zeros", another_zero),
    ],
)  # fmt: skip
def test_of_the_test_a_wrong_number_is_beyond_the_tolerance(in_four_bits, name, mutate):
    directory, _, model, matrices = in_four_bits(name)
    tokens = prompt(2, 9)
    expected = reference_logits(reference(model, matrices), tokens)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference")
        for layer in model.layers:
            mutate(layer)
        return all_logits(model, tokens)

    [answered] = weft.simulate(main, 1)
    assert relative_rms(answered, expected) > 100 * TOLERANCE

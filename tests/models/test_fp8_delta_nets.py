"""Checkpoints in fp8 of models with gated delta nets: all matrices in fp8 GEMMs but the rule's gates, b and a.

The reference is transformers' model with weights of bytes times scales, and rounded inputs where weft's GEMMs are in fp8.
"""

import copy
import re

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, prompt, reference_greedy, reference_logits
from tests.fp8_checkpoints import CONFIGS, Fp8Linear, dequantized, quantized
from tests.models.test_fp8_models import MOST, TOLERANCE, check_greedy, row_errors
from tests.quantized_checkpoints import answers, save
from weft.engine import Engine
from weft.errors import CheckpointError
from weft.models import Decoder
from weft.models.checkpoint import Checkpoint
from weft.parallel import quantized as quantized_matrices

SIZES = {"hidden_size": 192, "intermediate_size": 384, "initializer_range": 0.06}
QUANTIZED = re.compile(r".*\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj|in_proj_qkvz?|in_proj_z|out_proj)\.weight")
GATES = ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "mlp.gate", "mlp.shared_expert_gate")
FAMILIES_IN_FP8 = {
    "qwen3.5": FAMILIES["qwen3.5"] | SIZES,
    "qwen3-next": FAMILIES["qwen3.5"] | SIZES | {"family": "Qwen3Next", "mlp_only_layers": [0, 1, 2]},
}


def config_of(scheme):
    """quantization_config that names the gates one by one, as the published files do."""
    name = {"block": "block", "channel": "channel", "tensor": "tensor"}[scheme]
    layers = [f"model.layers.{index}.linear_attn.{gate}" for index in range(3) for gate in GATES[1:5]]
    if name == "channel":
        return CONFIGS[name] | {"ignore": ["lm_head", *layers]}
    key = "modules_to_not_convert" if name == "block" else "ignored_layers"
    return CONFIGS[name] | {key: ["lm_head", *layers]}


@pytest.fixture(scope="module")
def in_fp8(make_checkpoint, tmp_path_factory):
    """in_fp8(family, scheme) -> (directory, transformers' model of 16 bits, (bytes, scales) by name)"""
    made = {}

    def make(family, scheme):
        if (family, scheme) not in made:
            source, model = make_checkpoint(**FAMILIES_IN_FP8[family])
            checkpoint, tensors, pairs = Checkpoint(source), {}, {}
            for name in checkpoint._files():
                tensors[name] = checkpoint.read(name)
                if QUANTIZED.fullmatch(name):
                    data, scales = pairs[name] = quantized(tensors[name], scheme)
                    end = "weight_scale_inv" if scheme == "block" else "weight_scale"
                    tensors[name] = data.contiguous()
                    tensors[f"{name.removesuffix('weight')}{end}"] = scales.reshape(1) if scheme == "tensor" else scales
            directory = tmp_path_factory.mktemp("fp8")
            save(directory, source, tensors, config_of(scheme))
            made[family, scheme] = directory, model, pairs
        return made[family, scheme]

    return make


def reference(model, pairs, scheme, ranks):
    model = copy.deepcopy(model)
    for name, (data, scales) in pairs.items():
        path, _, part = name.removesuffix(".weight").rpartition(".")
        module, wide = model.get_submodule(path), dequantized(data, scales, scheme)
        split = part in ("o_proj", "out_proj", "down_proj")
        setattr(module, part, Fp8Linear(wide, scheme, ranks=ranks if split else 1))
    return model


@pytest.mark.parametrize(
    ("family", "scheme", "world_size", "mode"),
    [
        ("qwen3.5", "block", 1, "reference"),
        ("qwen3.5", "block", 2, "replicated"),
        ("qwen3.5", "block", 4, "sequence_parallel"),
        ("qwen3-next", "block", 2, "reference"),
        ("qwen3-next", "channel", 2, "sequence_parallel"),
        ("qwen3.5", "tensor", 2, "replicated"),
    ],
)
def test_logits_are_those_of_bytes_times_scales(in_fp8, plain_ops, family, scheme, world_size, mode):
    directory, model, pairs = in_fp8(family, scheme)
    # Seed 0 has an input near the middle of two e4m3 numbers (test_fp8_models).
    expected, tokens, steps = reference(model, pairs, scheme, world_size), prompt(2, 9, seed=1), 8
    logits, ids = reference_logits(expected, tokens), reference_greedy(expected, tokens, steps)
    assert row_errors(reference_logits(model, tokens), logits).min() > 8 * TOLERANCE
    for answered, generated in weft.simulate(answers, world_size, args=(directory, mode, tokens, steps, False, {})):
        errors = row_errors(answered, logits)
        assert errors.median() <= TOLERANCE and errors.max() <= MOST
        for prompted, sequence, wanted in zip(tokens, generated.T, ids, strict=True):
            check_greedy(expected, prompted, sequence, wanted)


def logits_of_two_layers(team, directory, mode, fused, dtype, tokens):
    """Logits [batch, length, V] by a gated delta net and gated attention; of the last token by a decode step."""
    model = Decoder.from_pretrained(directory, team, mode=mode, dtype=dtype, fused=fused)
    (batch, length), pages = tokens.shape, torch.tensor([[1], [2]], dtype=torch.int32)
    cache, read, model.layers = model.new_cache(3, 16), [], model.layers[:2]
    for part, step in (
        (tokens[:, :-1], model.prefill_step([(0, length - 1)] * batch, pages, 16)),
        (tokens[:, -1:], model.decode_step(torch.full((batch,), length - 1), pages, 16)),
    ):
        read.append(model.lm_head.gather(model(part.flatten(), step, cache)).float().view(*part.shape, -1))
    return torch.cat(read, 1)


@pytest.mark.parametrize(("family", "mode"), [("qwen3.5", "replicated"), ("qwen3-next", "sequence_parallel")])
def test_kernels_take_fp8_weights_beside_gates_of_16_bits(in_fp8, monkeypatch, family, mode):
    directory, _, _ = in_fp8(family, "block")
    tokens = prompt(2, 6, seed=1)
    expected, by_torch = (
        weft.simulate(logits_of_two_layers, 2, args=(directory, "reference", False, dtype, tokens))[0]
        for dtype in (torch.float32, torch.bfloat16)
    )

    def refuse(x, w):
        raise AssertionError("the weight is dequantized before the op")

    monkeypatch.setattr(quantized_matrices, "operands", refuse)
    for answered in weft.simulate(logits_of_two_layers, 2, args=(directory, mode, True, torch.bfloat16, tokens)):
        assert row_errors(answered, expected).mean() <= 1.2 * row_errors(by_torch, expected).mean()


def test_ranks_have_the_bits_of_one(in_fp8):
    """Scales follow the rows of heads, whichever rank has them."""
    directory, _, pairs = in_fp8("qwen3-next", "block")

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference")
        net, attention = model.layers[0].linear_attn, model.layers[1].self_attn
        sums = (one.weights.qkv.dequantized(torch.float64).sum() for one in (net, attention))
        return *sums, net.out_proj.matrix.data.dtype

    [(alone, qkv, dtype)] = weft.simulate(main, 1)
    both = weft.simulate(main, 2)
    torch.testing.assert_close(sum(one[0] for one in both), alone, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(sum(one[1] for one in both), qkv, rtol=1e-5, atol=1e-3)
    assert dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("made", ["fp8", "int4"])
def test_made_as_it_is_read(make_checkpoint, made):
    """In fp8 the gates alone stay as they are, in 4 bits all projections before the rule."""
    directory, _ = make_checkpoint(**FAMILIES_IN_FP8["qwen3.5"])

    def main(team):
        engine = Engine(directory, team, mode="torch", quantization=made)
        net = engine.model.layers[0].linear_attn
        in_fp8 = made == "fp8"
        assert net.out_proj.weight.dtype != torch.float32
        assert net.in_proj.dtype == (torch.float8_e4m3fn if in_fp8 else torch.float32)
        assert net.rates.dtype == torch.float32 if in_fp8 else net.rates is None
        return engine.generate([[5, 6, 7]], max_tokens=4)[0].token_ids

    one, two = weft.simulate(main, 2)
    assert one == two and len(one) == 4


def test_static_scales_of_inputs_are_refused(in_fp8, tmp_path):
    directory, _, _ = in_fp8("qwen3.5", "tensor")
    tensors = {name: Checkpoint(directory).read(name) for name in Checkpoint(directory)._files()}
    save(tmp_path, directory, tensors, config_of("tensor") | {"activation_scheme": "static"})
    with pytest.raises(CheckpointError, match="in_proj_qkv in fp8 with a static scale of its inputs"):
        weft.simulate(lambda team: Decoder.from_pretrained(tmp_path, team, mode="reference"), 1)

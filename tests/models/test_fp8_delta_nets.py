"""Checkpoints in fp8 of models with gated delta nets: out_proj in fp8 GEMMs, projections before the rule in 16 bits.

The reference is transformers' model with weights of bytes times scales, and rounded inputs where weft's GEMMs are in fp8.
"""

import copy
import re

import pytest
import torch
from torch import nn

import weft
from tests.against_transformers import FAMILIES, prompt, reference_greedy, reference_logits
from tests.fp8_checkpoints import CONFIGS, Fp8Linear, dequantized, quantized
from tests.models.test_fp8_models import MOST, TOLERANCE, check_greedy, row_errors
from tests.quantized_checkpoints import answers, save
from weft.engine import Engine
from weft.errors import CheckpointError
from weft.models import Decoder
from weft.models.checkpoint import Checkpoint

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
        if part.startswith("in_"):
            getattr(module, part).weight = nn.Parameter(wide.float())
        else:
            setattr(
                module, part, Fp8Linear(wide, scheme, ranks=ranks if part in ("o_proj", "out_proj", "down_proj") else 1)
            )
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
    expected, tokens, steps = reference(model, pairs, scheme, world_size), prompt(2, 9), 8
    logits, ids = reference_logits(expected, tokens), reference_greedy(expected, tokens, steps)
    assert row_errors(reference_logits(model, tokens), logits).min() > 8 * TOLERANCE
    for answered, generated in weft.simulate(answers, world_size, args=(directory, mode, tokens, steps, False, {})):
        errors = row_errors(answered, logits)
        assert errors.median() <= TOLERANCE and errors.max() <= MOST
        for prompted, sequence, wanted in zip(tokens, generated.T, ids, strict=True):
            check_greedy(expected, prompted, sequence, wanted)


def test_ranks_have_the_bits_of_one(in_fp8):
    """Scales follow the rows of heads, whichever rank has them."""
    directory, _, pairs = in_fp8("qwen3-next", "block")

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference")
        net, attention = model.layers[0].linear_attn, model.layers[1].self_attn
        return net.in_proj.float().sum(), attention.qkv_proj.weight.float().sum(), net.out_proj.matrix.data.dtype

    [(alone, qkv, dtype)] = weft.simulate(main, 1)
    both = weft.simulate(main, 2)
    torch.testing.assert_close(sum(one[0] for one in both), alone, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(sum(one[1] for one in both), qkv, rtol=1e-5, atol=1e-3)
    assert dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("made", ["fp8", "int4"])
def test_made_as_it_is_read(make_checkpoint, made):
    """out_proj and MLPs are quantized; the projections before stay as they are."""
    directory, _ = make_checkpoint(**FAMILIES_IN_FP8["qwen3.5"])

    def main(team):
        engine = Engine(directory, team, mode="torch", quantization=made)
        net = engine.model.layers[0].linear_attn
        assert net.in_proj.dtype == torch.float32 and net.out_proj.weight.dtype != torch.float32
        return engine.generate([[5, 6, 7]], max_tokens=4)[0].token_ids

    one, two = weft.simulate(main, 2)
    assert one == two and len(one) == 4


def test_static_scales_of_inputs_are_refused(in_fp8, tmp_path):
    directory, _, _ = in_fp8("qwen3.5", "tensor")
    tensors = {name: Checkpoint(directory).read(name) for name in Checkpoint(directory)._files()}
    save(tmp_path, directory, tensors, config_of("tensor") | {"activation_scheme": "static"})
    with pytest.raises(CheckpointError, match="q_proj in fp8 with a static scale of its inputs"):
        weft.simulate(lambda team: Decoder.from_pretrained(tmp_path, team, mode="reference"), 1)

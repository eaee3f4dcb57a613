"""gpt-oss as it is published, its experts in MXFP4 blocks: what transformers dequantizes, cut over any number of ranks."""

import copy

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, prompt, reference_greedy, reference_logits, relative_rms
from tests.four_bit_checkpoints import in_mxfp4
from tests.models.test_stacked_experts import tensors_of
from tests.quantized_checkpoints import answers, save
from tests.sampled import sampled
from weft.errors import CheckpointError
from weft.models import Decoder, DecoderConfig

PUBLISHED = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4",
}  # fmt: skip
SIZES = {**FAMILIES["gpt-oss"], "hidden_size": 64, "intermediate_size": 96}


def blocks_of(experts):
    """(blocks, scales) of [E, K, N], as openai's files have them: a group of 32 of K of a row in 16 bytes."""
    numbers, scales, _ = zip(*(in_mxfp4(one.T) for one in experts), strict=True)
    low, high = torch.stack(numbers).to(torch.uint8).unflatten(-1, (-1, 16, 2)).unbind(-1)
    return (low | high << 4).contiguous(), torch.stack(scales)


@pytest.fixture(scope="session")
def published(make_checkpoint, tmp_path_factory):
    """published(world_size, dtype) -> (directory, transformers' model with the dequantized experts)"""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    made = {}

    def make(world_size=1):
        three = world_size == 3
        if three not in made:
            source, model = make_checkpoint(**SIZES, **({"num_attention_heads": 6, "kv_heads": 3} if three else {}))
            model, tensors = copy.deepcopy(model), tensors_of(source)
            for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
                blocks, scales = blocks_of(tensors.pop(name))
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                dequantized = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                model.state_dict()[name].copy_(dequantized)
            directory = tmp_path_factory.mktemp("gpt-oss")
            save(directory, source, tensors, PUBLISHED)
            made[three] = directory, model
        return made[three]

    return make


def experts_of(team, directory, options):
    """Dequantized gate_up and down of this rank by layer, and its part of the experts and of their features."""
    model = Decoder.from_pretrained(directory, team, mode="torch", **options)
    read = [
        tuple(matrix.dequantized(dtype) for matrix in (layer.mlp.weights.gate_up, layer.mlp.weights.down))
        for layer in model.layers
        for dtype in (torch.float32, torch.bfloat16)
    ]
    mlp = model.layers[0].mlp
    return read, slice(mlp.experts.first, mlp.experts.first + mlp.experts.count), mlp.slice, mlp.local_features


LAYOUTS = [(1, None), (2, "whole"), (2, "slices"), (3, "slices"), (4, (2, 2)), (8, "whole"), (8, "slices"), (8, (4, 2))]


@pytest.mark.parametrize(
    ("world_size", "layout"), sampled(LAYOUTS, lambda world_size, layout: world_size in (1, 3) or layout == (2, 2))
)
def test_experts_are_bit_for_bit_what_transformers_dequantizes(published, world_size, layout):
    directory, _ = published(world_size)
    mxfp4, tensors = pytest.importorskip("transformers.integrations.mxfp4"), tensors_of(directory)
    for of_rank in weft.simulate(experts_of, world_size, args=(directory, {"expert_layout": layout})):
        read, experts, number, features = of_rank
        columns = slice(number * features, (number + 1) * features)
        for index, (gate_up, down) in enumerate(read):
            layer, dtype = index // 2, (torch.float32, torch.bfloat16)[index % 2]
            whole = [
                mxfp4.convert_moe_packed_tensors(
                    *(tensors[f"model.layers.{layer}.mlp.experts.{name}_{part}"] for part in ("blocks", "scales")),
                    dtype=dtype,
                ).mT[experts]
                for name in ("gate_up_proj", "down_proj")
            ]
            gate, up = (whole[0][:, half::2][:, columns] for half in (0, 1))
            assert torch.equal(gate_up, torch.cat((gate, up), 1)) and torch.equal(down, whole[1][..., columns])


RECIPES = [(w, mode, layout) for w, layout in LAYOUTS for mode in ("torch", "ag_rs", "gemm_ar")]
IN_SAMPLE = [(1, "torch", None), (2, "ag_rs", "slices"), (4, "gemm_ar", (2, 2))]


@pytest.mark.parametrize(("world_size", "mode", "layout"), sampled(RECIPES, lambda *one: one in IN_SAMPLE))
def test_answers_are_those_of_transformers(published, world_size, mode, layout):
    """On simulated kernels; in fp32 nothing is rounded beside the weights."""
    directory, model = published(world_size)
    tokens = prompt(2, 5)
    logits, ids = reference_logits(model, tokens), reference_greedy(model, tokens, 4)
    arguments = directory, mode, tokens, 4, False, {"expert_layout": layout}
    for answered, generated in weft.simulate(answers, world_size, args=arguments):
        assert relative_rms(answered, logits) <= 1e-5
        assert torch.equal(generated.T, ids)


def test_answers_by_weft_s_kernels_alone_are_those_of_transformers(published):
    directory, model = published()
    tokens = prompt(1, 4)
    logits, ids = reference_logits(model, tokens), reference_greedy(model, tokens, 2)
    arguments = directory, "gemm_ar", tokens, 2, True, {"expert_layout": "slices"}
    for answered, generated in weft.simulate(answers, 2, args=arguments):
        assert relative_rms(answered, logits) <= 1e-5
        assert torch.equal(generated.T, ids)


def test_only_experts_are_in_four_bits(published):
    def main(team):
        model = Decoder.from_pretrained(published()[0], team, mode="torch")
        return {name: parameter.dtype for name, parameter in model.named_parameters()}

    [dtypes] = weft.simulate(main, 1)
    packed = {name for name, dtype in dtypes.items() if dtype == torch.uint8}
    assert packed == {
        f"layers.{layer}.mlp.{part}{end}" for layer in range(3) for part, end in
        (("gate_up", ""), ("down", ""), ("gate_up_scales", ".scales"), ("down_scales", ".scales"))
    }  # fmt: skip


def shifted(tensors):
    """Scales of the rows before."""
    for name in tensors:
        if name.endswith("gate_up_proj_scales"):
            tensors[name] = tensors[name].roll(1, 1)


def swapped_halves(tensors):
    for name in tensors:
        if name.endswith("_blocks"):
            tensors[name] = tensors[name] >> 4 | tensors[name] << 4


@pytest.mark.parametrize("change", [shifted, swapped_halves])
def test_other_blocks_or_scales_are_far_from_it(published, tmp_path, change):
    directory, model = published()
    tensors = tensors_of(directory)
    change(tensors)
    save(tmp_path, directory, tensors, PUBLISHED)
    tokens = prompt(2, 9)
    [(logits, _)] = weft.simulate(answers, 1, args=(tmp_path, "torch", tokens, 2, False, {}))
    assert relative_rms(logits, reference_logits(model, tokens)) > 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "quantization_config of quant_method='mxfp4' with bits=8 is not supported"),
        (
            {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert='lm_head' of quantization_config is not a list",
        ),
    ],
)
def test_other_forms_of_it_are_refused(changes, message):
    content = {"model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    content |= {"num_hidden_layers": 2, "num_attention_heads": 8, "quantization_config": PUBLISHED | changes}
    with pytest.raises(CheckpointError, match=message):
        DecoderConfig.from_dict(content)


def test_a_tensor_of_blocks_of_another_shape_is_refused(published, tmp_path):
    directory, _ = published()
    tensors = tensors_of(directory)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][..., :8].contiguous()
    save(tmp_path, directory, tensors, PUBLISHED)
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \(8, 64, 3, 8\), but config.json asks for \(8, 64, 48\)"
    ):
        weft.simulate(lambda team: Decoder.from_pretrained(tmp_path, team, mode="torch"), 1)

"""Configurations of weights in 4 bits: what is read, what is refused by name, memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.against_transformers import DELTA_NETS
from tests.four_bit_checkpoints import CHANNEL, CONFIGS, GROUP, MX, WEIGHTS, compressed, write
from tests.models.test_fp8_models import SIZES
from tests.quantized_checkpoints import content_of
from weft.errors import CheckpointError
from weft.models import Decoder
from weft.models.config import DecoderConfig
from weft.models.quantization import Quantization
from weft.parallel.four_bit import FourBitFormat

FORMATS = {
    "mxfp4": FourBitFormat(kind="mxfp4", stored=True),
    "int4": FourBitFormat(kind="int4", group=128, stored=True),
    "int4-zeros": FourBitFormat(kind="int4", group=128, symmetric=False, stored=True),
    "int4-32": FourBitFormat(kind="int4", group=32, stored=True),
    "int4-channel": FourBitFormat(kind="int4", group=0, stored=True),
    "int4-channel-zeros": FourBitFormat(kind="int4", group=0, symmetric=False, stored=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_published_forms_are_read(name):
    quantization = Quantization.of(CONFIGS[name])
    assert quantization.format == FORMATS[name]
    formats = quantization.formats("model.layers.0.mlp")
    assert formats(("gate_proj", "up_proj")) == quantization.format
    assert formats(("gate",)) is None


def group_of(weights, inputs=None):
    return {"g": {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": inputs}}


PACKED, MX_PACKED = "pack-quantized", "mxfp4-pack-quantized"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (compressed(PACKED, GROUP | {"actorder": "group"}), "weights.actorder='group' is not supported; weft runs"),
        (compressed(PACKED, GROUP | {"actorder": "dynamic"}), "weights.actorder='dynamic'"),
        (compressed(PACKED, GROUP | {"num_bits": 8}), "weights.num_bits=8 is not supported; weft runs num_bits=4"),
        (compressed(PACKED, GROUP | {"num_bits": 3}), "weights.num_bits=3"),
        (
            compressed(PACKED, GROUP | {"group_size": 96}),
            "weights.group_size=96 is not supported; weft runs group_size=128",
        ),
        (compressed(PACKED, GROUP | {"strategy": "tensor"}), "weights.strategy='tensor'"),
        (compressed(PACKED, CHANNEL | {"group_size": 128}), "weights.group_size=128"),
        (compressed(PACKED, GROUP | {"type": "float"}), "weights.type='float' is not supported; weft runs type='int'"),
        (compressed(PACKED, GROUP | {"dynamic": True}), "weights.dynamic=True"),
        (compressed(PACKED, GROUP, config_groups=group_of(GROUP, {"num_bits": 8})), "g.input_activations="),
        (compressed(PACKED, GROUP, config_groups=group_of(GROUP) | group_of(MX)), None),
        (compressed(PACKED, GROUP, config_groups={**group_of(GROUP), "h": {}}), "config_groups="),
        (compressed(MX_PACKED, MX, config_groups=group_of(MX, {"num_bits": 4})), "g.input_activations="),
        (
            compressed(MX_PACKED, MX | {"group_size": 16}),
            "weights.group_size=16 is not supported; weft runs group_size=32",
        ),
        (compressed(MX_PACKED, MX | {"type": "int"}), "weights.type='int'"),
        (compressed(MX_PACKED, MX | {"symmetric": False}), "weights.symmetric=False"),
        (compressed("nvfp4-pack-quantized", MX), "format='nvfp4-pack-quantized'"),
        (compressed("marlin-24", GROUP), "format='marlin-24'"),
    ],
)
def test_everything_else_is_refused_by_name(content, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        Quantization.of(content)
    assert "\n" not in str(caught.value)


def not_quantized(tensors, prefix):
    del tensors[f"{prefix}.weight_packed"]
    tensors[f"{prefix}.weight"] = torch.zeros(384, 192)


def in_bytes(tensors, prefix):
    name = f"{prefix}.weight_packed"
    tensors[name] = tensors[name].view(torch.uint8)[:, :24].contiguous()


def no_scale(tensors, prefix):
    del tensors[f"{prefix}.weight_scale"]


def other_scales(tensors, prefix):
    tensors[f"{prefix}.weight_scale"] = tensors[f"{prefix}.weight_scale"].repeat(1, 2)


def no_zeros(tensors, prefix):
    del tensors[f"{prefix}.weight_zero_point"]


def zeros_of_rows(tensors, prefix):
    tensors[f"{prefix}.weight_zero_point"] = torch.zeros(384, 2, dtype=torch.int32)


def order_of_columns(tensors, prefix):
    tensors[f"{prefix}.weight_g_idx"] = torch.zeros(192, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (not_quantized, "tensor model.layers.0.mlp.up_proj.weight_packed is missing"),
        (in_bytes, "up_proj.weight_packed is of U8, but quantization_config of config.json says that it is of I32"),
        (no_scale, "up_proj.weight_scale is missing"),
        (other_scales, r"up_proj.weight_scale has shape \(384, 4\), but config.json asks for \(384, 2\)"),
        (no_zeros, "up_proj.weight_zero_point is missing"),
        (zeros_of_rows, r"weight_zero_point has shape \(384, 2\), but config.json asks for \(48, 2\)"),
        (order_of_columns, "up_proj.weight_g_idx gives columns in another order"),
    ],
)
def test_tensors_that_do_not_fit_are_named(make_checkpoint, tmp_path, change, message):
    source, _ = make_checkpoint(**SIZES)
    write(tmp_path, source, "int4-zeros")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.0.mlp.up_proj")
    save_file(tensors, file)

    def main(team):
        return Decoder.from_pretrained(tmp_path, team, mode="reference")

    with pytest.raises(CheckpointError, match=message):
        weft.simulate(main, 1)


@pytest.mark.parametrize(("name", "bits"), [("mxfp4", 4.25), ("int4", 4.25), ("int4-channel", 4)])
def test_weights_in_4_bits_need_half_a_byte_and_a_share_of_a_scale(name, bits):
    config, embeddings = DecoderConfig.from_dict(content_of(CONFIGS[name])), 2 * 100 * 4096
    in_layers = config.parameters - embeddings
    assert config.weight_bytes(range(2), torch.bfloat16) == int(in_layers * bits / 8) + 2 * embeddings


def test_projections_of_gated_delta_nets_and_gated_attention_count_as_16_bits():
    config = DecoderConfig.from_dict({
        "model_type": "qwen3_next", "vocab_size": 100, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "mlp_only_layers": [0, 1, 2], "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, **DELTA_NETS,
    })  # fmt: skip

    def matrices(team):
        model = Decoder(config.quantized("int4"), team, mode="reference", dtype=torch.bfloat16)
        names = ("in_proj", "qkv_proj.weight", "embed_tokens", "lm_head")
        return sum(x.numel() for name, x in model.named_parameters() if any(one in name for one in names))

    [kept] = weft.simulate(matrices, 1)
    whole = config.parameters
    assert config.quantized("int4").weight_bytes(range(3), torch.bfloat16) == 2 * kept + int((whole - kept) * 4.25 / 8)


def test_random_weights_are_as_large_as_those_of_16_bits():
    content = content_of(None) | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}

    def main(team, config, quantization):
        model = Decoder(config, team, mode="reference", quantization=quantization).fill_dummy()
        return model.layers[0].weights.mlp.gate_up.dequantized(torch.float32).std()

    plain = DecoderConfig.from_dict(content)
    stored = [DecoderConfig.from_dict(content | {"quantization_config": config}) for config in CONFIGS.values()]
    for config, name in ((plain, "mxfp4"), (plain, "int4"), *((config, None) for config in stored)):
        [std] = weft.simulate(main, 1, args=(config, name))
        assert abs(std - 0.02) < 0.004


def test_a_rank_s_edge_within_a_byte_is_refused():
    content = content_of(None) | {
        "hidden_size": 128,
        "intermediate_size": 25 * 3,
        "num_attention_heads": 3,
        "head_dim": 32,
    }

    def main(team):
        with pytest.raises(ValueError, match="a rank's 25 columns of a weight in mxfp4 end within a byte"):
            Decoder(DecoderConfig.from_dict(content), team, quantization="mxfp4")

    weft.simulate(main, 3)

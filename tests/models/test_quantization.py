"""Which quantization_config is read, and which is refused by name."""

import json

import pytest
import torch

import weft
from tests.fp8_checkpoints import CONFIGS, compressed, quantized, write
from tests.quantized_checkpoints import content_of
from weft.errors import CheckpointError, ModelTooLarge
from weft.models import Checkpoint, Decoder, DecoderConfig
from weft.models.memory import check_memory
from weft.models.quantization import Quantization
from weft.parallel.quantized import Fp8Format

SIZES = {"hidden_size": 192, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 1}
CHANNEL = ({"strategy": "channel"}, {"strategy": "token", "dynamic": True})


@pytest.mark.parametrize(
    ("name", "scheme", "scale", "static"),
    [
        ("block", "block", "weight_scale_inv", False),
        ("compressed-block", "block", "weight_scale", False),
        ("channel", "channel", "weight_scale", False),
        ("compressed-static", "tensor", "weight_scale", True),
        ("tensor", "tensor", "weight_scale", False),
        ("static", "tensor", "weight_scale", True),
        ("modelopt", "tensor", "weight_scale", True),
    ],
)
def test_the_published_forms_are_read(name, scheme, scale, static):
    found = Quantization.of(CONFIGS[name])
    assert found.format == Fp8Format(scheme=scheme, scale=scale, static_inputs=static)
    formats = found.formats("model.layers.0.mlp")
    assert formats(("gate_proj", "up_proj")) == found.format
    assert formats(("gate",)) is None


@pytest.mark.parametrize("content", [None, {}])
def test_no_quantization_is_none(content):
    assert Quantization.of(content) is None


BLOCK = CONFIGS["block"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("fp8", "quant_method='fp8' is not supported"),
        (
            {"quant_method": "awq", "bits": 4},
            "quant_method='awq' is not supported; weft runs weights in fp8 and 4 bits of 'fp8'",
        ),
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "nvfp4"}, "quant_method='nvfp4'"),
        (BLOCK | {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\] is not supported; weft runs"),
        (BLOCK | {"weight_block_size": [128.0, 128]}, None),
        (BLOCK | {"activation_scheme": "static"}, "activation_scheme='static' is not supported; weft runs .*'dynamic'"),
        (BLOCK | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' is not supported; weft runs scale_fmt='float'"),
        (BLOCK | {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        (BLOCK | {"modules_to_convert": ["embed"]}, "modules_to_convert="),
        (BLOCK | {"modules_to_not_convert": "lm_head"}, "is not a list of names"),
        (
            compressed(*CHANNEL, format="int-quantized"),
            "format='int-quantized' is not supported; weft runs format='float-quantized'",
        ),
        (compressed(*CHANNEL, format="pack-quantized"), "group_0.input_activations="),
        (compressed(*CHANNEL, format="mixed-precision"), "format='mixed-precision'"),
        (compressed(*CHANNEL, sparsity_config={"format": "sparse-24"}), "sparsity_config="),
        (compressed(*CHANNEL, transform_config={"a": 1}), "transform_config="),
        (compressed({"strategy": "channel", "num_bits": 4}, CHANNEL[1]), "weights.num_bits=4 is not supported"),
        (compressed({"strategy": "channel", "type": "int"}, CHANNEL[1]), "weights.type='int'"),
        (compressed({"strategy": "group", "group_size": 128}, CHANNEL[1]), "weights.strategy='group'"),
        (compressed({"strategy": "channel", "symmetric": False}, CHANNEL[1]), "weights.symmetric=False"),
        (compressed(CHANNEL[0], {"strategy": "tensor", "dynamic": True}), "input_activations.strategy='tensor'"),
        (compressed(CHANNEL[0], CHANNEL[1] | {"num_bits": 4}), "input_activations.num_bits=4"),
        (compressed(*CHANNEL, config_groups={"a": {}, "b": {}}), "config_groups="),
        (compressed(*CHANNEL, config_groups={"a": {"targets": ["Linear"], "weights": None}}), "a.weights=None"),
        (compressed(*CHANNEL, config_groups={"a": {"targets": ["Conv"], "weights": {}}}), "targets="),
        (compressed(*CHANNEL, ignore=["re:(a+)+$"]), r"the pattern 're:\(a\+\)\+\$' is not supported"),
        (compressed(*CHANNEL, ignore=["re:.*.*.*.*x"]), "the pattern"),
        (compressed(*CHANNEL, ignore=["re:[a"]), "the pattern"),
        (
            CONFIGS["modelopt"] | {"quant_algo": "NVFP4"},
            "quant_algo='NVFP4' is not supported; weft runs quant_algo='FP8'",
        ),
        (CONFIGS["modelopt"] | {"quant_algo": "FP8_PB_WO"}, "quant_algo='FP8_PB_WO'"),
        (CONFIGS["modelopt"] | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
    ],
)
def test_everything_else_is_refused_by_name(content, message):
    if message is None:
        Quantization.of(content)
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        Quantization.of(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("self_attn", "model.layers.0.self_attn.q_proj", True),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        (r"re:.*layers\.(0|1)\..*", "model.layers.1.mlp.up_proj", True),
        (r"re:model\.layers\.\d+\.mlp", "model.layers.12.mlp.up_proj", True),
        ("*self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.*", "model.layers.1.mlp.up_proj", False),
    ],
)
def test_modules_are_ignored_by_name_prefix_end_and_pattern(entry, module, expected):
    assert Quantization.of(compressed(*CHANNEL, ignore=[entry])).ignores(module) == expected


def test_weights_of_one_gemm_are_in_fp8_together():
    formats = Quantization.of(BLOCK | {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}).formats
    with pytest.raises(
        CheckpointError, match=r"names model.layers.0.self_attn.k_proj as not quantized, but not q_proj"
    ):
        formats("model.layers.0.self_attn")(("q_proj", "k_proj", "v_proj"))


def test_modules_that_are_not_converted_stay_as_they_are(make_checkpoint, tmp_path):
    source, _ = make_checkpoint(**SIZES)
    ignored = ["lm_head", "model.layers.0.mlp.down_proj"]
    tensors = write(tmp_path, source, "block", BLOCK | {"modules_to_not_convert": ignored})
    message = "down_proj.weight is of F8_E4M3, so it has been quantized"
    with pytest.raises(CheckpointError, match=message):
        weft.simulate(lambda team: Decoder.from_pretrained(tmp_path, team, mode="reference"), 1)
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    tensors["model.layers.0.mlp.down_proj.weight"] = Checkpoint(source).read("model.layers.0.mlp.down_proj.weight")
    rewrite(tmp_path, tensors)

    def main(team):
        mlp = Decoder.from_pretrained(tmp_path, team, mode="reference").layers[0].weights.mlp
        return mlp.gate_up.data.dtype, mlp.down

    [(dtype, down)] = weft.simulate(main, 1)
    assert dtype == torch.float8_e4m3fn
    assert torch.equal(down, tensors["model.layers.0.mlp.down_proj.weight"])


def rewrite(directory, tensors):
    from safetensors.torch import save_file

    save_file(tensors, directory / "model.safetensors")


def not_quantized(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()


def no_scale(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def other_scales(tensors):
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name].repeat(2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (not_quantized, "up_proj.weight is of F32, but quantization_config of config.json says that it is of F8_E4M3"),
        (no_scale, "tensor model.layers.0.mlp.up_proj.weight_scale_inv is missing"),
        (other_scales, r"up_proj.weight_scale_inv has shape \(6, 2\), but config.json asks for \(3, 2\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(make_checkpoint, tmp_path, change, message):
    source, _ = make_checkpoint(**SIZES)
    tensors = write(tmp_path, source, "block")
    change(tensors)
    rewrite(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        weft.simulate(lambda team: Decoder.from_pretrained(tmp_path, team, mode="reference"), 1)


def test_nan_in_fp8_is_reported(make_checkpoint, tmp_path):
    source, _ = make_checkpoint(**SIZES)
    tensors = write(tmp_path, source, "block")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0x7F
    rewrite(tmp_path, tensors)

    def main(team):
        model = Decoder(DecoderConfig.of(Checkpoint(tmp_path)), team, mode="reference")
        return model.load(Checkpoint(tmp_path))

    [lines] = weft.simulate(main, 1)
    assert name in lines[0]


def test_the_file_of_older_modelopt_is_read(make_checkpoint, tmp_path):
    source, _ = make_checkpoint(**SIZES)
    write(tmp_path, source, "modelopt")
    content = json.loads((tmp_path / "config.json").read_text())
    content.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(content))
    inside = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    file = {"producer": {"name": "modelopt"}, "quantization": inside}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    assert DecoderConfig.of(Checkpoint(tmp_path)).quantization.method == "modelopt"


SCHEMES = {"fp8": "block", "fp8_per_block": "block", "fp8_per_channel": "channel"}


def made(team, directory, name):
    """Bytes and scales of down, and dequantized matrices, of weights made fp8 at load."""
    weights = Decoder.from_pretrained(directory, team, mode="reference", quantization=name).layers[0].weights
    return weights.mlp.gate_up, weights.mlp.down, weights.attention.o.dequantized(torch.float32)


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_made_fp8_at_load_are_those_of_the_whole_model(make_checkpoint, name):
    source, _ = make_checkpoint(**SIZES)
    expected = {
        part: quantized(Checkpoint(source).read(f"model.layers.0.mlp.{part}_proj.weight"), SCHEMES[name])
        for part in ("gate", "up", "down")
    }
    [(gate_up, down, o)] = weft.simulate(made, 1, args=(source, name))
    assert torch.equal(gate_up.scales, torch.cat([expected["gate"][1], expected["up"][1]]))
    assert torch.equal(down.scales, expected["down"][1])
    assert torch.equal(down.data.view(torch.uint8), expected["down"][0].view(torch.uint8))
    for world_size in (2, 4, 8):
        ranks = weft.simulate(made, world_size, args=(source, name))
        wholes = torch.cat([rank[1].dequantized(torch.float32) for rank in ranks], 1)
        assert torch.equal(wholes, down.dequantized(torch.float32))
        assert torch.equal(torch.cat([rank[2] for rank in ranks], 1), o)
        halves = zip(*(rank[0].dequantized(torch.float32).chunk(2) for rank in ranks), strict=True)
        assert torch.equal(torch.cat([torch.cat(half) for half in halves]), gate_up.dequantized(torch.float32))


def test_a_checkpoint_in_fp8_is_not_made_fp8_otherwise():
    config = DecoderConfig.from_dict(content_of(CONFIGS["channel"]))
    assert config.quantized("fp8") is config
    with pytest.raises(ValueError, match="quantization='fp8_per_block', but the weights are in fp8 by quant_method="):
        config.quantized("fp8_per_block")
    with pytest.raises(ValueError, match="quantization='int4', but the weights are in fp8 by quant_method="):
        config.quantized("int4")
    with pytest.raises(
        ValueError, match="'int8' is not one of 'fp8', 'fp8_per_block', 'fp8_per_channel', 'mxfp4', 'int4'"
    ):
        config.quantized("int8")


def test_weights_in_fp8_need_a_byte_each(monkeypatch):
    config = DecoderConfig.from_dict(content_of(CONFIGS["block"]))
    layers = range(2)
    embeddings = 2 * 100 * 4096
    in_layers = config.parameters - embeddings
    assert config.weight_bytes(layers, torch.bfloat16) == in_layers + 2 * embeddings
    monkeypatch.setattr("weft.models.memory.memory_of_this_machine", lambda: in_layers + 2 * embeddings - 1)

    def main(team):
        with pytest.raises(ModelTooLarge):
            check_memory(config, team, torch.bfloat16, layers)

    weft.simulate(main, 1)


def test_random_weights_in_fp8_are_as_large_as_those_of_16_bits():
    content = content_of(CONFIGS["static"]) | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}

    def main(team, config, quantization):
        model = Decoder(config, team, mode="reference", quantization=quantization).fill_dummy()
        mlp = model.layers[0].weights.mlp
        return mlp.gate_up.dequantized(torch.float32).std(), mlp.down.input_scale

    stored = DecoderConfig.from_dict(content)
    plain = DecoderConfig.from_dict(content | {"quantization_config": None})
    for config, name, static in ((stored, None, True), (plain, "fp8", False), (plain, "fp8_per_channel", False)):
        [(std, input_scale)] = weft.simulate(main, 1, args=(config, name))
        assert abs(std - 0.02) < 0.001
        assert (input_scale is not None) == static

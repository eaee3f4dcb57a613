"""Tensors that hold the rows of several matrices are read as the matrices are: on all numbers of ranks, in all formats."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

import weft
from tests.four_bit_checkpoints import CONFIGS as FOUR_BIT
from tests.fp8_checkpoints import CONFIGS as FP8
from weft.errors import CheckpointError
from weft.models import Checkpoint, Decoder, DecoderConfig, families
from weft.models.joined import GATE_UP, QKV
from weft.models.quantization import Quantization

CONTENT = {
    "model_type": "qwen2", "vocab_size": 61, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "dtype": "float32",
}  # fmt: skip

CONFIGS = FP8 | FOUR_BIT | {"none": None}


@pytest.fixture
def family(monkeypatch):
    """Qwen2 with rules of both joined tensors: as Phi-3 and GLM-4 have them, and with biases."""
    weights = dataclasses.replace(families.FAMILIES["qwen2"].weights, joined=(QKV, GATE_UP))
    monkeypatch.setitem(families.FAMILIES, "qwen2", dataclasses.replace(families.FAMILIES["qwen2"], weights=weights))


def random_tensors(content):
    """A checkpoint's tensors by name, of the shapes and dtypes that its shards ask for."""
    [shards] = weft.simulate(lambda team: Decoder(DecoderConfig.from_dict(content), team, mode="reference").shards(), 1)
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, shard in shards.items():
        # Bytes below 64 are finite in e4m3.
        drawn = torch.randint(0, 64, shard.shape, generator=generator)
        tensors[name] = (
            drawn.to(torch.float32) / 64 if shard.stored is None else drawn.to(torch.uint8).view(torch.uint8)
        )
        if shard.stored == torch.int32:
            tensors[name] = torch.randint(-(1 << 31), 1 << 31, shard.shape, generator=generator).to(torch.int32)
        if shard.stored == torch.float8_e4m3fn:
            tensors[name] = tensors[name].view(torch.float8_e4m3fn)
        if shard.shape == (1, 1):
            tensors[name] = torch.tensor(0.25)  # one for all parts: they may share one in the joined tensor
    return tensors


def join(tensors, *rules):
    """The same with matrices joined."""
    made = dict(tensors)
    for name in tensors:
        for rule in rules:
            prefix, module, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
            if module == rule.parts[0]:
                parts = [made.pop(f"{prefix}.{part}.{kind}") for part in rule.parts]
                views = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]
                made[f"{prefix}.{rule.name}.{kind}"] = (
                    torch.cat(views).view(parts[0].dtype) if parts[0].dim() else parts[0]
                )
    return made


def write(directory, content, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(content))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def contents(team, directory):
    """This rank's tensors, and the warnings."""
    checkpoint = Checkpoint(directory)
    model = Decoder(DecoderConfig.of(checkpoint), team, mode="reference")
    warnings = model.load(checkpoint)
    return model.state_dict(), warnings


def config_of(name):
    return CONTENT if CONFIGS[name] is None else CONTENT | {"quantization_config": CONFIGS[name]}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_joined_tensor_is_read_as_its_parts_are(tmp_path, family, name):
    content = config_of(name)
    tensors = random_tensors(content)
    joined = join(tensors, QKV, GATE_UP)
    assert not any(part in key for key in joined for part in ("q_proj", "k_proj", "up_proj.") if "gate_up" not in key)
    apart, together = write(tmp_path / "apart", content, tensors), write(tmp_path / "together", content, joined)
    for world_size in (1, 2, 8) if name in ("none", "block", "int4-zeros") else (2,):
        expected = weft.simulate(contents, world_size, args=(apart,))
        for (state, warnings), (wanted, none) in zip(
            weft.simulate(contents, world_size, args=(together,)), expected, strict=True
        ):
            assert warnings == none == []
            for key, tensor in wanted.items():
                assert torch.equal(tensor.view(torch.uint8), state[key].view(torch.uint8)), (key, world_size)


def test_columns_of_scales_may_be_vectors(tmp_path, family):
    content = config_of("channel")
    joined = join(random_tensors(content), QKV, GATE_UP)
    flat = {key: tensor.flatten() if key.endswith("_scale") else tensor for key, tensor in joined.items()}
    assert any(tensor.dim() == 1 for key, tensor in flat.items() if "qkv_proj.weight_scale" in key)
    paths = write(tmp_path / "column", content, joined), write(tmp_path / "vector", content, flat)
    (column, _), (vector, _) = (weft.simulate(contents, 2, args=(path,))[1] for path in paths)
    assert all(torch.equal(column[key].view(torch.uint8), vector[key].view(torch.uint8)) for key in column)


@pytest.mark.parametrize("name", ["none", "channel"])
def test_a_joined_tensor_of_another_shape_is_refused_by_name(tmp_path, family, name):
    content = config_of(name)
    joined = join(random_tensors(content), QKV, GATE_UP)
    key = "model.layers.1.self_attn.qkv_proj.weight"
    rows, columns = joined[key].shape
    joined[key] = joined[key][:-1]
    directory = write(tmp_path / "short", content, joined)
    message = rf"qkv_proj.weight has shape \({rows - 1}, {columns}\), but config.json asks for \({rows}, {columns}\)"
    with pytest.raises(CheckpointError, match=message):
        weft.simulate(contents, 1, args=(directory,))


def test_a_part_that_ends_within_a_block_is_refused_by_name(tmp_path, family):
    content = config_of("block") | {"intermediate_size": 192}
    tensors = random_tensors(content)
    joined = join(tensors, QKV, GATE_UP)
    directory = write(tmp_path / "ragged", content, joined)
    with pytest.raises(CheckpointError, match="gate_up_proj.weight_scale_inv has .*, and gate_proj ends within one"):
        weft.simulate(contents, 1, args=(directory,))


def test_a_missing_tensor_is_named_as_a_checkpoint_has_it(tmp_path, family):
    joined = join(random_tensors(CONTENT), QKV, GATE_UP)
    del joined["model.layers.0.self_attn.qkv_proj.weight"]
    directory = write(tmp_path / "missing", CONTENT, joined)
    with pytest.raises(CheckpointError, match="tensor model.layers.0.self_attn.qkv_proj.weight is missing"):
        weft.simulate(contents, 1, args=(directory,))


def test_families_without_a_rule_do_not_read_joined_tensors(tmp_path):
    joined = join(random_tensors(CONTENT), GATE_UP)
    directory = write(tmp_path / "other", CONTENT, joined)
    with pytest.raises(CheckpointError, match="tensor model.layers.0.mlp.gate_proj.weight is missing"):
        weft.simulate(contents, 1, args=(directory,))


def test_a_joined_module_may_be_named_as_not_quantized(tmp_path, family):
    quantization = FP8["block"] | {"modules_to_not_convert": ["model.layers.0.self_attn.qkv_proj", "lm_head"]}
    formats = Quantization.of(quantization).formats
    assert formats("model.layers.0.self_attn", (QKV,))(("q_proj", "k_proj", "v_proj")) is None
    assert formats("model.layers.0.self_attn", (QKV,))(("o_proj",)) is not None
    assert formats("model.layers.1.self_attn", (QKV,))(("q_proj", "k_proj", "v_proj")) is not None
    assert formats("model.layers.0.self_attn")(("q_proj", "k_proj", "v_proj")) is not None

"""Checkpoints whose experts are in one tensor hold the same model as those with a tensor for each."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.against_transformers import FAMILIES
from tests.sampled import sampled
from weft.errors import CheckpointError
from weft.models import Decoder

PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def tensors_of(directory):
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def stacked(tensors):
    """The same tensors, those of all experts in one as transformers 5 has them in its modules."""
    rest, experts = {}, {}
    for name, tensor in tensors.items():
        if of_expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            prefix, expert, part = of_expert.groups()
            experts.setdefault(prefix, {})[PARTS[part], int(expert)] = tensor
        else:
            rest[name] = tensor
    for prefix, matrices in experts.items():
        gate, up, down = (torch.stack([matrices[part, e] for e in range(len(matrices) // 3)]) for part in range(3))
        rest |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return rest


def write(source, directory, tensors):
    (directory / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, directory / "model.safetensors")
    return directory


def parameters(team, directory, options):
    model = Decoder.from_pretrained(directory, team, mode="torch", **options)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check(source, directory, world_size, **options):
    pairs = [weft.simulate(parameters, world_size, args=(path, options)) for path in (source, directory)]
    for expected, loaded in zip(*pairs, strict=True):
        assert expected.keys() == loaded.keys() and all(torch.equal(expected[name], loaded[name]) for name in expected)


LAYOUTS = [(1, None), (2, "whole"), (2, "slices"), (4, (2, 2)), (4, (4, 1)), (8, (2, 4)), (8, "slices")]


@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    sampled(
        [(name, *layout) for name in ("qwen3-moe-mixed", "qwen2-moe", "mixtral") for layout in LAYOUTS],
        lambda name, world_size, layout: (
            (name, world_size, layout)
            in [("qwen3-moe-mixed", 4, (2, 2)), ("qwen2-moe", 2, "slices"), ("mixtral", 2, "whole")]
        ),
    ),
)
def test_stacked_experts_are_those_of_single_tensors(make_checkpoint, tmp_path, name, world_size, layout):
    source, _ = make_checkpoint(**FAMILIES[name])
    check(source, write(source, tmp_path, stacked(tensors_of(source))), world_size, expert_layout=layout)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel", "mxfp4", "int4"])
def test_stacked_experts_are_quantized_as_they_are_read(make_checkpoint, tmp_path, quantization):
    source, _ = make_checkpoint(**FAMILIES["qwen3-moe"])
    directory = write(source, tmp_path, stacked(tensors_of(source)))
    check(source, directory, 2, expert_layout="slices", quantization=quantization)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gate_up_proj",
            lambda experts: experts[:7],
            r"has shape \(7, 96, 24\), but config.json asks for \(8, 96, 24\)",
        ),
        ("gate_up_proj", lambda experts: experts[:, :48], r"has shape \(8, 48, 24\), but config.json asks for"),
        ("down_proj", lambda experts: experts.mT, r"has shape \(8, 48, 24\), but config.json asks for \(8, 24, 48\)"),
        ("down_proj", None, r"tensor model.layers.0.mlp.experts.0.down_proj.weight is missing"),
    ],
)
def test_stacked_experts_that_do_not_fit_are_refused(make_checkpoint, tmp_path, name, change, message):
    source, _ = make_checkpoint(**FAMILIES["qwen3-moe"] | {"hidden_size": 24, "moe_intermediate_size": 48})
    tensors = stacked(tensors_of(source))
    tensor = tensors.pop(f"model.layers.0.mlp.experts.{name}")
    if change is not None:
        tensors[f"model.layers.0.mlp.experts.{name}"] = change(tensor).contiguous()
    with pytest.raises(CheckpointError, match=message):
        weft.simulate(parameters, 1, args=(write(source, tmp_path, tensors), {}))


@pytest.mark.parametrize("layout", ["whole", "slices"])
def test_numbers_that_are_none_are_named_wherever_they_are(make_checkpoint, tmp_path, caplog, layout):
    source, _ = make_checkpoint(**FAMILIES["qwen3-moe"])
    tensors = stacked(tensors_of(source))
    tensors["model.layers.1.mlp.experts.gate_up_proj"][5, 60, 3] = torch.nan
    weft.simulate(parameters, 2, args=(write(source, tmp_path, tensors), {"expert_layout": layout}))
    assert "NaN or infinite weights" in caplog.text and "model.layers.1.mlp.experts.gate_up_proj" in caplog.text

"""Checkpoints as transformers 4.x and 5.x write them are read; a bad one gives one clear line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.teacher_forced import all_logits
from weft.errors import CheckpointError
from weft.models import Checkpoint, Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def copy(make_checkpoint, tmp_path):
    """A copy of a checkpoint to damage, and a function that edits one of its JSON files."""
    directory, _ = make_checkpoint(num_hidden_layers=1)
    copied = shutil.copytree(directory, tmp_path / "copy")

    def edit(**changes):
        path = copied / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return copied, edit


def load(directory, world_size=2, **options):
    return weft.simulate(
        lambda team: Qwen3ForCausalLM.from_pretrained(directory, team, mode="torch", **options), world_size
    )


def test_each_rank_holds_its_slices_and_nothing_else(make_checkpoint):
    directory, reference = make_checkpoint(kv_heads=2)
    weights = reference.state_dict()
    models = load(directory, world_size=4)
    layer, name = models[3].layers[1], "model.layers.1."
    q, k, v = layer.self_attn.qkv_proj.weight.split([32, 16, 16])
    assert torch.equal(q, weights[name + "self_attn.q_proj.weight"][96:])
    assert torch.equal(k, weights[name + "self_attn.k_proj.weight"][16:])  # two ranks share each of two KV heads
    assert torch.equal(v, weights[name + "self_attn.v_proj.weight"][16:])
    assert torch.equal(layer.self_attn.o_proj.weight, weights[name + "self_attn.o_proj.weight"][:, 96:])
    assert torch.equal(layer.mlp.down_proj.weight, weights[name + "mlp.down_proj.weight"][:, 72:])
    # 257 words over 4 ranks: 65 each, and the last has 62 real ones.
    assert torch.equal(models[3].lm_head.weight[:62], weights["lm_head.weight"][195:])
    assert not models[3].lm_head.weight[62:].any()


def test_a_vocabulary_smaller_than_the_padding_leaves_the_last_rank_without_words(make_checkpoint):
    directory, reference = make_checkpoint(vocab_size=5, num_hidden_layers=1)
    tokens = torch.tensor([[0, 4, 2]])
    with torch.no_grad():
        expected = reference(tokens).logits
    for logits in weft.simulate(
        lambda team: all_logits(Qwen3ForCausalLM.from_pretrained(directory, team, mode="torch"), tokens), 4
    ):
        torch.testing.assert_close(logits, expected)


def test_progress_counts_the_bytes_of_this_rank(make_checkpoint):
    directory, _ = make_checkpoint()
    seen = []
    [model] = load(directory, 1, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(weight.nbytes for weight in model.parameters())


def test_weights_are_cast_to_the_dtype_asked_for(make_checkpoint):
    directory, _ = make_checkpoint()
    [model] = load(directory, 1, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_a_config_of_transformers_4_is_read(make_checkpoint):
    _, reference = make_checkpoint()
    new = reference.config.to_dict()
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 50.0, "rope_scaling": None, "torch_dtype": "float32"}
    assert Qwen3Config.from_dict(old) == Qwen3Config.from_dict(new)
    assert Qwen3Config.from_dict(old).rope_theta == 50.0
    assert Qwen3Config.from_dict(old).dtype == torch.float32
    # An empty extension beside it takes nothing from it.
    assert Qwen3Config.from_dict(new | {"rope_scaling": {"type": "default"}}) == Qwen3Config.from_dict(new)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; weft runs 'qwen3'"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),  # beside rope_parameters
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config with quant_method='fp8' is not supp"),
        ({"hidden_size": None}, "hidden_size=None is not a positive integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None is not a positive number"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta='1e6' is not a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not true or false"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        ({"intermediate_size": 64}, r"gate_proj.weight has shape \(96, 48\), but config.json asks for \(64, 48\)"),
    ],
)
def test_a_config_that_weft_cannot_run_is_refused(copy, changes, message):
    directory, edit = copy
    edit(**changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def remove_directory(directory):
    shutil.rmtree(directory)


def remove_config(directory):
    (directory / "config.json").unlink()


def break_config(directory):
    (directory / "config.json").write_text('{"model_type": ')


def remove_file(directory):
    next(directory.glob("model-*.safetensors")).unlink()


def truncate_file(directory):
    path = next(directory.glob("model-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def truncate_header(directory):
    path = next(directory.glob("model-*.safetensors"))
    path.write_bytes(path.read_bytes()[:5])


def remove_weights(directory):
    for path in directory.glob("model*"):
        path.unlink()


def number_in_index(directory):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = 3
    path.write_text(json.dumps(index))


def drop_tensor(directory):
    for path in directory.glob("model-*.safetensors"):
        tensors = load_file(path)
        if tensors.pop("model.norm.weight", None) is not None:
            save_file(tensors, path)


def quantize_tensor(directory):
    for path in directory.glob("model-*.safetensors"):
        tensors = load_file(path)
        if (weight := tensors.get("model.layers.0.mlp.up_proj.weight")) is not None:
            tensors["model.layers.0.mlp.up_proj.weight"] = (weight * 100).to(torch.float8_e4m3fn)
            tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.full((1, 1), 0.01)
            save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_directory, "no such directory"),
        (remove_config, "no config.json in it"),
        (break_config, "config.json: not readable as JSON"),
        (remove_file, "is missing, though the index names it"),
        (truncate_file, "truncated or damaged"),
        (truncate_header, "truncated or damaged"),
        (remove_weights, "no model.safetensors"),
        (number_in_index, "model.safetensors.index.json has 3 for a file's name"),
        (drop_tensor, "tensor model.norm.weight is missing"),
        (quantize_tensor, "tensor model.layers.0.mlp.up_proj.weight is of F8_E4M3, so it has been quantized"),
    ],
)
def test_a_damaged_checkpoint_gives_one_clear_line(copy, damage, message):
    directory, _ = copy
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"eos_token_id": [3, 4]}, 5, {3, 4}), ({}, 5, {5}), (None, [6], {6}), (None, None, set())],
)
def test_end_of_sequence_ids_come_from_the_generation_config_first(copy, generation, config, expected):
    directory, edit = copy
    edit(eos_token_id=config)
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert Checkpoint(directory).eos_token_ids() == expected


@pytest.mark.parametrize("wrong", [[[174]], 174.0, "174", {"a": 1}, True, -1], ids=str)
def test_end_of_sequence_ids_that_could_never_come_are_refused(copy, wrong):
    directory, edit = copy
    for name in ("config.json", "generation_config.json"):
        edit(eos_token_id=wrong)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(directory).eos_token_ids()
        expected = f"{directory / name}: eos_token_id={wrong!r} is not a token id or a list of them"
        assert str(caught.value) == expected
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))

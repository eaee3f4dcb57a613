"""Checkpoints as transformers 4.x and 5.x write them are read; a bad one gives one clear line."""

import json
import logging
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.teacher_forced import all_logits
from weft.errors import CheckpointError
from weft.models import Checkpoint, Qwen3Config, Qwen3ForCausalLM
from weft.models.generation import KEYS, GenerationDefaults
from weft.parallel.rotary import Rotary


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
    # 257 token ids over 4 ranks: 65 each, and the last has 62 real ones.
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
    assert Qwen3Config.from_dict(old).rotary == Rotary(theta=50.0)
    assert Qwen3Config.from_dict(old).dtype == torch.float32


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 70.0},
        {"rope_parameters": {"rope_theta": 60}, "rope_theta": 70.0},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": None},
        # Beside rope_parameters, rope_scaling replaces them, and their theta with them.
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 70.0},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 80.0}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 80.0}, "rope_parameters": YARN},
        {"rope_scaling": {}},
        {"num_key_value_heads": None},
        {"dtype": "bfloat16", "torch_dtype": "float16"},
        {"layer_types": ["full_attention"] * 3, "max_window_layers": 1, "sliding_window": 4096},
        {"layer_types": ["attention"] * 3},
        {"use_cache": False, "temperature": 0.5, "top_k": 3, "_a_note": 5, "a_new_key": None, "id2label": {"0": "a"}},
    ],
    ids=str,
)
def test_a_config_means_what_it_means_to_transformers(make_checkpoint, changes):
    import transformers

    content = make_checkpoint()[1].config.to_dict() | changes
    found, theirs = Qwen3Config.from_dict(content), transformers.Qwen3Config(**copy_of(content))
    assert theirs.rope_parameters["rope_type"] == "default" and set(theirs.layer_types) == {"full_attention"}
    assert found.rotary.theta == theirs.rope_parameters["rope_theta"]
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "dtype", "vocab_size"):
        assert getattr(found, name) == getattr(theirs, name)


def copy_of(content):
    """transformers writes into what it is given."""
    return json.loads(json.dumps({name: value for name, value in content.items()}))


def test_absent_keys_are_what_transformers_assumes():
    import transformers

    content = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    content |= {"num_hidden_layers": 2, "num_attention_heads": 64}
    found, theirs = Qwen3Config.from_dict(content), transformers.Qwen3Config(**copy_of(content))
    assert found.rotary.theta == theirs.rope_parameters["rope_theta"]
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(found, name) == getattr(theirs, name)


def test_every_key_of_transformers_own_config_is_known(make_checkpoint):
    import transformers

    content = make_checkpoint()[1].config.to_dict()
    assert Qwen3Config.from_dict(transformers.PreTrainedConfig().to_dict() | content).vocab_size == 257
    generation = {name: 1 for name in transformers.GenerationConfig().to_dict() if name != "eos_token_id"}
    # Each has a rule: it is read, it changes nothing, or it is named as not used.
    assert not [name for name in generation if name not in KEYS and not name.startswith("_")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type='gpt2' is not supported; it has layer norms with means; docs/models.md lists what weft runs",
        ),
        (
            {"model_type": "llama"},
            r"architectures=\['Qwen3ForCausalLM'\] is not supported; weft runs 'LlamaForCausalLM'",
        ),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),  # beside rope_parameters
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
            "needs factor, original_max_position_embeddings",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}},
            "factor=0.5 is not a",
        ),
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config with quant_method='awq' is not supp"),
        ({"hidden_size": None}, "hidden_size=None is not a positive integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None is not a positive number"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta='1e6' is not a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not true or false"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        (
            {"layer_types": ["sliding_attention"]},
            r"layer_types\[0\]='sliding_attention' has no window; set sliding_window to its tokens, and use_sliding",
        ),
        (
            {"layer_types": ["chunked_attention"]},
            r"layer_types\[0\]='chunked_attention' is not supported; .*'full_attention'",
        ),
        ({"layer_types": ["full_attention"] * 2}, "is not a list of num_hidden_layers=1"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' is not a list"),
        (
            {"architectures": ["DFlashDraftModel"]},
            r"architectures=\['DFlashDraftModel'\] is not supported; weft runs 'Qwen",
        ),
        ({"is_causal": False}, "is_causal=False is not supported; weft runs Qwen3 with True"),
        ({"is_causal": None}, "is_causal=None is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7}}},
            "rope_parameters has an object under 'full_attention'",
        ),
        ({"rope_parameters": {"rope_type": "default", "factor": 4}}, "rope_parameters: factor=4 is not supported"),
        (
            {"rope_parameters": {"rope_theta": 5, "mscale": 4}},
            "rope_parameters: mscale=4 is a key that weft does not know",
        ),
        ({"rope_scaling": {"type": "proportional", "factor": 2}}, "rope_scaling: type='proportional' is not supported"),
        ({"rope_scaling": {"type": "default"}, "rope_theta": None}, "rope_theta=None is not a positive number"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 is a key that weft does not know; where it changes nothing"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config={.*} is a key that weft does not know"),
        ({"a" * 5000: "b" * 5000}, r"config.json: a{159}\.\.\. \(5,002 characters\) \.\.\.a{14}='b{159}\.\.\. "),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf is not a positive number that is finite"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True is not a positive number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan is not a positive number"),
        (
            {"rms_norm_eps": 10**400},
            r"rms_norm_eps=10{159}\.\.\. \(401 characters\) \.\.\.0{15} is not a positive number",
        ),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta=inf is not a positive number that is finite"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta=True is not a positive number"),
        ({"head_dim": 0}, "head_dim=0 is not a positive integer"),
        ({"head_dim": None}, "head_dim=None is not a positive integer"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not a positive integer"),
        ({"vocab_size": 1 << 40}, r"vocab_size=1099511627776 is not a positive integer below 2\*\*31"),
        ({"num_hidden_layers": 1 << 30}, r"num_hidden_layers=1073741824 is not a positive integer below 2\*\*16"),
        ({"head_dim": 1 << 30}, r"head_dim=1073741824 is not a positive integer below 2\*\*16"),
        ({"dtype": {"": "float32"}}, "dtype={'': 'float32'} is not supported"),
        ({"intermediate_size": 64}, r"gate_proj.weight has shape \(96, 48\), but config.json asks for \(64, 48\)"),
    ],
)
def test_a_config_that_weft_cannot_run_is_refused(copy, changes, message):
    directory, edit = copy
    edit(**changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(directory)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def rewrite(directory, change):
    """All tensors in one file, after `change` of their dictionary; without the index."""
    tensors = {
        name: tensor for path in directory.glob("model*.safetensors") for name, tensor in load_file(path).items()
    }
    for path in directory.glob("model*"):
        path.unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def transformers_logits(directory, tokens, **options):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        return model(tokens).logits, model


TOKENS = torch.tensor([[3, 200, 41, 7, 0]])


def logits_of(directory):
    return load(directory, 1, dtype=torch.float32)[0], weft.simulate(
        lambda team: all_logits(Qwen3ForCausalLM.from_pretrained(directory, team, mode="torch"), TOKENS), 1
    )[0]


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_config_beside_a_head_is_what_transformers_makes_of_it(copy, equal):
    directory, edit = copy
    edit(tie_word_embeddings=True)

    def change(tensors):
        if equal:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(directory, change)
    model, found = logits_of(directory)
    expected, theirs = transformers_logits(directory, TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == equal
    assert (model.lm_head.weight is model.embed_tokens.weight) == equal


def test_of_a_whole_file_and_an_index_the_whole_file_is_read(copy):
    directory, _ = copy
    tensors = {
        name: tensor for path in directory.glob("model-*.safetensors") for name, tensor in load_file(path).items()
    }
    tensors["model.norm.weight"] = -2 * tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _, found = logits_of(directory)
    torch.testing.assert_close(found, transformers_logits(directory, TOKENS)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_a_dtype_it_is_that_of_the_weights(copy, dtype):
    directory, edit = copy
    edit(dtype=None)
    rewrite(directory, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    assert Qwen3Config.of(Checkpoint(directory)).dtype == dtype
    assert transformers_logits(directory, TOKENS)[1].dtype == dtype
    assert {weight.dtype for weight in load(directory)[1].parameters()} == {dtype}


def test_an_adapter_beside_the_weights_is_refused(copy):
    directory, _ = copy
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="adapter_config.json names an adapter; pass its model, and this directory as an adapter"
    ):
        Checkpoint(directory)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_named_in_one_line(copy, caplog, value):
    directory, _ = copy

    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][-1, -1] = value  # of the last rank
        tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)  # finite, and their sum is not

    rewrite(directory, change)
    load(directory, 2)
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("weft.")]
    expected = "NaN or infinite weights in float32, so answers mean nothing: model.layers.0.mlp.up_proj.weight"
    assert line == f"{directory}: {expected}"


def test_weights_that_are_too_large_for_the_dtype_asked_for_are_named(copy, caplog):
    directory, _ = copy
    rewrite(directory, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    load(directory)
    assert not caplog.records
    load(directory, dtype=torch.float16)
    assert "NaN or infinite weights in float16, so answers mean nothing: model.norm.weight" in caplog.text


def test_tensors_that_the_model_does_not_have_are_named(copy, caplog):
    directory, _ = copy
    extra = {f"model.layers.0.self_attn.{name}_proj.bias": torch.ones(4) for name in "qkvo"}
    rewrite(directory, lambda tensors: tensors.update(extra | {"model.rotary_emb.inv_freq": torch.ones(8)}))
    load(directory)
    [record] = caplog.records
    assert "does not use: model.layers.0.self_attn.k_proj.bias, " in record.getMessage()
    assert record.getMessage().endswith(" and 1 more") and record.levelno == logging.WARNING


@pytest.fixture
def biased(make_checkpoint, tmp_path):
    """A copy of a checkpoint of Qwen2.5 to damage."""
    return shutil.copytree(make_checkpoint("Qwen2", num_hidden_layers=1)[0], tmp_path / "biased")


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_bias_that_is_missing_is_named(biased, part):
    name = f"model.layers.0.self_attn.{part}_proj.bias"
    rewrite(biased, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing; the checkpoint is not complete"):
        load(biased)


def test_a_bias_of_another_shape_and_one_too_much_are_named(biased, caplog):
    name = "model.layers.0.self_attn.o_proj.bias"
    rewrite(biased, lambda tensors: tensors.update({name: torch.ones(48)}))
    load(biased)
    [record] = caplog.records
    assert record.getMessage().endswith(f"tensors that this model does not have, and does not use: {name}")
    name = "model.layers.0.self_attn.v_proj.bias"
    rewrite(biased, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \(16,\), but config.json asks for \(32,\)"):
        load(biased)


@pytest.fixture
def routed(make_checkpoint, tmp_path):
    """A copy of a checkpoint of Qwen2-MoE with 4 experts to damage."""
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    }
    directory, _ = make_checkpoint("Qwen2Moe", num_hidden_layers=1, **sizes)
    return shutil.copytree(directory, tmp_path / "routed")


MLP = "model.layers.0.mlp"


@pytest.mark.parametrize(
    "name", ["experts.0.up_proj", "experts.3.down_proj", "gate", "shared_expert.gate_proj", "shared_expert_gate"]
)
def test_an_expert_that_is_missing_is_named(routed, name):
    rewrite(routed, lambda tensors: tensors.pop(f"{MLP}.{name}.weight"))
    with pytest.raises(CheckpointError, match=f"tensor {MLP}.{name}.weight is missing; the checkpoint is not complete"):
        load(routed)


def test_an_expert_too_many_is_named(routed, caplog):
    extra = {f"{MLP}.experts.4.{part}_proj.weight": torch.ones(16, 48) for part in ("gate", "up", "down")}
    rewrite(routed, lambda tensors: tensors.update(extra))
    load(routed)
    [record] = caplog.records
    assert record.getMessage().endswith(", ".join(sorted(extra)))


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [("gate", (5, 48), "(4, 48)"), ("gate", (4, 40), "(4, 48)"), ("shared_expert_gate", (2, 48), "(1, 48)"),
     ("shared_expert.up_proj", (24, 48), "(32, 48)"), ("experts.2.down_proj", (48, 24), "(48, 16)")],
)  # fmt: skip
def test_a_router_or_an_expert_of_another_shape_is_refused(routed, name, shape, wanted):
    rewrite(routed, lambda tensors: tensors.update({f"{MLP}.{name}.weight": torch.ones(shape)}))
    expected = f"tensor {MLP}.{name}.weight has shape {shape}, but config.json asks for {wanted}"
    with pytest.raises(CheckpointError, match=re.escape(expected)) as caught:
        load(routed)
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
    [
        ({"eos_token_id": [3, 4]}, 5, {3, 4}),
        ({}, 5, {5}),
        ({}, None, set()),
        (None, [6], {6}),
        (None, None, set()),
    ],
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


QWEN3 = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 1], "pad_token_id": 1, "temperature": 0.6}
QWEN3 |= {"top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}


@pytest.mark.parametrize(
    ("content", "drawn", "unused"),
    [
        ({}, (0.0, 1.0, 0, 0.0), []),
        (QWEN3, (0.6, 0.95, 20, 0.0), []),
        (QWEN3 | {"top_k": 0, "min_p": 0.1}, (0.6, 0.95, 0, 0.1), []),
        (QWEN3 | {"do_sample": False}, (0.0, 1.0, 0, 0.0), []),
        ({"temperature": 0.5, "top_p": 0.5, "min_p": 0.1}, (0.0, 1.0, 0, 0.0), []),  # not drawn
        ({"do_sample": True}, (1.0, 1.0, 50, 0.0), []),  # transformers' default
        ({"do_sample": True, "typical_p": 0.5}, (1.0, 1.0, 50, 0.0), ["typical_p=0.5"]),
        ({"no_repeat_ngram_size": 3, "max_length": 20}, (0.0, 1.0, 0, 0.0), ["no_repeat_ngram_size=3", "max_length=20"]),
        ({"repetition_penalty": 1.0, "min_length": 0, "num_beams": 1, "use_cache": False}, (0.0, 1.0, 0, 0.0), []),
        ({"num_beams": 4, "a_key_of_tomorrow": 7}, (0.0, 1.0, 0, 0.0), ["num_beams=4", "a_key_of_tomorrow=7"]),
    ],
    ids=str,
)  # fmt: skip
def test_defaults_of_a_generation_config_are_read_or_named(content, drawn, unused):
    found = GenerationDefaults.from_dict(content)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == drawn
    assert list(found.unused) == unused


def test_penalties_and_least_tokens_of_a_generation_config_are_followed():
    found = GenerationDefaults.from_dict({"repetition_penalty": 1.05, "min_new_tokens": 4})
    assert (found.repetition_penalty, found.min_new_tokens, found.unused) == (1.05, 4, ())


def test_a_config_of_old_holds_the_defaults_where_nothing_else_does(copy):
    directory, edit = copy
    edit(do_sample=True, temperature=0.5, top_k=0, max_new_tokens=9, is_causal=True)
    assert Checkpoint(directory).generation_defaults().temperature == 0.0  # there is a generation_config.json
    (directory / "generation_config.json").unlink()
    found = Checkpoint(directory).generation_defaults()
    assert found == GenerationDefaults(temperature=0.5, max_new_tokens=9)

"""config.json of models as their authors publish them: read as transformers reads them, with keys that it does not read."""

import copy
import logging
from dataclasses import replace

import pytest
import torch

from tests.models.official_configs import CONFIGS, MULTIMODAL
from weft.errors import CheckpointError
from weft.models import DecoderConfig, config, families, generation, refusals

RUN = {name: content for name, content in CONFIGS.items() if content["model_type"] in families.FAMILIES}


def test_seventy_published_configs_of_all_kinds_are_read():
    assert len(RUN) >= 70
    assert {content["model_type"] for content in RUN.values()} >= {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe",
    }  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_a_published_config_means_what_it_means_to_transformers(name):
    transformers = pytest.importorskip("transformers")
    content = RUN[name]
    # Its package may not be installed.
    given = {key: value for key, value in copy.deepcopy(content).items() if key != "attn_implementation"}
    theirs = transformers.AutoConfig.for_model(**given)
    made = DecoderConfig.from_dict(content)
    # A latent stands for all heads.
    heads = () if made.attention.latent else ("num_key_value_heads",)
    for key in ("rms_norm_eps", "tie_word_embeddings", *heads):
        assert getattr(made, key) == getattr(theirs, key), key
    assert made.max_position_embeddings == made.rotary.positions(theirs.max_position_embeddings)
    theirs.num_hidden_layers = layers = min(theirs.num_hidden_layers, 4)
    if getattr(theirs, "layer_types", None) is not None:
        theirs.layer_types = theirs.layer_types[:layers]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    matrices = {
        id(weight): weight.numel()
        for key, weight in model.named_parameters()
        if weight.dim() >= 2 and "bias" not in key and "conv1d" not in key
    }
    assert replace(made, num_hidden_layers=layers).parameters == sum(matrices.values())
    for index, layer in enumerate(model.model.layers):
        if (attention := getattr(layer, "self_attn", None)) is None or made.attention.latent:
            continue
        assert made.head_dim == attention.head_dim
        if hasattr(attention, "q_proj"):
            assert made.attention.bias == (attention.q_proj.bias is not None)
        whole = theirs.sliding_window if content["model_type"] in ("mistral", "mixtral", "phi3") else None
        # Exaone4Attention has one in all layers.
        windowed = getattr(attention, "is_sliding", True)
        assert made.attention.window(index) == (getattr(attention, "sliding_window", whole) if windowed else None)
    dtype = content.get("dtype") or content.get("torch_dtype") or "bfloat16"
    rope = theirs.rope_parameters
    rope = rope.get("full_attention", rope)
    assert made.rotary.theta == rope["rope_theta"]
    assert made.rotary.partial == rope.get("partial_rotary_factor", 1.0)
    assert made.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_published_multimodal_config_is_that_of_its_text_model(name):
    transformers = pytest.importorskip("transformers")
    content = MULTIMODAL[name]
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(content))
    made, text = DecoderConfig.from_dict(content), theirs.text_config
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    ):
        assert getattr(made, key, None) == getattr(text, key, None), key
    if hasattr(text, "intermediate_size"):
        assert made.intermediate_size == text.intermediate_size
    assert made.tie_word_embeddings == getattr(theirs, "tie_word_embeddings", False)
    assert made.rotary.theta == text.rope_parameters.get("full_attention", text.rope_parameters)["rope_theta"]


@pytest.mark.parametrize("name", [name for name in RUN if name.lower() in families.PUBLISHED])
def test_a_model_of_a_known_name_is_the_one_of_its_published_config(name):
    """But for the positions of Qwen2.5's base models, and for weights that are stored in 4 bits."""
    made = DecoderConfig.from_dict(RUN[name])
    apart = {"max_position_embeddings": made.max_position_embeddings, "quantization": made.quantization}
    assert replace(DecoderConfig.named(name.lower()), **apart) == made


@pytest.mark.parametrize("name", ["Kimi-K2-Instruct", "Kimi-K2-Thinking"])
def test_a_config_by_another_name_of_a_family_is_read_as_that_family(name):
    """Kimi-K2's files name DeepSeek's code by a model_type of their own, which transformers does not know."""
    content = CONFIGS[name]
    assert DecoderConfig.from_dict(content) == DecoderConfig.from_dict(content | {"model_type": "deepseek_v3"})
    assert DecoderConfig.from_dict(content).parameters == pytest.approx(1026e9, rel=0.005)


def test_an_older_name_of_a_family_s_class_is_taken():
    """Baidu's files of 2025 name the class that came with them."""
    content = CONFIGS["ERNIE-4.5-0.3B-PT"]
    older = content | {"architectures": ["Ernie4_5_ForCausalLM"]}
    assert DecoderConfig.from_dict(older) == DecoderConfig.from_dict(content)
    with pytest.raises(CheckpointError, match=r"architectures=\['Ernie4_5_Model'\] is not supported"):
        DecoderConfig.from_dict(content | {"architectures": ["Ernie4_5_Model"]})


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v32", "it has sparse attention by an indexer"),
        ("llama4", "it has attention in chunks, and experts whose input is scaled"),
        ("nemotron_h", r"it has layers of state spaces \(Mamba\)"),
        ("gemma5", "weft runs 'qwen3', 'qwen3_moe'"),
        (["deepseek_v32"], "weft runs 'qwen3'"),
    ],
    ids=str,
)
def test_a_family_that_weft_lacks_is_refused_by_what_it_has(model_type, reason):
    with pytest.raises(CheckpointError, match=f"is not supported; {reason}"):
        DecoderConfig.from_dict({"model_type": model_type})


def test_no_family_is_refused():
    refused = {model_type for model_types in refusals.REASONS.values() for model_type in model_types}
    assert not refused & {*families.FAMILIES, *families.ALIASES}


def keys_of(model_type, **given):
    """Keys that transformers' class of a model_type reads, with the values that it assumes beside the given ones."""
    config = pytest.importorskip("transformers").AutoConfig.for_model(model_type, **given)
    return {key: value for key, value in config.to_dict().items() if not key.startswith("_")}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_key_that_transformers_reads_is_known(name):
    """Otherwise one that asks for nothing could change the model."""
    family = families.FAMILIES[name]
    known = {*config.KNOWN, *config.READ, *family.reads, *config.SUPPORTED, *family.supported, *generation.KEYS}
    keys = keys_of(name).keys()
    assert not keys - known
    assert not keys & set(family.without_effect)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_an_absent_key_means_what_transformers_assumes(name):
    """Else a file that lacks it would run with another value than the one that weft computes."""
    family, keys = families.FAMILIES[name], keys_of(name)
    rope = keys.get("rope_parameters") or {}
    if "use_sliding_window" in family.defaults:
        # Without it transformers' classes have no sliding_window.
        keys["sliding_window"] = keys_of(name, use_sliding_window=True)["sliding_window"]
    for key, value in family.defaults.items():
        if key == "rope_theta":
            assert value == rope.get("rope_theta", value)
        elif key in keys and not (value is None and key in ("num_key_value_heads", "head_dim")):
            assert value == keys[key], key
    supported = {**config.SUPPORTED, **family.supported}
    for key in keys.keys() & supported.keys() - {*config.READ, *family.reads}:
        assert keys[key] in supported[key], key


SMALL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip
WITHOUT_EFFECT = {
    "keys_to_ignore_at_inference": ["past_key_values"], "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "model_max_length": 4096, "max_sequence_length": 2048, "neftune_noise_alpha": 5.0, "seq_length": 8192,
    "is_llama_config": True, "activation": "silu", "max_window_layers": 28, "mlp_only_layers": [],
    "num_nextn_predict_layers": 0, "resid_pdrop": 0.1, "embd_pdrop": 0.0, "rope_scaling": None, "internal_version": "7b-alpha",
    "sliding_window": None,
}  # fmt: skip


def test_keys_that_transformers_does_not_read_change_nothing(caplog):
    plain = DecoderConfig.from_dict(SMALL)
    with caplog.at_level(logging.DEBUG, logger="weft"):
        for value in (False, None, 0, 0.0, "", [], {}):
            caplog.clear()
            assert DecoderConfig.from_dict({**SMALL, "new_feature": value}) == plain
            [record] = caplog.records
            assert record.levelno == logging.DEBUG and f"new_feature={value} is not known" in record.getMessage()
    assert DecoderConfig.from_dict(SMALL | WITHOUT_EFFECT) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_feature": 1}, "new_feature=1 is a key that weft does not know"),
        ({"new_feature": [0]}, r"new_feature=\[0\] is a key that weft does not know"),
        ({"use_mrope": True}, "use_mrope=True is not supported; weft runs Llama with False"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported; weft runs Llama with False"),
        ({"activation": "gelu"}, "activation='gelu' is not supported; weft runs Llama with 'swiglu'"),
        ({"is_causal": False}, "is_causal=False is not supported"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias=False is not supported"),
        ({"hidden_act": ""}, "hidden_act='' is not supported"),
        ({"sliding_window": 4096}, "sliding_window=4096 is a key that weft does not know"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is a key that weft does not know"),
        ({"use_qk_norm": True}, "use_qk_norm=True is a key that weft does not know"),
        (
            {"model_type": "qwen3_moe", "use_qk_norm": False},
            "use_qk_norm=False is not supported; weft runs Qwen3-MoE with True",
        ),
        (
            {"model_type": "qwen3_moe", "shared_expert_intermediate_size": 64},
            "shared_expert_intermediate_size=64 is a key that",
        ),
    ],
    ids=str,
)
def test_keys_that_matter_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=f"^config.json: {message}"):
        DecoderConfig.from_dict(SMALL | changes)

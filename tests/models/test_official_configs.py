"""config.json of models as their authors publish them: read as transformers reads them, with keys that it does not read."""

import logging

import pytest
import torch

from weft.errors import CheckpointError
from weft.models import DecoderConfig, config, families, generation

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
SMOL = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.041666666666666664, "is_llama_config": True, "mlp_bias": False, "model_type": "llama",
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49152,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}  # fmt: skip
OFFICIAL = {
    "Qwen2.5-0.5B": QWEN | {
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "transformers_version": "4.40.1", "vocab_size": 151936,
    },
    "Qwen2.5-1.5B": QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 28,
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": True, "transformers_version": "4.40.1", "vocab_size": 151936,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": QWEN | {
        "bos_token_id": 151646, "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072,
        "max_window_layers": 21, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "transformers_version": "4.44.0",
        "vocab_size": 151936,
    },
    "SmolLM2-135M-Instruct": SMOL | {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "rope_theta": 100000,
        "transformers_version": "4.42.3",
    },
    "SmolLM2-360M": SMOL | {
        "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 960, "intermediate_size": 2560, "max_position_embeddings": 8192,
        "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "rope_theta": 100000,
    },
    "Falcon3-1B-Base": {
        "activation": "swiglu", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 11, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 4, "pretraining_tp": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000042, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.46.1", "use_cache": True, "vocab_size": 131072,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_published_config_means_what_it_means_to_transformers(name):
    transformers = pytest.importorskip("transformers")
    content = OFFICIAL[name]
    theirs = transformers.AutoConfig.for_model(**content)
    found = DecoderConfig.from_dict(content)
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(found, key) == getattr(theirs, key), key
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.dim() == 2}
    assert found.parameters == sum(matrices.values())
    attention = model.model.layers[0].self_attn
    assert (found.head_dim, found.attention.bias) == (attention.head_dim, attention.q_proj.bias is not None)
    assert found.attention.windows[-1] == getattr(attention, "sliding_window", None)
    assert found.rotary.theta == content["rope_theta"] and found.dtype == torch.bfloat16


def test_every_key_that_transformers_reads_is_known():
    """Otherwise one that asks for nothing could change the model."""
    transformers = pytest.importorskip("transformers")
    for name, family in families.FAMILIES.items():
        known = {*config.KNOWN, *config.READ, *family.reads, *config.SUPPORTED, *family.supported, *generation.KEYS}
        keys = {key for key in transformers.AutoConfig.for_model(name).to_dict() if not key.startswith("_")}
        assert not keys - known


SMALL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip
WITHOUT_EFFECT = {
    "keys_to_ignore_at_inference": ["past_key_values"], "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "model_max_length": 4096, "max_sequence_length": 2048, "neftune_noise_alpha": 5.0, "seq_length": 8192,
    "is_llama_config": True, "activation": "silu",
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
    ],
    ids=str,
)
def test_keys_that_matter_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=f"^config.json: {message}"):
        DecoderConfig.from_dict(SMALL | changes)

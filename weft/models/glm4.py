"""GLM-4 of 2025 (0414): the tables of its family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, BlockOptions, Content, Family, WeightNames, flag
from weft.models.joined import GATE_UP


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=flag(content, "attention_bias"), interleaved=True)


def block(content: Content) -> BlockOptions:
    return BlockOptions(norms_after=True)


GLM4 = Family(
    name="GLM-4",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    attention=attention,
    block=block,
    reads=("attention_bias", "partial_rotary_factor"),
    weights=WeightNames(
        joined=(GATE_UP,), attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    ),
    published={
        # config.json of zai-org/GLM-4-9B-0414
        "glm-4-9b-0414": {
            "model_type": "glm4",
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
        },
    },
)

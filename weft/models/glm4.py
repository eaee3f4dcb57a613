"""GLM-4 of 2025 (0414): the tables of its family."""

from __future__ import annotations

from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    BlockOptions,
    Content,
    Family,
    WeightNames,
    always,
    flag,
    table,
)
from weft.models.joined import GATE_UP


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=flag(content, "attention_bias"), interleaved=True)


GLM4 = Family(
    name="GLM-4",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    attention=attention,
    block=always(BlockOptions(norms_after=True)),
    reads=("attention_bias", "partial_rotary_factor"),
    weights=WeightNames(
        joined=(GATE_UP,), attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    ),
    # config.json of zai-org/GLM-4-9B-0414
    published=table(
        SHAPE,
        {"glm-4-9b-0414": (4096, 13696, 40, 32)},
        vocab_size=151552,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        attention_bias=False,
    ),
)

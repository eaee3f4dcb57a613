"""Granite, dense: the tables of its family."""

from __future__ import annotations

from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    BlockOptions,
    Content,
    Family,
    factor_of,
    number_of,
    table,
)


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(scale=number_of(content, "attention_multiplier"))


def block(content: Content) -> BlockOptions:
    return BlockOptions(
        residual_scale=factor_of(content, "residual_multiplier"),
        embedding_scale=factor_of(content, "embedding_multiplier"),
        logits_divisor=factor_of(content, "logits_scaling"),
    )


MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")

COMMON = {
    "num_key_value_heads": 8,
    "rope_theta": 1e7,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}

GRANITE = Family(
    name="Granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={**DEFAULTS, **dict.fromkeys(MULTIPLIERS, 1.0)},
    attention=attention,
    block=block,
    reads=MULTIPLIERS,
    # config.json of ibm-granite/granite-3.3-*-instruct.
    published=table(
        f"{SHAPE} attention_multiplier logits_scaling",
        {
            "granite-3.3-2b": (2048, 8192, 40, 32, 0.015625, 8.0),
            "granite-3.3-8b": (4096, 12800, 40, 32, 0.0078125, 16.0),
        },
        vocab_size=49159,
        rms_norm_eps=1e-5,
        **COMMON,
    ),
)

"""Granite, dense: the tables of its family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, BlockOptions, Content, Family, factor_of, number_of

# hidden, intermediate, attention_multiplier, logits_scaling: config.json of ibm-granite/granite-3.3-*-instruct.
SIZES = {
    "granite-3.3-2b": (2048, 8192, 0.015625, 8.0),
    "granite-3.3-8b": (4096, 12800, 0.0078125, 16.0),
}


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(scale=number_of(content, "attention_multiplier"))


def block(content: Content) -> BlockOptions:
    return BlockOptions(
        residual_scale=factor_of(content, "residual_multiplier"),
        embedding_scale=factor_of(content, "embedding_multiplier"),
        logits_divisor=factor_of(content, "logits_scaling"),
    )


MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")

GRANITE = Family(
    name="Granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **dict.fromkeys(MULTIPLIERS, 1.0),
    },
    attention=attention,
    block=block,
    reads=MULTIPLIERS,
    published={
        name: {
            "model_type": "granite",
            "vocab_size": 49159,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e7,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": attention_multiplier,
            "logits_scaling": logits_scaling,
        }
        for name, (hidden_size, intermediate_size, attention_multiplier, logits_scaling) in SIZES.items()
    },
)

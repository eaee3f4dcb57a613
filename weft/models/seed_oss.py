"""Seed-OSS: the tables of its family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, Content, Family, flag


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=flag(content, "attention_bias"))


SEED_OSS = Family(
    name="Seed-OSS",
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 524288,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    attention=attention,
    reads=("attention_bias",),
    supported={"attention_out_bias": (False, None)},
    published={
        # config.json of ByteDance-Seed/Seed-OSS-36B-Instruct
        "seed-oss-36b": {
            "model_type": "seed_oss",
            "vocab_size": 155136,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "rope_theta": 1e7,
        },
    },
)

"""Seed-OSS: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Content, Family, flag, table


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=flag(content, "attention_bias"))


SEED_OSS = Family(
    name="Seed-OSS",
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    null_head_dim=True,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    attention=attention,
    reads=("attention_bias",),
    supported={"attention_out_bias": (False, None)},
    # config.json of ByteDance-Seed/Seed-OSS-36B-Instruct
    published=table(
        SHAPE, {"seed-oss-36b": (5120, 27648, 64, 80)}, vocab_size=155136, num_key_value_heads=8, rope_theta=1e7
    ),
)

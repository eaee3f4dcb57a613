"""ERNIE 4.5 without experts: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Family, always, table

ERNIE4_5 = Family(
    name="ERNIE 4.5",
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    other_architecture="Ernie4_5_ForCausalLM",
    null_head_dim=True,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    attention=always(AttentionOptions(interleaved=True)),
    supported={"use_bias": (False, None)},
    # config.json of baidu/ERNIE-4.5-0.3B-PT
    published=table(SHAPE, {"ernie-4.5-0.3b": (1024, 3072, 18, 16)}, vocab_size=103424),
)

"""Qwen3, dense: the tables of its family."""

from __future__ import annotations

from weft.models.family import SHAPE, WINDOW_KEYS, AttentionOptions, Content, Family, table, windows_by_layer
from weft.models.qwen2 import QWEN2


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=True, windows=windows_by_layer(content))


QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": 128},
    attention=attention,
    reads=WINDOW_KEYS,
    # config.json of Qwen/Qwen3-*.
    published=table(
        f"{SHAPE} tie_word_embeddings",
        {
            "qwen3-0.6b": (1024, 3072, 28, 16, True),
            "qwen3-1.7b": (2048, 6144, 28, 16, True),
            "qwen3-4b": (2560, 9728, 36, 32, True),
            "qwen3-8b": (4096, 12288, 36, 32, False),
            "qwen3-14b": (5120, 17408, 40, 40, False),
            "qwen3-32b": (5120, 25600, 64, 64, False),
        },
        vocab_size=151936,
        num_key_value_heads=8,
        rope_theta=1e6,
        max_position_embeddings=40960,
    ),
)

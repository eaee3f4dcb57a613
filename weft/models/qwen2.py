"""Qwen2 and Qwen2.5, dense: the tables of their family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, WINDOW_KEYS, AttentionOptions, Content, Family, table, windows_by_layer


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=True, windows=windows_by_layer(content))


QWEN2 = Family(
    name="Qwen2.5",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    attention=attention,
    reads=WINDOW_KEYS,
    supported={"attention_bias": (True, None), "qkv_bias": (True, None)},
    # config.json of Qwen/Qwen2.5-*-Instruct.
    published=table(
        f"{SHAPE} num_key_value_heads vocab_size tie_word_embeddings",
        {
            "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
            "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
            "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
            "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
            "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, False),
            "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False),
            "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152064, False),
        },
        rope_theta=1e6,
        max_position_embeddings=32768,
    ),
)

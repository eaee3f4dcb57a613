"""Qwen3, dense: the tables of its family."""

from __future__ import annotations

from weft.models.family import WINDOW_KEYS, AttentionOptions, Content, Family, windows_by_layer

# hidden, intermediate, layers, heads, whether head and embedding share their weight: config.json of Qwen/Qwen3-*.
SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-14b": (5120, 17408, 40, 40, False),
    "qwen3-32b": (5120, 25600, 64, 64, False),
}


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=True, windows=windows_by_layer(content))


QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    attention=attention,
    reads=WINDOW_KEYS,
    published={
        name: {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": tied,
        }
        for name, (hidden_size, intermediate_size, layers, heads, tied) in SIZES.items()
    },
)

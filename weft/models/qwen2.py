"""Qwen2 and Qwen2.5, dense: the tables of their family."""

from __future__ import annotations

from weft.models.family import WINDOW_KEYS, AttentionOptions, Content, Family, windows_by_layer

# hidden, intermediate, layers, heads, KV heads, vocabulary, whether head and embedding share their weight: config.json of
# Qwen/Qwen2.5-*-Instruct.
SIZES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152064, False),
}


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=True, windows=windows_by_layer(content))


QWEN2 = Family(
    name="Qwen2.5",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
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
    supported={"attention_bias": (True, None), "qkv_bias": (True, None)},
    published={
        name: {
            "model_type": "qwen2",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": tied,
        }
        for name, (hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size, tied) in SIZES.items()
    },
)

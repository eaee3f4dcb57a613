"""Llama 2 and 3, and models of their architecture: the tables of their family."""

from __future__ import annotations

from weft.models.family import Family

# hidden, intermediate, layers, heads, head_dim, rope factor, whether head and embedding share their weight: config.json of
# meta-llama/Llama-3.*. That of Llama-3.3-70B is Llama-3.1-70B's.
SIZES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 128, 8.0, False),
    "llama-3.1-70b": (8192, 28672, 80, 64, 128, 8.0, False),
    "llama-3.2-1b": (2048, 8192, 16, 32, 64, 32.0, True),
    "llama-3.2-3b": (3072, 8192, 28, 24, 128, 32.0, True),
}

LLAMA = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    published={
        name: {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": tied,
        }
        for name, (hidden_size, intermediate_size, layers, heads, head_dim, factor, tied) in SIZES.items()
    },
)

"""Llama 2 and 3, and models of their architecture: the tables of their family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, Content, Family, table


def rope(factor: float) -> Content:
    """rope_scaling of a published file."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


LLAMA = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=DEFAULTS,
    # config.json of meta-llama/Llama-3.*. That of Llama-3.3-70B is Llama-3.1-70B's.
    published=table(
        f"{SHAPE} head_dim rope_scaling tie_word_embeddings",
        {
            "llama-3.1-8b": (4096, 14336, 32, 32, 128, rope(8.0), False),
            "llama-3.1-70b": (8192, 28672, 80, 64, 128, rope(8.0), False),
            "llama-3.2-1b": (2048, 8192, 16, 32, 64, rope(32.0), True),
            "llama-3.2-3b": (3072, 8192, 28, 24, 128, rope(32.0), True),
        },
        vocab_size=128256,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=131072,
    ),
)

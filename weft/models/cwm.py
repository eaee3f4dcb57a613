"""Code World Model: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Content, Family, table, windows_of_pattern
from weft.models.llama import rope


def attention(content: Content) -> AttentionOptions:
    """Windows in all layers but every fourth from the first on, unless layer_types says which."""
    return AttentionOptions(windows=windows_of_pattern(content, 4, 0))


CWM = Family(
    name="CWM",
    model_type="cwm",
    architecture="CwmForCausalLM",
    null_head_dim=True,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_parameters": {**rope(16.0), "rope_theta": 1e6},
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
    },
    attention=attention,
    reads=("sliding_window", "layer_types"),
    # config.json of facebook/cwm
    published=table(SHAPE, {"cwm-32b": (6144, 21504, 64, 48)}, vocab_size=128256),
)

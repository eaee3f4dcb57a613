"""EXAONE 4: the tables of its family."""

from __future__ import annotations

from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    Content,
    Family,
    count_of,
    table,
    windows_of_pattern,
    windows_of_types,
)
from weft.models.llama import rope
from weft.models.olmo2 import OLMO2


def attention(content: Content) -> AttentionOptions:
    """Windows by layer, and rotary embedding in the layers that have one; without windows in all layers."""
    if content["sliding_window"] is None:
        if content.get("layer_types") is not None:
            windows_of_types(content, None)  # refuses layers with a window
        return AttentionOptions(qk_norm=True)
    by_types = content.get("layer_types") is not None
    # Beside layer_types it may be a text, such as "LLLG".
    period = 1 if by_types else count_of(content, "sliding_window_pattern")
    windows = windows_of_pattern(content, period)
    return AttentionOptions(qk_norm=True, windows=windows, rotated=tuple(window is not None for window in windows))


EXAONE4 = Family(
    name="EXAONE 4",
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    attention=attention,
    block=OLMO2.block,
    reads=("sliding_window", "sliding_window_pattern", "layer_types"),
    # config.json of LGAI-EXAONE/EXAONE-4.0-32B
    published=table(
        SHAPE,
        {"exaone-4.0-32b": (5120, 27392, 64, 40)},
        vocab_size=102400,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rope_scaling=rope(16.0),
        max_position_embeddings=131072,
    ),
)

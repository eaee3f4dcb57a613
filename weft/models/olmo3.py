"""OLMo 3: the tables of its family."""

from __future__ import annotations

from weft.models.family import SHAPE, AttentionOptions, Content, Family, table, windows_of_pattern
from weft.models.olmo2 import OLMO2

THETA = 500000.0
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=True, norm_all_heads=True, windows=windows_of_pattern(content, 4))


def window_rope(content: Content) -> Content:
    """Rotary embedding of layers with a window: without scaling.

    In a file without rope_parameters transformers takes its default for their base, not rope_theta.
    """
    by_type = content.get("rope_parameters") or {}
    return {"rope_theta": THETA, **(by_type.get("sliding_attention") or {})}


OLMO3 = Family(
    name="OLMo 3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "rope_theta": THETA, "sliding_window": 4096},
    attention=attention,
    window_rope=window_rope,
    block=OLMO2.block,
    reads=("layer_types", "sliding_window"),
    # config.json of allenai/Olmo-3-1025-7B and Olmo-3-1125-32B.
    published=table(
        f"{SHAPE} num_key_value_heads",
        {"olmo-3-7b": (4096, 11008, 32, 32, 32), "olmo-3-32b": (5120, 27648, 64, 40, 8)},
        vocab_size=100278,
        rms_norm_eps=1e-6,
        rope_theta=THETA,
        rope_scaling=YARN,
        max_position_embeddings=65536,
    ),
)

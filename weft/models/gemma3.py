"""Gemma 3, its language model: the tables of its family."""

from __future__ import annotations

from functools import partial

from weft.models import gemma2
from weft.models.family import (
    SHAPE,
    AttentionOptions,
    Content,
    Family,
    count_of,
    table,
    window_rope,
    windows_of_pattern,
)

# Scaling of angles in layers without a window.
LINEAR = {"rope_type": "linear", "factor": 8.0}


def attention(content: Content) -> AttentionOptions:
    # transformers does not read attn_logit_softcapping.
    windows = windows_of_pattern(content, count_of(content, "sliding_window_pattern"))
    return AttentionOptions(qk_norm=True, windows=windows, scale=gemma2.scale(content))


GEMMA3_TEXT = Family(
    name="Gemma 3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **gemma2.GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    attention=attention,
    window_rope=partial(window_rope, theta="rope_local_base_freq"),
    block=gemma2.block,
    reads=(*gemma2.READS, "sliding_window_pattern", "rope_local_base_freq"),
    supported=gemma2.SUPPORTED,
    weights=gemma2.WEIGHTS,
    # config.json of google/gemma-3-1b-pt, text_config of google/gemma-3-*-pt.
    published=table(
        f"{SHAPE} num_key_value_heads head_dim query_pre_attn_scalar sliding_window vocab_size max_position_embeddings "
        "rope_scaling",
        {
            "gemma-3-1b": (1152, 6912, 26, 4, 1, 256, 256, 512, 262144, 32768, None),
            "gemma-3-4b": (2560, 10240, 34, 8, 4, 256, 256, 1024, 262208, 131072, LINEAR),
            "gemma-3-12b": (3840, 15360, 48, 16, 8, 256, 256, 1024, 262208, 131072, LINEAR),
            "gemma-3-27b": (5376, 21504, 62, 32, 16, 128, 168, 1024, 262208, 131072, LINEAR),
        },
    ),
)

"""Gemma 2: the tables of its family."""

from __future__ import annotations

from dataclasses import replace

from weft.models.family import (
    SHAPE,
    AttentionOptions,
    BlockOptions,
    Content,
    Family,
    WeightNames,
    number_of,
    number_or_none,
    table,
    windows_of_pattern,
)
from weft.models.gemma import GEMMA


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(
        windows=windows_of_pattern(content, 2),
        scale=scale(content),
        softcap=number_or_none(content, "attn_logit_softcapping"),
    )


def scale(content: Content) -> float | None:
    """Scale of scores; None: that of all families."""
    scalar = number_of(content, "query_pre_attn_scalar")
    return None if scalar == content["head_dim"] else scalar**-0.5


def block(content: Content) -> BlockOptions:
    softcap = number_or_none(content, "final_logit_softcapping")
    return replace(GEMMA.block(content), norms_after=True, logits_softcap=softcap)


WEIGHTS = WeightNames(post_norm="pre_feedforward_layernorm")
SCORES = "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"
READS = "layer_types", "sliding_window", *SCORES
SUPPORTED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh", "gelu", None),  # transformers reads hidden_activation alone
    "use_bidirectional_attention": (False, None),
}

GEMMA2 = Family(
    name="Gemma 2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        **GEMMA.defaults,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    attention=attention,
    block=block,
    reads=READS,
    supported=SUPPORTED | {"sliding_window_size": (4096, None)},
    weights=WEIGHTS,
    # config.json of google/gemma-2-*.
    published=table(
        f"{SHAPE} num_key_value_heads head_dim query_pre_attn_scalar",
        {
            "gemma-2-2b": (2304, 9216, 26, 8, 4, 256, 256),
            "gemma-2-9b": (3584, 14336, 42, 16, 8, 256, 256),
            "gemma-2-27b": (4608, 36864, 46, 32, 16, 128, 144),
        },
        vocab_size=256000,
    ),
)

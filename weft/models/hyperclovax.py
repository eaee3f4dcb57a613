"""HyperCLOVA X SEED: the tables of its family."""

from __future__ import annotations

from dataclasses import replace

from weft.models.family import (
    DEFAULTS,
    AttentionOptions,
    BlockOptions,
    Content,
    Family,
    WeightNames,
    factor_of,
    flag,
)
from weft.models.granite import GRANITE

MULTIPLIERS = "embedding_multiplier", "residual_multiplier", "logits_scaling"


def attention(content: Content) -> AttentionOptions:
    """Granite's attention; without attention_multiplier scores have the scale of all families."""
    return AttentionOptions() if content.get("attention_multiplier") is None else GRANITE.attention(content)


def block(content: Content) -> BlockOptions:
    """Granite's block; logits_scaling is a factor of logits, not their divisor."""
    factor = factor_of(content, "logits_scaling")
    divisor = None if factor is None else 1 / factor
    return replace(GRANITE.block(content), norms_after=flag(content, "use_post_norm"), logits_divisor=divisor)


HYPERCLOVAX = Family(
    name="HyperCLOVA X",
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    defaults={**DEFAULTS, **dict.fromkeys(MULTIPLIERS, 1.0), "use_post_norm": True},
    attention=attention,
    block=block,
    reads=(*MULTIPLIERS, "attention_multiplier", "use_post_norm"),
    weights=WeightNames(attention_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    published={},
)

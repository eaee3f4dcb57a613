"""Qwen3-VL's text models, dense and with experts: the tables of their families.

They are Qwen3's without windows. A text token has one position in all sections of the multimodal rotary embedding, so that it
is a plain one.
"""

from __future__ import annotations

from weft.models import qwen3_moe
from weft.models.family import (
    DEFAULTS,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    StackedExperts,
    WeightNames,
    always,
)

COMMON = {**DEFAULTS, "rope_theta": 500000.0, "max_position_embeddings": 128000}
# Of positions in images.
WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved")


ATTENTION = always(AttentionOptions(qk_norm=True))


def experts(content: Content) -> ExpertOptions:
    # transformers' class has weights that add up to 1.
    return qwen3_moe.experts({**content, "norm_topk_prob": True})


QWEN3_VL_TEXT = Family(
    name="Qwen3-VL",
    model_type="qwen3_vl_text",
    architecture="Qwen3VLForConditionalGeneration",
    defaults={**COMMON, "num_key_value_heads": 32, "head_dim": 128},
    attention=ATTENTION,
    without_effect=WITHOUT_EFFECT,
    published={},
)
QWEN3_VL_MOE_TEXT = Family(
    name="Qwen3-VL-MoE",
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeForConditionalGeneration",
    defaults={
        **COMMON,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    attention=ATTENTION,
    experts=experts,
    reads=(*{*qwen3_moe.READS} - {"norm_topk_prob"}, "num_local_experts"),
    supported={"norm_topk_prob": (True, None), "sliding_window": (None,)},
    without_effect=WITHOUT_EFFECT,
    weights=WeightNames(stacked=StackedExperts(transposed=True)),
    published={},
)

"""Qwen1.5 and Qwen2 with experts: the tables of their family."""

from __future__ import annotations

from dataclasses import replace

from weft.models import qwen3_moe
from weft.models.family import (
    SHAPE,
    WINDOW_KEYS,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    count_of,
    flag,
    table,
    windows_by_layer,
)
from weft.models.qwen2 import QWEN2


def attention(content: Content) -> AttentionOptions:
    if content["sliding_window"] == 0 and not flag(content, "use_sliding_window"):
        content = {**content, "sliding_window": None}  # transformers 5 writes 0 for none
    # As transformers 5 has it: every other layer, the first one too.
    windows = windows_by_layer(content, lambda layer, most: layer % 2 == 0 and layer < most)
    return AttentionOptions(bias=flag(content, "qkv_bias"), windows=windows)


def experts(content: Content) -> ExpertOptions:
    shared = count_of(content, "shared_expert_intermediate_size")
    return replace(qwen3_moe.experts(content), shared_intermediate_size=shared, shared_gate=True)


QWEN2_MOE = Family(
    name="Qwen2-MoE",
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        **QWEN2.defaults,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        **qwen3_moe.SPARSE,
    },
    attention=attention,
    experts=experts,
    reads=(*qwen3_moe.READS, *WINDOW_KEYS, "shared_expert_intermediate_size", "qkv_bias"),
    supported={"attention_bias": (True, None)},
    # config.json of Qwen/Qwen1.5-MoE-A2.7B and Qwen/Qwen2-57B-A14B; intermediate_size is that of dense layers.
    published=table(
        f"{SHAPE} num_key_value_heads max_position_embeddings num_experts num_experts_per_tok moe_intermediate_size "
        "shared_expert_intermediate_size",
        {
            "qwen1.5-moe-a2.7b": (2048, 5632, 24, 16, 16, 8192, 60, 4, 1408, 5632),
            "qwen2-57b-a14b": (3584, 18944, 28, 28, 4, 131072, 64, 8, 2560, 20480),
        },
        vocab_size=151936,
        rope_theta=1e6,
    ),
)

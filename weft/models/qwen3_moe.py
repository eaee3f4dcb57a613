"""Qwen3 with experts: the tables of its family."""

from __future__ import annotations

from weft.models.family import (
    SHAPE,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    count_of,
    experts_of,
    flag,
    layers_with_experts,
    table,
    window_of,
)
from weft.models.qwen3 import QWEN3

SPARSE = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
READS = "num_experts", "num_experts_per_tok", "moe_intermediate_size", *SPARSE


def attention(content: Content) -> AttentionOptions:
    # transformers has the window in all layers, and does not read max_window_layers.
    return AttentionOptions(
        qk_norm=True, windows=(window_of(content) if flag(content, "use_sliding_window") else None,)
    )


def experts(content: Content) -> ExpertOptions:
    # transformers 5 writes num_local_experts, published files have num_experts.
    named = "num_local_experts" if content.get("num_local_experts") is not None else "num_experts"
    total, chosen = experts_of(content, named)
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=count_of(content, "moe_intermediate_size"),
        norm_topk_prob=flag(content, "norm_topk_prob"),
        layers=layers_with_experts(content),
    )


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **QWEN3.defaults,
        "num_key_value_heads": 4,
        "head_dim": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        **SPARSE,
    },
    attention=attention,
    experts=experts,
    reads=(*READS, "num_local_experts", "use_sliding_window", "sliding_window", "max_window_layers"),
    supported={"use_qk_norm": (True, None)},
    # config.json of Qwen/Qwen3-*; intermediate_size is that of dense layers.
    published=table(
        f"{SHAPE} moe_intermediate_size",
        {"qwen3-30b-a3b": (2048, 6144, 48, 32, 768), "qwen3-235b-a22b": (4096, 12288, 94, 64, 1536)},
        vocab_size=151936,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e6,
        max_position_embeddings=40960,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
)

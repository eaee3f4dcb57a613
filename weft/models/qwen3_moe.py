"""Qwen3 with experts: the tables of its family."""

from __future__ import annotations

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import WINDOW_KEYS, Content, ExpertOptions, Family, count_of, flag
from weft.models.qwen3 import QWEN3

# hidden, intermediate of dense layers, layers, heads, intermediate of an expert: config.json of Qwen/Qwen3-*.
SIZES = {
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 768),
    "qwen3-235b-a22b": (4096, 12288, 94, 64, 1536),
}


def experts(content: Content) -> ExpertOptions | None:
    # transformers 5 writes num_local_experts, published files have num_experts.
    total = count_of(content, "num_local_experts" if content.get("num_local_experts") is not None else "num_experts")
    step, dense, layers = (
        count_of(content, "decoder_sparse_step"),
        content["mlp_only_layers"] or [],
        content["num_hidden_layers"],
    )
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers={quoted(dense)} is not a list of layers")
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=count_of(content, "num_experts_per_tok", min(total, 16)),
        intermediate_size=count_of(content, "moe_intermediate_size"),
        norm_topk_prob=flag(content, "norm_topk_prob"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **QWEN3.defaults,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    attention=QWEN3.attention,
    experts=experts,
    reads=(
        *WINDOW_KEYS,
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    ),
    published={
        name: {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "max_position_embeddings": 40960,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": of_expert,
            "norm_topk_prob": True,
        }
        for name, (hidden_size, intermediate_size, layers, heads, of_expert) in SIZES.items()
    },
)

"""MiniMax-M2: the tables of its family."""

from __future__ import annotations

from dataclasses import replace

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    WeightNames,
    local_experts,
    table,
)


def attention(content: Content) -> AttentionOptions:
    kinds = content.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == 1 for kind in kinds)):
        raise CheckpointError(
            f"config.json: attn_type_list={quoted(kinds)} has layers of another kind than 1, softmax attention, which weft runs"
        )
    return AttentionOptions(qk_norm=True, norm_all_heads=True)


def experts(content: Content) -> ExpertOptions:
    return replace(local_experts(content), scoring="sigmoid", router_bias=True)


MINIMAX_M2 = Family(
    name="MiniMax-M2",
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    attention=attention,
    experts=experts,
    reads=("num_local_experts", "num_experts_per_tok", "partial_rotary_factor", "rotary_dim", "attn_type_list"),
    # Keys of the code that came with the checkpoint: transformers has what these values say.
    supported={
        "scoring_func": ("sigmoid", None),
        "use_routing_bias": (True, None),
        "use_qk_norm": (True, None),
        "qk_norm_type": ("per_layer", None),
        "shared_intermediate_size": (0, None),
    },
    without_effect=("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),  # transformers has no MTP head
    weights=WeightNames(mlp="block_sparse_moe", projections=("w1", "w3", "w2"), router_bias="e_score_correction_bias"),
    # config.json of MiniMaxAI/MiniMax-M2 to M2.5
    published=table(SHAPE, {"minimax-m2": (3072, 1536, 62, 48)}, vocab_size=200064, rotary_dim=64),
)

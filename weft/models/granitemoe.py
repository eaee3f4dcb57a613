"""Granite with experts: the tables of its family."""

from __future__ import annotations

from weft.models.family import Content, ExpertOptions, Family, StackedExperts, WeightNames, experts_of
from weft.models.granite import GRANITE


def experts(content: Content) -> ExpertOptions:
    total, chosen = experts_of(content, "num_local_experts")
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=content["intermediate_size"],
    )


GRANITEMOE = Family(
    name="GraniteMoe",
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    attention=GRANITE.attention,
    block=GRANITE.block,
    experts=experts,
    reads=(*GRANITE.reads, "num_local_experts", "num_experts_per_tok"),
    weights=WeightNames(
        mlp="block_sparse_moe",
        router="router.layer",
        stacked=StackedExperts(gate_up="input_linear.weight", down="output_linear.weight"),
    ),
    published={
        # config.json of ibm-granite/granite-3.1-3b-a800m-instruct.
        "granite-3.1-3b-a800m": {
            "model_type": "granitemoe",
            "vocab_size": 49155,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "rope_theta": 1e7,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 6.0,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
        },
    },
)

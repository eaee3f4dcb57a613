"""Mixtral: the tables of its family."""

from __future__ import annotations

from weft.models.family import Content, ExpertOptions, Family, WeightNames, experts_of
from weft.models.mistral import MISTRAL

# hidden, intermediate of an expert, layers, heads, vocabulary, positions: config.json of mistralai/Mixtral-*-v0.1.
SIZES = {
    "mixtral-8x7b": (4096, 14336, 32, 32, 32000, 32768),
    "mixtral-8x22b": (6144, 16384, 56, 48, 32768, 65536),
}


def experts(content: Content) -> ExpertOptions:
    total, chosen = experts_of(content, "num_local_experts")
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=content["intermediate_size"],
    )


MIXTRAL = Family(
    name="Mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    attention=MISTRAL.attention,
    experts=experts,
    reads=(*MISTRAL.reads, "num_local_experts", "num_experts_per_tok"),
    weights=WeightNames(mlp="block_sparse_moe", projections=("w1", "w3", "w2")),
    published={
        name: {
            "model_type": "mixtral",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": positions,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
        for name, (hidden_size, intermediate_size, layers, heads, vocab_size, positions) in SIZES.items()
    },
)

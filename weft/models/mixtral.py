"""Mixtral: the tables of its family."""

from __future__ import annotations

from weft.models.family import SHAPE, Family, WeightNames, local_experts, table
from weft.models.mistral import MISTRAL

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
    experts=local_experts,
    reads=(*MISTRAL.reads, "num_local_experts", "num_experts_per_tok"),
    weights=WeightNames(mlp="block_sparse_moe", projections=("w1", "w3", "w2")),
    # config.json of mistralai/Mixtral-*-v0.1; intermediate_size is an expert's.
    published=table(
        f"{SHAPE} vocab_size max_position_embeddings",
        {"mixtral-8x7b": (4096, 14336, 32, 32, 32000, 32768), "mixtral-8x22b": (6144, 16384, 56, 48, 32768, 65536)},
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
)

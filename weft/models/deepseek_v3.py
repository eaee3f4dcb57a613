"""DeepSeek-V3 and R1: the tables of their family."""

from __future__ import annotations

from weft.models import routed_experts
from weft.models.deepseek_v2 import LATENT_DEFAULTS, LATENT_KEYS, TRAINING_KEYS, latent_attention, yarn
from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Content, Family, WeightNames, flag, table
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, sigmoid_experts


def attention(content: Content) -> AttentionOptions:
    return latent_attention(content, flag(content, "rope_interleave"))


DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEFAULTS,
        **LATENT_DEFAULTS,
        **routed_experts.DEFAULTS,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    attention=attention,
    experts=sigmoid_experts,
    reads=(*LATENT_KEYS, *READS, *TRAINING_KEYS, "rope_interleave"),
    supported=SIGMOID_SUPPORTED,
    weights=WeightNames(shared_expert="shared_experts"),
    published=table(
        f"{SHAPE} num_key_value_heads moe_intermediate_size",
        {"deepseek-v3": (7168, 18432, 61, 128, 128, 2048)},
        vocab_size=129280,
        max_position_embeddings=163840,
        rope_theta=10000.0,
        rope_scaling=yarn(1.0),
    ),
)

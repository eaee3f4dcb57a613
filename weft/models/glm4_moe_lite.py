"""GLM-4.7-Flash, with DeepSeek-V3's attention and GLM-4.5's experts: the tables of its family."""

from __future__ import annotations

from weft.models import deepseek_v3, routed_experts
from weft.models.deepseek_v2 import LATENT_DEFAULTS, LATENT_KEYS
from weft.models.family import DEFAULTS, SHAPE, Content, ExpertOptions, Family, WeightNames, table
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, by_layer_types, sigmoid_experts


def experts(content: Content) -> ExpertOptions:
    """Experts in the layers that mlp_layer_types calls sparse; without it in all but the first."""
    return by_layer_types(sigmoid_experts(content), content)


GLM4_MOE_LITE = Family(
    name="GLM-4.7-Flash",
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **DEFAULTS,
        **LATENT_DEFAULTS,
        **routed_experts.DEFAULTS,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
    },
    attention=deepseek_v3.attention,
    experts=experts,
    reads=(*LATENT_KEYS, *{*READS} - {"first_k_dense_replace"}, "rope_interleave", "mlp_layer_types"),
    # transformers reads mlp_layer_types in its place.
    supported={**SIGMOID_SUPPORTED, "first_k_dense_replace": (1, None)},
    weights=WeightNames(shared_expert="shared_experts"),
    # config.json of zai-org/GLM-4.7-Flash
    published=table(SHAPE, {"glm-4.7-flash": (2048, 10240, 47, 20)}, vocab_size=154880, rope_theta=1e6),
)

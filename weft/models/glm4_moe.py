"""GLM-4.5 and 4.6: the tables of their family."""

from __future__ import annotations

from weft.models import routed_experts
from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Content, Family, WeightNames, flag, table
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, sigmoid_experts


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=flag(content, "use_qk_norm"), bias=flag(content, "attention_bias"))


GLM4_MOE = Family(
    name="GLM-4.5",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        **DEFAULTS,
        **routed_experts.DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
    },
    attention=attention,
    experts=sigmoid_experts,
    reads=(*READS, "use_qk_norm", "attention_bias", "partial_rotary_factor"),
    supported=SIGMOID_SUPPORTED,
    weights=WeightNames(shared_expert="shared_experts"),
    # config.json of zai-org/GLM-4.5 and GLM-4.5-Air; intermediate_size is that of dense layers.
    published=table(
        f"{SHAPE} first_k_dense_replace n_routed_experts moe_intermediate_size routed_scaling_factor use_qk_norm",
        {
            "glm-4.5": (5120, 12288, 92, 96, 3, 160, 1536, 2.5, True),
            "glm-4.5-air": (4096, 10944, 46, 96, 1, 128, 1408, 1.0, False),
        },
        vocab_size=151552,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e6,
        partial_rotary_factor=0.5,
        max_position_embeddings=131072,
        attention_bias=True,
        num_experts_per_tok=8,
        n_shared_experts=1,
        norm_topk_prob=True,
    ),
)

"""GLM-4.5 and 4.6: the tables of their family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, Content, Family, WeightNames, flag
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, sigmoid_experts

# hidden, intermediate of dense layers, layers, dense layers, experts, intermediate of an expert, factor of weights, norms of
# q and k: config.json of zai-org/GLM-4.5 and GLM-4.5-Air.
SIZES = {
    "glm-4.5": (5120, 12288, 92, 3, 160, 1536, 2.5, True),
    "glm-4.5-air": (4096, 10944, 46, 1, 128, 1408, 1.0, False),
}


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=flag(content, "use_qk_norm"), bias=flag(content, "attention_bias"))


GLM4_MOE = Family(
    name="GLM-4.5",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    attention=attention,
    experts=sigmoid_experts,
    reads=(*READS, "use_qk_norm", "attention_bias", "partial_rotary_factor"),
    supported=SIGMOID_SUPPORTED,
    weights=WeightNames(shared_expert="shared_experts"),
    published={
        name: {
            "model_type": "glm4_moe",
            "vocab_size": 151552,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "use_qk_norm": normed,
            "n_routed_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": of_expert,
            "n_shared_experts": 1,
            "first_k_dense_replace": dense,
            "routed_scaling_factor": factor,
            "norm_topk_prob": True,
        }
        for name, (
            hidden_size,
            intermediate_size,
            layers,
            dense,
            experts,
            of_expert,
            factor,
            normed,
        ) in SIZES.items()
    },
)

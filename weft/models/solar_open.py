"""Solar Open: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, AttentionOptions, Content, ExpertOptions, Family, WeightNames, flag, table
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, sigmoid_experts


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(bias=flag(content, "attention_bias"))


def experts(content: Content) -> ExpertOptions:
    """Experts in all layers."""
    return sigmoid_experts({**content, "first_k_dense_replace": 0})


SOLAR_OPEN = Family(
    name="Solar Open",
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10240,  # of no layer
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    attention=attention,
    experts=experts,
    reads=(*(name for name in READS if name != "first_k_dense_replace"), "attention_bias"),
    supported={**SIGMOID_SUPPORTED, "first_k_dense_replace": (0, None), "use_qk_norm": (False, None)},
    weights=WeightNames(shared_expert="shared_experts"),
    # config.json of upstage/Solar-Open-100B
    published=table(
        "hidden_size num_hidden_layers num_attention_heads",
        {"solar-open-100b": (4096, 48, 64)},
        vocab_size=196608,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    ),
)

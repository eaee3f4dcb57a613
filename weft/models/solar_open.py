"""Solar Open: the tables of its family."""

from __future__ import annotations

from weft.models import routed_experts
from weft.models.family import DEFAULTS, Content, ExpertOptions, Family, WeightNames, table
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, sigmoid_experts
from weft.models.seed_oss import SEED_OSS


def experts(content: Content) -> ExpertOptions:
    """Experts in all layers."""
    return sigmoid_experts({**content, "first_k_dense_replace": 0})


SOLAR_OPEN = Family(
    name="Solar Open",
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    defaults={
        **DEFAULTS,
        **routed_experts.DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10240,  # of no layer
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1280,
    },
    attention=SEED_OSS.attention,
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

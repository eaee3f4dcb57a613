"""OLMoE: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, Content, ExpertOptions, Family, experts_of, flag, table
from weft.models.olmo2 import OLMO2


def experts(content: Content) -> ExpertOptions:
    total, chosen = experts_of(content, "num_experts")
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=content["intermediate_size"],
        norm_topk_prob=flag(content, "norm_topk_prob"),
    )


OLMOE = Family(
    name="OLMoE",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    attention=OLMO2.attention,
    experts=experts,
    reads=("num_experts", "num_experts_per_tok", "norm_topk_prob"),
    supported={"clip_qkv": (None,)},
    # config.json of allenai/OLMoE-1B-7B-0924.
    published=table(
        f"{SHAPE} num_key_value_heads",
        {"olmoe-1b-7b": (2048, 1024, 16, 16, 16)},
        vocab_size=50304,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
)

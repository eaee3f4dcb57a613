"""DeepSeek-V2 and V2-Lite: the tables of their family, and what V3 shares with it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    Content,
    Family,
    WeightNames,
    count_of,
    table,
)
from weft.models.routed_experts import READS, SOFTMAX_SUPPORTED, softmax_experts
from weft.parallel.latent_sizes import LatentSizes

LATENT_KEYS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim",
)  # fmt: skip
# Of losses in training.
TRAINING_KEYS = ("aux_loss_alpha", "seq_aux")


def attention(content: Content) -> AttentionOptions:
    return latent_attention(content, True)


def latent_attention(content: Content, rope_interleave: bool) -> AttentionOptions:
    """Latent attention in a config.json."""
    heads, kv_heads = content["num_attention_heads"], content["num_key_value_heads"]
    if kv_heads not in (None, heads):
        raise CheckpointError(
            f"config.json: num_key_value_heads={quoted(kv_heads)} is not supported; weft runs latent attention with "
            f"num_attention_heads={heads}"
        )
    nope, rope = count_of(content, "qk_nope_head_dim"), count_of(content, "qk_rope_head_dim", 1 << 16)
    if rope % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim={rope} is odd; rotary embedding takes halves of a head")
    latent = LatentSizes(
        kv_lora_rank=count_of(content, "kv_lora_rank"),
        q_lora_rank=None if content["q_lora_rank"] is None else count_of(content, "q_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=count_of(content, "v_head_dim"),
        scale=(nope + rope) ** -0.5 * scale_of_yarn(content.get("rope_scaling") or content.get("rope_parameters")),
        rope_interleave=rope_interleave,
    )
    return AttentionOptions(latent=latent)


def yarn(mscale: float) -> dict[str, str | float]:
    """rope_scaling of a published file."""
    return {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def scale_of_yarn(parameters: object) -> float:
    """Factor of the softmax's scale, by mscale_all_dim of YaRN's parameters, which are checked elsewhere."""
    given = parameters if isinstance(parameters, Mapping) else {}
    mscale, factor = given.get("mscale_all_dim") or 0.0, given.get("factor") or 1.0
    numbers = all(type(value) in (int, float) for value in (mscale, factor))
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if numbers and factor > 1 else 1.0


LATENT_DEFAULTS = {
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        **DEFAULTS,
        **LATENT_DEFAULTS,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    attention=attention,
    experts=softmax_experts,
    reads=(*LATENT_KEYS, *{*READS} - {*SOFTMAX_SUPPORTED}, *TRAINING_KEYS, "topk_method"),
    supported=SOFTMAX_SUPPORTED,
    weights=WeightNames(shared_expert="shared_experts"),
    # config.json of deepseek-ai/DeepSeek-V2-Lite and deepseek-ai/DeepSeek-V2; intermediate_size is that of dense layers.
    published=table(
        f"{SHAPE} num_key_value_heads q_lora_rank n_routed_experts moe_intermediate_size topk_method n_group topk_group "
        "routed_scaling_factor",
        {
            "deepseek-v2-lite": (2048, 10944, 27, 16, 16, None, 64, 1408, "greedy", 1, 1, 1.0),
            "deepseek-v2": (5120, 12288, 60, 128, 128, 1536, 160, 1536, "group_limited_greedy", 8, 3, 16.0),
        },
        vocab_size=102400,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        max_position_embeddings=163840,
        rope_theta=10000.0,
        rope_scaling=yarn(0.707),
    ),
)

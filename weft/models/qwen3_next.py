"""Qwen3-Next: the tables of its family, whose layers are mostly gated delta nets."""

from __future__ import annotations

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models import qwen3_moe
from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    BlockOptions,
    Content,
    Family,
    LinearAttentionOptions,
    always,
    count_of,
    table,
)
from weft.models.qwen2_moe import QWEN2_MOE

LINEAR_KEYS = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "layer_types", "full_attention_interval",
)  # fmt: skip
LINEAR_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
}
KINDS = ("full_attention", "linear_attention")


def linear_attention(content: Content) -> LinearAttentionOptions:
    key_heads, value_heads = (count_of(content, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}"
        )
    return LinearAttentionOptions(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=count_of(content, "linear_key_head_dim"),
        value_dim=count_of(content, "linear_value_head_dim"),
        taps=count_of(content, "linear_conv_kernel_dim"),
        layers=linear_layers(content),
    )


def linear_layers(content: Content) -> tuple[bool, ...]:
    """By layer: True for a gated delta net.

    Without layer_types every full_attention_interval-th layer has attention.
    """
    layers, types = content["num_hidden_layers"], content.get("layer_types")
    if types is None:
        interval = count_of(content, "full_attention_interval")
        types = [KINDS[(layer + 1) % interval != 0] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in KINDS for kind in types):
        raise CheckpointError(
            f"config.json: layer_types={quoted(types)} is not a list of num_hidden_layers={layers}, each "
            f"{' or '.join(map(repr, KINDS))}"
        )
    if KINDS[0] not in types:
        raise CheckpointError(
            "config.json: layer_types has no 'full_attention'; weft runs models with attention in a layer"
        )
    return tuple(kind == KINDS[1] for kind in types)


QWEN3_NEXT = Family(
    name="Qwen3-Next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={
        **DEFAULTS,
        **LINEAR_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        **qwen3_moe.SPARSE,
        "norm_topk_prob": True,
    },
    attention=always(AttentionOptions(qk_norm=True, gated=True)),
    block=always(BlockOptions(one_plus_norms=True)),
    experts=QWEN2_MOE.experts,
    linear_attention=linear_attention,
    reads=(
        *qwen3_moe.READS,
        *LINEAR_KEYS,
        *("num_local_experts", "shared_expert_intermediate_size", "partial_rotary_factor"),
    ),
    published=table(
        f"{SHAPE} num_key_value_heads",
        {"qwen3-next-80b-a3b": (2048, 5120, 48, 16, 2)},
        vocab_size=151936,
        rope_theta=1e7,
        max_position_embeddings=262144,
    ),
)

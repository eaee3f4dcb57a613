"""Hunyuan of 0.5B to 7B, and Hunyuan-A13B with experts: the tables of both families."""

from __future__ import annotations

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    WeightNames,
    experts_of,
    flag,
    table,
)

HEAD_NORMS = ("query_layernorm", "key_layernorm")
# Of the code that came with the checkpoints: transformers has what these values say.
SUPPORTED = {
    "add_classification_head": (False, None),
    "norm_type": ("rms", None),
    "position_embedding_xdrope": (False, None),
    "use_cla": (False, None),
    "use_qk_norm": (True, None),
    "use_rotary_pos_emb": (True, None),
}
WITHOUT_EFFECT = (
    *("class_num", "dense_list", "mask_init_id", "pool_type"),
    *("im_end_id", "im_newline_id", "im_start_id", "text_end_id", "text_start_id", "pad_id", "org_vocab_size"),
    "cla_share_factor",  # use_cla counts
)
READS = ("attention_bias", "attention_head_dim")


def attention(content: Content) -> AttentionOptions:
    bias = flag(content, "attention_bias")
    # Of the code that came with the checkpoints; transformers reads head_dim.
    head_dim = content["head_dim"] or content["hidden_size"] // content["num_attention_heads"]
    if (named := content.get("attention_head_dim")) not in (None, head_dim):
        raise CheckpointError(
            f"config.json: attention_head_dim={quoted(named)} does not agree with heads of {head_dim}, which weft reads"
        )
    return AttentionOptions(qk_norm=True, norm_after_rotary=True, bias=bias, output_bias=bias)


def experts(content: Content) -> ExpertOptions:
    """Experts in every layer, all of intermediate_size, beside a shared one of the same size."""
    # Lists have a value for each layer.
    same = {"num_experts": content["num_experts"], "moe_topk": _of_all_layers(content, "moe_topk")}
    total, chosen = experts_of(same, "num_experts", "moe_topk")
    size = content["intermediate_size"]
    for key, only in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if (named := _of_all_layers(content, key)) not in (None, only):
            raise CheckpointError(
                f"config.json: {key}={quoted(named)} is not supported; weft runs Hunyuan-MoE with {only} in all layers"
            )
    return ExpertOptions(
        num_experts=total, num_experts_per_tok=chosen, intermediate_size=size, shared_intermediate_size=size
    )


def _of_all_layers(content: Content, name: str) -> object:
    """Value under `name`, or the one that a list has for all layers."""
    if not isinstance(value := content.get(name), list):
        return value
    layers = content["num_hidden_layers"]
    if len(value) < layers or value[:layers] != value[:1] * layers:
        raise CheckpointError(
            f"config.json: {name}={quoted(value)} is not one value for each of num_hidden_layers={layers}, the same for all"
        )
    return value[0]


DEFAULTS_OF_BOTH = {**DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False}
PUBLISHED = {
    "vocab_size": 128167,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    "tie_word_embeddings": True,
}
HUNYUAN_V1_DENSE = Family(
    name="Hunyuan",
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    defaults=DEFAULTS_OF_BOTH,
    attention=attention,
    ntk_alpha=True,
    reads=READS,
    supported=SUPPORTED,
    without_effect=WITHOUT_EFFECT,
    weights=WeightNames(head_norms=HEAD_NORMS),
    # config.json of tencent/Hunyuan-7B-Instruct
    published=table(SHAPE, {"hunyuan-7b": (4096, 14336, 32, 32)}, **PUBLISHED),
)
HUNYUAN_V1_MOE = Family(
    name="Hunyuan-MoE",
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    defaults={**DEFAULTS_OF_BOTH, "num_experts": 1, "moe_topk": 1},
    attention=attention,
    ntk_alpha=True,
    experts=experts,
    reads=(*READS, "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"),
    # transformers always divides by the sum of the chosen scores.
    supported={
        **SUPPORTED,
        "use_mixed_mlp_moe": (True, None),
        "norm_topk_prob": (True, None),
        "routed_scaling_factor": (1.0, False, None),
    },
    without_effect=WITHOUT_EFFECT,
    weights=WeightNames(head_norms=HEAD_NORMS, router="gate.wg", shared_expert="shared_mlp"),
    # config.json of tencent/Hunyuan-A13B-Instruct
    published=table(SHAPE, {"hunyuan-a13b": (4096, 3072, 32, 32)}, num_experts=64, moe_topk=8, **PUBLISHED),
)

"""ERNIE 4.5 with experts: the tables of its family."""

from __future__ import annotations

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.ernie4_5 import ERNIE4_5
from weft.models.family import SHAPE, Content, ExpertOptions, Family, WeightNames, count_of, experts_of, table

READS = (
    "moe_num_experts",
    "moe_k",
    "moe_intermediate_size",
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
)


def experts(content: Content) -> ExpertOptions:
    total, chosen = experts_of(content, "moe_num_experts", "moe_k")
    intermediate_size, shared = count_of(content, "moe_intermediate_size"), content["moe_num_shared_experts"]
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=intermediate_size,
        router_bias=True,
        shared_intermediate_size=intermediate_size * count_of(content, "moe_num_shared_experts") if shared else None,
        layers=layers_with_experts(content),
    )


def layers_with_experts(content: Content) -> tuple[bool, ...]:
    """By layer: every moe_layer_interval-th one from moe_layer_start_index to moe_layer_end_index.

    The latter absent or -1: to the last.
    """
    layers, period = content["num_hidden_layers"], count_of(content, "moe_layer_interval")
    first, last = content["moe_layer_start_index"], content.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else last
    for name, index in (("moe_layer_start_index", first), ("moe_layer_end_index", last)):
        if type(index) is not int or index < 0:
            raise CheckpointError(f"config.json: {name}={quoted(index)} is not the index of a layer")
    return tuple(first <= layer <= last and (layer + 1) % period == 0 for layer in range(layers))


ERNIE4_5_MOE = Family(
    name="ERNIE 4.5 MoE",
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        **ERNIE4_5.defaults,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    attention=ERNIE4_5.attention,
    experts=experts,
    reads=READS,
    # The least sum by which weights are divided. weft adds 1e-20: with trained biases no sum is as small as 1e-12.
    supported={**ERNIE4_5.supported, "moe_norm_min": (1e-12,)},
    without_effect=("moe_capacity", "moe_gate", "moe_use_aux_free"),
    weights=WeightNames(router_bias="moe_statics.e_score_correction_bias", shared_expert="shared_experts"),
    # config.json of baidu/ERNIE-4.5-21B-A3B-PT and ERNIE-4.5-300B-A47B-PT; intermediate_size is that of dense layers.
    published=table(
        f"{SHAPE} num_key_value_heads moe_intermediate_size moe_k moe_num_shared_experts moe_layer_start_index "
        "tie_word_embeddings",
        {
            "ernie-4.5-21b-a3b": (2560, 12288, 28, 20, 4, 1536, 6, 2, 1, True),
            "ernie-4.5-300b-a47b": (8192, 28672, 54, 64, 8, 3584, 8, 0, 3, False),
        },
        vocab_size=103424,
        moe_num_experts=64,
    ),
)

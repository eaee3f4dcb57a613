"""K-EXAONE, with EXAONE 4's attention and DeepSeek-V3's experts: the tables of its family."""

from __future__ import annotations

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models import routed_experts
from weft.models.exaone4 import EXAONE4
from weft.models.family import SHAPE, Content, ExpertOptions, Family, WeightNames, table
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, by_layer_types, sigmoid_experts

NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def experts(content: Content) -> ExpertOptions:
    options = by_layer_types(sigmoid_experts(content, *NAMES.values()), content)
    # Of the code that came with the checkpoint; transformers has the layers of the other keys.
    dense = options.layers.index(True) if True in options.layers else len(options.layers)
    for key, same in (("is_moe_layer", [*options.layers]), ("first_last_k_dense_replace", dense)):
        if (named := content.get(key)) is not None and named != same:
            raise CheckpointError(
                f"config.json: {key}={quoted(named)} does not agree with mlp_layer_types or first_k_dense_replace, which "
                f"weft reads (without both, 1 layer is dense): by them it would be {quoted(same)}"
            )
    return options


EXAONE_MOE = Family(
    name="K-EXAONE",
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    other_architecture="ExaoneMoEForCausalLM",
    defaults={
        **EXAONE4.defaults,
        **routed_experts.DEFAULTS,
        "num_experts": 64,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
    attention=EXAONE4.attention,
    experts=experts,
    reads=(
        *EXAONE4.reads,
        *(NAMES.get(name, name) for name in READS),
        *("mlp_layer_types", "is_moe_layer", "first_last_k_dense_replace"),
    ),
    supported=SIGMOID_SUPPORTED,
    weights=WeightNames(router_bias="e_score_correction_bias", shared_expert="shared_experts"),
    # config.json of LGAI-EXAONE/K-EXAONE-236B-A23B; intermediate_size is that of the first layer.
    published=table(
        SHAPE,
        {"k-exaone-236b-a23b": (6144, 18432, 48, 64)},
        vocab_size=153600,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e6,
        max_position_embeddings=262144,
        sliding_window=128,
        num_experts=128,
        moe_intermediate_size=2048,
    ),
)

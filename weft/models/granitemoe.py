"""Granite with experts: the tables of its family."""

from __future__ import annotations

from weft.models.family import SHAPE, Family, StackedExperts, WeightNames, local_experts, table
from weft.models.granite import COMMON, GRANITE

GRANITEMOE = Family(
    name="GraniteMoe",
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    attention=GRANITE.attention,
    block=GRANITE.block,
    experts=local_experts,
    reads=(*GRANITE.reads, "num_local_experts", "num_experts_per_tok"),
    weights=WeightNames(
        mlp="block_sparse_moe",
        router="router.layer",
        stacked=StackedExperts(gate_up="input_linear.weight", down="output_linear.weight"),
    ),
    # config.json of ibm-granite/granite-3.1-3b-a800m-instruct.
    published=table(
        f"{SHAPE} attention_multiplier logits_scaling num_local_experts num_experts_per_tok",
        {"granite-3.1-3b-a800m": (1536, 512, 32, 24, 0.015625, 6.0, 40, 8)},
        vocab_size=49155,
        **COMMON,
    ),
)

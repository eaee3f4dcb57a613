"""FlexOlmo, OLMo 2 with OLMoE's experts: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, Family, table
from weft.models.olmo2 import OLMO2
from weft.models.olmoe import OLMOE

FLEX_OLMO = Family(
    name="FlexOlmo",
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    defaults={
        **DEFAULTS,
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
    },
    attention=OLMO2.attention,
    block=OLMO2.block,
    experts=OLMOE.experts,
    reads=OLMOE.reads,
    # config.json of allenai/FlexOlmo-7x7B-1T
    published=table(SHAPE, {"flexolmo-7x7b": (4096, 11008, 32, 32)}, vocab_size=100352),
)

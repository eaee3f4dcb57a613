"""GLM-4 of 2024: the tables of its family."""

from __future__ import annotations

from weft.models.family import SHAPE, Family, WeightNames, table
from weft.models.glm4 import GLM4
from weft.models.joined import GATE_UP

GLM = Family(
    name="GLM",
    model_type="glm",
    architecture="GlmForCausalLM",
    defaults=GLM4.defaults,
    attention=GLM4.attention,
    reads=GLM4.reads,
    weights=WeightNames(joined=(GATE_UP,)),
    # config.json of zai-org/glm-4-9b-chat-hf
    published=table(SHAPE, {"glm-4-9b-chat": (4096, 13696, 40, 32)}, vocab_size=151552),
)

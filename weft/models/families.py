"""Families of models, and models whose sizes are known by name.

Without torch: the command line checks names before it loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.arguments import did_you_mean, listed, quoted
from weft.models.apertus import APERTUS
from weft.models.arcee import ARCEE
from weft.models.cwm import CWM
from weft.models.deepseek_v2 import DEEPSEEK_V2
from weft.models.deepseek_v3 import DEEPSEEK_V3
from weft.models.dots1 import DOTS1
from weft.models.ernie4_5 import ERNIE4_5
from weft.models.ernie4_5_moe import ERNIE4_5_MOE
from weft.models.exaone4 import EXAONE4
from weft.models.exaone_moe import EXAONE_MOE
from weft.models.family import Family
from weft.models.flex_olmo import FLEX_OLMO
from weft.models.gemma import GEMMA
from weft.models.gemma2 import GEMMA2
from weft.models.gemma3 import GEMMA3_TEXT
from weft.models.glm import GLM
from weft.models.glm4 import GLM4
from weft.models.glm4_moe import GLM4_MOE
from weft.models.glm4_moe_lite import GLM4_MOE_LITE
from weft.models.gpt_oss import GPT_OSS
from weft.models.granite import GRANITE
from weft.models.granitemoe import GRANITEMOE
from weft.models.helium import HELIUM
from weft.models.hunyuan_v1 import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE
from weft.models.hyperclovax import HYPERCLOVAX
from weft.models.llama import LLAMA
from weft.models.minimax_m2 import MINIMAX_M2
from weft.models.ministral import MINISTRAL
from weft.models.ministral3 import MINISTRAL3
from weft.models.mistral import MISTRAL
from weft.models.mixtral import MIXTRAL
from weft.models.olmo2 import OLMO2
from weft.models.olmo3 import OLMO3
from weft.models.olmoe import OLMOE
from weft.models.phi3 import PHI3
from weft.models.qwen2 import QWEN2
from weft.models.qwen2_moe import QWEN2_MOE
from weft.models.qwen3 import QWEN3
from weft.models.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from weft.models.qwen3_moe import QWEN3_MOE
from weft.models.qwen3_next import QWEN3_NEXT
from weft.models.qwen3_vl import QWEN3_VL_MOE_TEXT, QWEN3_VL_TEXT
from weft.models.seed_oss import SEED_OSS
from weft.models.smollm3 import SMOLLM3
from weft.models.solar_open import SOLAR_OPEN
from weft.models.vaultgemma import VAULTGEMMA
from weft.models.youtu import YOUTU

FAMILIES = {
    family.model_type: family
    for family in (
        *(QWEN3, QWEN3_MOE, QWEN2, QWEN2_MOE, LLAMA, MISTRAL, MINISTRAL3, MIXTRAL, SEED_OSS),
        *(OLMO2, OLMO3, EXAONE4, GEMMA2, GEMMA3_TEXT, GRANITE),
        *(SMOLLM3, PHI3, GLM4, ERNIE4_5, QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, QWEN3_VL_TEXT),
        *(OLMOE, GRANITEMOE, GLM4_MOE, DOTS1, EXAONE_MOE, ERNIE4_5_MOE, MINIMAX_M2, GPT_OSS, QWEN3_VL_MOE_TEXT),
        *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE),
        *(HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE, ARCEE, APERTUS),
        *(GEMMA, GLM, HELIUM, CWM, MINISTRAL, HYPERCLOVAX, FLEX_OLMO, SOLAR_OPEN, YOUTU, VAULTGEMMA),
    )
}
"""model_type -> the tables of its family."""
ALIASES = {"kimi_k2": "deepseek_v3"}
"""model_type of files whose authors' code is that of another family -> that family's."""
PUBLISHED = {
    name: {"model_type": family.model_type, **content}
    for family in FAMILIES.values()
    for name, content in family.published.items()
}
"""Name of a published model -> its config.json, as far as it counts."""


def family_of(model_type: object) -> Family | None:
    """Family of a model_type; None where weft has none."""
    return FAMILIES.get(ALIASES.get(model_type, model_type)) if isinstance(model_type, str) else None


def published(name: object) -> Mapping[str, Any]:
    """config.json of a published model by its name. ValueError for another name."""
    content = PUBLISHED.get(name.lower()) if isinstance(name, str) else None
    if content is None:
        raise ValueError(
            f"model {quoted(name)} is not one whose sizes are known; choose one of "
            f"{listed(PUBLISHED)}{did_you_mean(name, PUBLISHED)}"
        )
    return content

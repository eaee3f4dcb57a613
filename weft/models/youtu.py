"""Youtu-LLM, with DeepSeek-V3's attention and an MLP in every layer: the tables of its family."""

from __future__ import annotations

from weft.models.deepseek_v2 import LATENT_DEFAULTS, LATENT_KEYS
from weft.models.deepseek_v3 import DEEPSEEK_V3
from weft.models.family import DEFAULTS, SHAPE, Family, table

YOUTU = Family(
    name="Youtu-LLM",
    model_type="youtu",
    architecture="YoutuForCausalLM",
    defaults={
        **DEFAULTS,
        **LATENT_DEFAULTS,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_interleave": True,
    },
    attention=DEEPSEEK_V3.attention,
    reads=(*LATENT_KEYS, "rope_interleave"),
    # Sizes of tencent/Youtu-LLM-2B, which transformers' class assumes.
    published=table(SHAPE, {"youtu-llm-2b": (2048, 6144, 32, 16)}, vocab_size=128256),
)

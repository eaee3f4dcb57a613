"""OLMo 2: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, BlockOptions, Family, always, table

OLMO2 = Family(
    name="OLMo 2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
    attention=always(AttentionOptions(qk_norm=True, norm_all_heads=True)),
    block=always(BlockOptions(norms_before=False, norms_after=True)),
    # config.json of allenai/OLMo-2-1124-7B, OLMo-2-1124-13B, OLMo-2-0325-32B.
    published=table(
        f"{SHAPE} num_key_value_heads",
        {
            "olmo-2-7b": (4096, 11008, 32, 32, 32),
            "olmo-2-13b": (5120, 13824, 40, 40, 40),
            "olmo-2-32b": (5120, 27648, 64, 40, 8),
        },
        vocab_size=100352,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        max_position_embeddings=4096,
    ),
)

"""Arcee's AFM, whose MLP has no gate: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, BlockOptions, Family, always, table

ARCEE = Family(
    name="Arcee",
    model_type="arcee",
    architecture="ArceeForCausalLM",
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    block=always(BlockOptions(activation="relu2", gated=False)),
    supported={"hidden_act": ("relu2",), "activation": (None,)},
    # config.json of arcee-ai/AFM-4.5B
    published=table(
        SHAPE,
        {"afm-4.5b": (2560, 18432, 36, 20)},
        vocab_size=128003,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=65536,
        rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
    ),
)

"""Apertus, whose MLP has no gate and an activation with trained numbers: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, BlockOptions, Family, WeightNames, always, table
from weft.models.llama import rope

APERTUS = Family(
    name="Apertus",
    model_type="apertus",
    architecture="ApertusForCausalLM",
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
        "rope_parameters": {**rope(8.0), "rope_theta": 12e6},
        "max_position_embeddings": 65536,
    },
    attention=always(AttentionOptions(qk_norm=True)),
    block=always(BlockOptions(activation="xielu", gated=False)),
    # post_norm and qk_norm of the code that came with the checkpoints: transformers has what these values say.
    supported={"hidden_act": ("xielu",), "activation": (None,), "post_norm": (False, None), "qk_norm": (True, None)},
    weights=WeightNames(input_norm="attention_layernorm", post_norm="feedforward_layernorm"),
    # config.json of swiss-ai/Apertus-*-2509
    published=table(
        SHAPE,
        {"apertus-8b": (4096, 21504, 32, 32), "apertus-70b": (8192, 43008, 80, 64)},
        vocab_size=131072,
        num_key_value_heads=8,
        rope_scaling=rope(8.0),
    ),
)

"""Mistral 7B and models of its architecture: the tables of their family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, AttentionOptions, Content, Family, table, window_of


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(windows=(window_of(content),))


MISTRAL = Family(
    name="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    attention=attention,
    reads=("sliding_window",),
    # config.json of mistralai/Mistral-7B-v0.1 and of -v0.3, which has no window.
    published=table(
        "vocab_size rope_theta sliding_window",
        {"mistral-7b": (32000, 10000.0, 4096), "mistral-7b-v0.3": (32768, 1e6, None)},
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
    ),
)

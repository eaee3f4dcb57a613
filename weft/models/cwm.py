"""Code World Model: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Content, Family, table, window_of, windows_of_types


def attention(content: Content) -> AttentionOptions:
    """Windows in all layers but every fourth from the first on, unless layer_types says which."""
    if content.get("layer_types") is None:
        types = ["full_attention", *["sliding_attention"] * 3]
        layers = range(content["num_hidden_layers"])
        content = {**content, "layer_types": [types[layer % 4] for layer in layers]}
    return AttentionOptions(windows=windows_of_types(content, window_of(content)))


CWM = Family(
    name="CWM",
    model_type="cwm",
    architecture="CwmForCausalLM",
    null_head_dim=True,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
    },
    attention=attention,
    reads=("sliding_window", "layer_types"),
    # config.json of facebook/cwm
    published=table(SHAPE, {"cwm-32b": (6144, 21504, 64, 48)}, vocab_size=128256),
)

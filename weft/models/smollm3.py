"""SmolLM3: the tables of its family."""

from __future__ import annotations

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    Content,
    Family,
    count_of,
    flag,
    table,
    window_of,
    windows_of_types,
)


def rotated(content: Content) -> tuple[bool, ...]:
    """True for layers with rotary embedding.

    no_rope_layers has a 1 for them; without it every no_rope_layer_interval-th layer has none.
    """
    layers, given = content["num_hidden_layers"], content.get("no_rope_layers")
    if given is None:
        period = count_of(content, "no_rope_layer_interval")
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) < layers or not all(value in (0, 1) for value in given):
        raise CheckpointError(
            f"config.json: no_rope_layers={quoted(given)} is not a list of 0 and 1 for num_hidden_layers={layers}"
        )
    return tuple(bool(value) for value in given[:layers])


def attention(content: Content) -> AttentionOptions:
    bias, turned = flag(content, "attention_bias"), rotated(content)
    window = window_of(content) if flag(content, "use_sliding_window") else None
    if content.get("layer_types") is None:
        windows = tuple(None if is_turned else window for is_turned in turned)
    else:
        windows = windows_of_types(content, window)
    return AttentionOptions(bias=bias, output_bias=bias, windows=windows, rotated=turned)


SMOLLM3 = Family(
    name="SmolLM3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "attention_bias": False,
    },
    attention=attention,
    reads=(
        *("use_sliding_window", "sliding_window", "layer_types"),
        *("no_rope_layers", "no_rope_layer_interval", "attention_bias"),
    ),
    # config.json of HuggingFaceTB/SmolLM3-3B
    published=table(
        f"{SHAPE} num_key_value_heads",
        {"smollm3-3b": (2048, 11008, 36, 16, 4)},
        vocab_size=128256,
        rope_theta=5e6,
        max_position_embeddings=65536,
    ),
)

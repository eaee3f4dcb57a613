"""Ministral of 2024: the tables of its family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, Content, Family, window_of, windows_of_types
from weft.models.mistral import MISTRAL


def attention(content: Content) -> AttentionOptions:
    """A window in all layers, unless layer_types says in which."""
    window = window_of(content)
    windows = (window,) if content.get("layer_types") is None else windows_of_types(content, window)
    return AttentionOptions(windows=windows)


MINISTRAL = Family(
    name="Ministral",
    model_type="ministral",
    architecture="MinistralForCausalLM",
    defaults=MISTRAL.defaults,
    attention=attention,
    reads=("sliding_window", "layer_types"),
    published={},
)

"""Decoders over the recipes of weft.parallel, and the checkpoints they are read from.

``Qwen3Config`` and ``Qwen3ForCausalLM`` are names of before there were other families.
"""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

# Loaded on first use: the command line needs models' names before it needs torch and Triton.
_PLACES = {
    "Checkpoint": ("checkpoint", "Checkpoint"),
    "Decoder": ("decoder", "Decoder"),
    "DecoderConfig": ("config", "DecoderConfig"),
    "Eagle3Config": ("eagle3", "Eagle3Config"),
    "Progress": ("checkpoint", "Progress"),
    "Qwen3Config": ("config", "DecoderConfig"),
    "Qwen3ForCausalLM": ("decoder", "Decoder"),
    "load_model": ("decoder", "Decoder.from_pretrained"),
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'weft.models' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return attrgetter(attribute)(importlib.import_module(f"weft.models.{module}"))

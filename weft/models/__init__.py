"""Decoders over the recipes of weft.parallel, and the checkpoints they are read from.

``Qwen3Config`` and ``Qwen3ForCausalLM`` are names of before there were other families.
"""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.models.checkpoint import Checkpoint, Progress
    from weft.models.config import DecoderConfig
    from weft.models.decoder import Decoder
    from weft.models.eagle3 import Eagle3Config

    Qwen3Config, Qwen3ForCausalLM, load_model = DecoderConfig, Decoder, Decoder.from_pretrained

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
__all__ = [
    "Checkpoint", "Decoder", "DecoderConfig", "Eagle3Config", "Progress", "Qwen3Config", "Qwen3ForCausalLM",
    "load_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'weft.models' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return attrgetter(attribute)(importlib.import_module(f"weft.models.{module}"))

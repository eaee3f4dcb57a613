"""Models over the layers of weft.layers, and the checkpoints they are read from."""

from weft.models.checkpoint import Checkpoint, Progress
from weft.models.qwen3 import KVCache, Qwen3Config, Qwen3ForCausalLM

__all__ = ["Checkpoint", "KVCache", "Progress", "Qwen3Config", "Qwen3ForCausalLM"]

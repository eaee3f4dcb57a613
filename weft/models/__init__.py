"""Models over the layers of weft.layers, and the checkpoints they are read from."""

from weft.models.checkpoint import Checkpoint, Progress
from weft.models.config import Qwen3Config
from weft.models.qwen3 import Qwen3ForCausalLM

__all__ = ["Checkpoint", "Progress", "Qwen3Config", "Qwen3ForCausalLM"]

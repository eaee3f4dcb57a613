"""Decoders over the recipes of weft.parallel, and the checkpoints they are read from.

``Qwen3Config`` and ``Qwen3ForCausalLM`` are names of before there were other families.
"""

from weft.models.checkpoint import Checkpoint, Progress
from weft.models.config import DecoderConfig
from weft.models.decoder import Decoder

load_model = Decoder.from_pretrained
Qwen3Config, Qwen3ForCausalLM = DecoderConfig, Decoder

__all__ = ["Checkpoint", "Decoder", "DecoderConfig", "Progress", "Qwen3Config", "Qwen3ForCausalLM", "load_model"]

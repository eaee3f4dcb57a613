"""Models by what describes them: the config.json of a checkpoint, or the name of a published model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.checkpoint import Checkpoint
from weft.models.config import Qwen3Config
from weft.models.qwen3 import Qwen3ForCausalLM, check_cache, free_bytes

if TYPE_CHECKING:
    import torch

    from weft.layers import Mode
    from weft.runtime.team import Team

__all__ = ["ModelConfig", "build", "check_cache", "config_by_file", "config_by_name", "config_of", "free_bytes"]

# The configurations that `build` takes.
ModelConfig = Qwen3Config


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """Configuration by config.json, and by the weights where it is silent. CheckpointError for a model_type without decoder."""
    return Qwen3Config.of(checkpoint)


def config_by_file(checkpoint: Checkpoint) -> ModelConfig:
    """Configuration by config.json alone: the sizes of the model, without a look at its weights."""
    return Qwen3Config.from_dict(checkpoint.config)


def config_by_name(name: str) -> ModelConfig:
    """Configuration of a published model, such as "qwen3-32b". ValueError for another name."""
    return Qwen3Config.named(name)


def build(
    config: ModelConfig, team: Team, *, mode: Mode = "auto", dtype: torch.dtype | None = None, fused: bool | None = None
) -> Qwen3ForCausalLM:
    """Decoder of this configuration, its weights not yet read; arguments as in `Qwen3ForCausalLM`."""
    return Qwen3ForCausalLM(config, team, mode=mode, dtype=dtype, fused=fused)

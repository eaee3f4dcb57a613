"""Names of MTP heads' tensors in the checkpoints of families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of a head's parts in a checkpoint, after {index}, the number of the model's layers.

    families  model_types of published checkpoints with such a head
    """

    families: tuple[str, ...]
    layer: str
    enorm: str
    hnorm: str
    eh_proj: str
    norm: str

    def named(self, part: str, index: int) -> str:
        """Prefix of a part's tensors."""
        return getattr(self, part).format(index=index)


LAYOUTS = (
    Layout(
        families=("deepseek_v3", "glm4_moe"),
        layer="model.layers.{index}",
        enorm="model.layers.{index}.enorm",
        hnorm="model.layers.{index}.hnorm",
        eh_proj="model.layers.{index}.eh_proj",
        norm="model.layers.{index}.shared_head.norm",
    ),
    Layout(
        families=("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        layer="mtp.layers.0",
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        eh_proj="mtp.fc",
        norm="mtp.norm",
    ),
)


def layout_in(checkpoint: Checkpoint, index: int) -> Layout | None:
    """Layout of the head in a checkpoint of a model with `index` layers; None: there is no head."""
    return next((one for one in LAYOUTS if checkpoint.has(f"{one.named('eh_proj', index)}.weight")), None)


def is_of_head(name: str, index: int) -> bool:
    """True for a tensor of an MTP head, whether the model has one or not."""
    parts = ("layer", "enorm", "hnorm", "eh_proj", "norm")
    return any(name.startswith(f"{layout.named(part, index)}.") for layout in LAYOUTS for part in parts)

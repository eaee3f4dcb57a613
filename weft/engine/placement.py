"""Placement of a model: its checkpoint, the number of ranks, and whether they are GPUs or virtual."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from weft.arguments import check_choice, check_virtual_ranks, positive, shortened
from weft.errors import NotEnoughGPUs, WeftError
from weft.models import DecoderConfig
from weft.models.builtin import PATH as BUILTIN
from weft.models.checkpoint import Checkpoint
from weft.models.config import check_simulable
from weft.models.hub import find_checkpoint
from weft.parallel.step_plan import Mode
from weft.runtime.environment import coordinates
from weft.runtime.launch import DEFAULT_VIRTUAL_RANKS, DEVICES, is_simulated
from weft.runtime.virtual_rank import on_virtual_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Model and ranks of an LLM.

    source    directory of a checkpoint, or a configuration: random weights
    device    "cuda" or "sim"
    torchrun  this process is one of the ranks
    """

    source: Path | DecoderConfig
    world_size: int
    device: str
    torchrun: bool

    @classmethod
    def of(
        cls, model: str | PathLike[str] | DecoderConfig | None, world_size: int | None, device: str, mode: Mode
    ) -> Placement:
        """Placement by the arguments of LLM, whose docstring has the rules and the errors."""
        check_choice("device", device, DEVICES)
        if world_size is not None:
            world_size = positive("world_size", world_size)
        started = coordinates() if device != "sim" else None
        if started is not None and world_size not in (None, started.world_size):
            raise ValueError(
                f"world_size={world_size}, but torchrun has started {started.world_size} ranks; leave it out"
            )
        source = model
        if not isinstance(model, DecoderConfig):
            source = BUILTIN if model is None else find_checkpoint(model)
        gpus = torch.cuda.device_count()
        if started is not None:
            if gpus <= started.local_rank and not on_virtual_rank():
                raise WeftError(
                    f"torchrun started {started.world_size} ranks, and this machine has {gpus} GPUs; run it without torchrun, "
                    f"as LLM(world_size={started.world_size}, device='sim') (virtual ranks)"
                )
            return cls(source=source, world_size=started.world_size, device="cuda", torchrun=True)
        simulated = is_simulated(world_size, device)
        world_size = world_size or (DEFAULT_VIRTUAL_RANKS if simulated else gpus)
        if simulated:
            check_virtual_ranks("world_size", world_size)
            too_few = f"world_size={world_size} needs {world_size} GPUs and this machine has {gpus}"
            _check_virtual(source, mode, too_few if device == "auto" and gpus else "run it on GPUs")
        elif not 0 < world_size <= gpus:
            raise NotEnoughGPUs(world_size or 1, gpus)
        return cls(source=source, world_size=world_size, device="sim" if simulated else "cuda", torchrun=False)

    @property
    def directory(self) -> Path | None:
        """Directory of the checkpoint; None for random weights."""
        return None if isinstance(self.source, DecoderConfig) else self.source

    @property
    def longest(self) -> int:
        """Tokens that a sequence of this model may have."""
        sizes = self.source if self.directory is None else DecoderConfig.from_dict(Checkpoint(self.directory).config)
        return sizes.max_position_embeddings


def _check_virtual(model: Path | DecoderConfig, mode: Mode, remedy: str) -> None:
    """ValueError for a model too large for virtual ranks; WeftError on a virtual rank."""
    if on_virtual_rank():
        raise WeftError(
            "LLM starts virtual ranks, and this code runs on one that exists already; use weft.Engine(model, team)"
        )
    name, config = "this model", model
    if not isinstance(model, DecoderConfig):
        name, config = f"model={shortened(repr(str(model)))}", DecoderConfig.from_dict(Checkpoint(model).config)
    check_simulable(name, config, remedy, mode=mode, reference="mode='reference'")

"""Ranks of ``weft bench`` and ``weft tune``: their number, and the end of a command that may be one."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from weft.console import check_torchrun

SIMULATED_RANKS = 2
# Most simulated ranks: 32 deadlock, since their kernels need more SMs than are simulated.
MOST_SIMULATED_RANKS = 16


def ranks(world_sizes: tuple[int, ...], device: str) -> tuple[tuple[int, ...], bool]:
    """World sizes given by the flags, and whether their ranks are simulated.

    NotEnoughGPUs if they are not available.
    """
    import torch

    from weft.errors import NotEnoughGPUs
    from weft.runtime.environment import coordinates

    check_torchrun(device)
    gpus, where = torch.cuda.device_count(), coordinates()
    simulated = device == "sim" or (device == "auto" and gpus == 0)
    own_ranks = where.world_size if where is not None else None
    sizes = world_sizes or (own_ranks or (SIMULATED_RANKS if simulated else max(gpus, 1)),)
    if own_ranks is not None and sizes != (own_ranks,):
        raise ValueError(
            f"--world-size {','.join(map(str, sizes))}: torchrun started {own_ranks} ranks; leave it out, or run the command "
            f"without torchrun"
        )
    if not simulated and own_ranks is None and max(sizes) > gpus:
        raise NotEnoughGPUs(max(sizes), gpus)
    if simulated:
        check_simulable_ranks(max(sizes))
    return sizes, simulated


def check_simulable_ranks(world_size: int) -> None:
    """Raise ValueError for more ranks than can be simulated."""
    if world_size > MOST_SIMULATED_RANKS:
        raise ValueError(
            f"--world-size {world_size}: at most {MOST_SIMULATED_RANKS} ranks are simulated; take "
            f"{MOST_SIMULATED_RANKS}, or a machine with GPUs"
        )


def leave(status: int) -> NoReturn:
    """End the command after a run that ended early."""
    from weft.runtime.environment import coordinates

    if coordinates() is not None:
        sys.stdout.flush()
        os._exit(status)  # this process is a rank, and a normal exit would wait for kernels that never end
    raise typer.Exit(status)

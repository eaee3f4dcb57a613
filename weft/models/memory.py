"""Memory that a model and its KV cache need, compared with what there is before anything is allocated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from weft.errors import ModelTooLarge
from weft.models.config import DecoderConfig

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def check_memory(config: DecoderConfig, team: Team, dtype: torch.dtype, layers: range, *, taken: int = 0) -> None:
    """ModelTooLarge if a rank's share of these layers' weights alone exceeds its GPU's free memory.

    Virtual ranks share the machine's memory, so there all shares together count, and what each has `taken` for another model.
    """
    share = config.weight_bytes(layers, dtype) // team.size
    memory: int | None
    virtual = team.device.type != "cuda"
    if not virtual:
        memory, where, shares = free_bytes(team.device), f"{team.device} that are free", 1
    else:
        memory, where, shares = memory_of_this_machine(), "this machine, which virtual ranks share", team.size
        memory = memory and max(0, memory - taken * team.size)
    if memory is not None and share * shares > memory:
        raise ModelTooLarge(team.rank, share, memory, where, team.size, str(dtype).removeprefix("torch."), virtual)


def check_cache(
    config: DecoderConfig,
    team: Team,
    dtype: torch.dtype,
    pages: int,
    page_size: int,
    *,
    layers: range,
    context_parallel: bool = False,
) -> None:
    """ValueError if these layers' KV cache of `pages` pages alone exceeds the memory of `check_memory`."""
    elements = config.cached_elements(1 if context_parallel else team.size)
    page_bytes = len(layers) * page_size * elements * dtype.itemsize
    virtual = team.device.type != "cuda"
    memory = memory_of_this_machine() if virtual else free_bytes(team.device)
    if memory is not None and (most := memory // (page_bytes * (team.size if virtual else 1))) < pages:
        raise ValueError(
            f"pages={pages} are more than the {most} of {page_size} tokens that rank {team.rank} has memory for "
            f"({memory / 1e9:.3g} GB{', shared by all virtual ranks' if virtual else ' free'}); lower it, or leave it out"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes for a new tensor on a GPU, torch's cache given back first. CUDA graphs keep theirs."""
    return memory_of(device)[0]


def memory_of(device: torch.device) -> tuple[int, int]:
    """(`free_bytes` of a GPU, all its bytes)."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def memory_of_this_machine() -> int | None:
    """Bytes of physical memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None

"""Search space of the overlapped ops: chunks of the pipelined designs, tiles of the fused ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from weft.ops.gemm.space import tiles
from weft.plan.planned import Machine

T = TypeVar("T")
# chunks, streams, span of the pipelined designs.
PIPELINES = ((1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (1, 1, 2), (1, 2, 2), (1, 2, 3))


def pipelines(base: T, machine: Machine) -> Iterator[T]:
    """Pipelined designs with the other fields of ``base``."""
    for chunks, streams, span in PIPELINES:
        if span < machine.world_size:
            yield replace(base, chunks=chunks, streams=streams, span=span)  # type: ignore[type-var]


def fused_tiles(base: T, rows: int, dtype: torch.dtype, machine: Machine, quick: bool) -> Iterator[T]:
    """Fused designs: ``base`` with other tiles for panels of ``rows`` rows, or the other ``split``."""
    for tile in tiles(base.tile, rows, dtype, machine.caps, quick):
        yield replace(base, tile=tile)

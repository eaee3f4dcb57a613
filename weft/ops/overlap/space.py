"""Search space of the overlapped ops: chunks of the pipelined designs, tiles of the fused ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from weft.ops.gemm.space import tiles, tiles_around
from weft.ops.neighbours import moved, scaled
from weft.plan.planned import Machine

T = TypeVar("T")
# chunks, streams, span of the pipelined designs.
PIPELINES = ((1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (1, 1, 2), (1, 2, 2), (1, 2, 3))


def pipelines(base: T, machine: Machine) -> Iterator[T]:
    """Pipelined designs with the other fields of ``base``."""
    for chunks, streams, span in PIPELINES:
        if span < machine.world_size:
            yield replace(base, chunks=chunks, streams=streams, span=span)  # type: ignore[type-var]


def pipelines_around(design: Any, machine: Machine, **values: Any) -> Iterator[Any]:
    """Neighbours of a pipelined design; ``values`` of fields that only its class has."""
    yield from moved(
        design,
        chunks=scaled(design.chunks),
        streams=scaled(design.streams),
        span=scaled(design.span, 1, max(1, machine.world_size - 1)),
        **values,
    )


def fused_tiles(base: Any, rows: int, dtype: Any, machine: Machine, quick: bool) -> Iterator[Any]:
    """Fused designs: ``base`` with other tiles for panels of ``rows`` rows, or the other ``split``."""
    for tile in tiles(base.tile, rows, dtype, machine.caps, quick):
        yield replace(base, tile=tile)


def fused_around(design: Any, **values: Any) -> Iterator[Any]:
    """Neighbours of a fused design; ``values`` of fields that only its class has."""
    for tile in tiles_around(design.tile):
        yield replace(design, tile=tile)
    yield from moved(design, split=(not design.split,), **values)

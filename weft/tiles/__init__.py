"""Overlapped kernels from a tile body: ``gather``, ``scatter`` and ``exchange``.

A body is a ``@triton.jit`` function that computes one output tile. weft owns the order of the tiles, transport, signals,
epochs, residency and the reuse of buffers. Other kernels use ``team.channel``, ``wl.chunk_notify`` and ``wl.chunk_wait``.
"""

from weft.tiles.exchange import MAX_SPLIT, ExchangePlan, exchange, scatter
from weft.tiles.gather import GatherPlan, gather
from weft.tiles.tile import Matrices, Shard, Tile, TileMap

__all__ = [
    "MAX_SPLIT",
    "ExchangePlan",
    "GatherPlan",
    "Matrices",
    "Shard",
    "Tile",
    "TileMap",
    "exchange",
    "gather",
    "scatter",
]

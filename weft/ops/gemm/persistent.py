"""Host side of the persistent GEMM kernels: operands, programs, workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.kernels.gemm_tile import Sizes, SplitK
from weft.kernels.operands import can_describe, descriptor_or_self, row_stride
from weft.kernels.tile_schedule import MAX_PARTIALS, Tiles, whole_places
from weft.ops.gemm.tile import Tile

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Elements of the smallest output tile, which bounds the number of tiles, and so of signals, of a buffer.
SMALLEST_TILE = 16 * 16


def operands(a: torch.Tensor, b: torch.Tensor, tile: Tile) -> tuple[tuple[Any, Any], bool]:
    """Kernel arguments (a, b), and True if they are descriptors."""
    descriptors = can_describe(a, b)
    one = descriptor_or_self(a, tile.block_m, tile.block_k, descriptors)
    return (one, descriptor_or_self(b, tile.block_n, tile.block_k, descriptors)), descriptors


def sizes_of(a: torch.Tensor, b: torch.Tensor) -> Sizes:
    """Kernel argument ``sizes`` of a GEMM a @ b.T of operands with dense rows."""
    return Sizes(*b.shape, row_stride(a), row_stride(b))


def programs_for(team: Team, tiles: Tiles, tile: Tile, split: bool) -> int:
    """Number of programs of a fused kernel: all resident, one an SM, whose shared memory each needs."""
    most = min(team.caps.sms, team.max_programs(tile.num_warps))
    return min(most, tiles.count * (MAX_PARTIALS.value if split else 1))


def with_split(tiles: Tiles, programs: int, split: bool) -> Tiles:
    """``tiles``, whose last round of ``programs`` programs is split along K if ``split``."""
    return tiles._replace(whole=whole_places(tiles.count, programs)) if split else tiles


class Scratch(NamedTuple):
    """Memory of a team for tiles of one size: split-K partials, and each program's send buffer."""

    split: SplitK
    send: torch.Tensor


def scratch_for(team: Team, tile: Tile, dtype: torch.dtype) -> Scratch:
    """``Scratch`` of the team for tiles of this size; counters are 0 between kernels of its stream."""
    elements = tile.block_m * tile.block_n

    def make() -> Scratch:
        sms = team.caps.sms
        split = SplitK(team.local((sms, elements), torch.float32), team.local((sms,), torch.int32))
        return Scratch(split, team.local((sms, elements), dtype))

    return team.workspace(("gemm scratch", elements, dtype), make)

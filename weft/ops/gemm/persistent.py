"""The host side of the persistent GEMM kernels: agreement of the ranks, operands, programs and workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.kernels.gemm_tile import SplitK
from weft.kernels.operands import can_describe, descriptor_or_self, row_stride
from weft.kernels.tile_schedule import MAX_PARTIALS, Tiles, whole_places
from weft.ops.gemm.tile import Tile

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Elements of the smallest output tile: it bounds the tiles, each with its signal, that a buffer can hold.
SMALLEST_TILE = 16 * 16


def agree(op: str, team: Team, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """``values`` are the same on all ranks, or a ValueError on all of them: with other tiles, or by another design, they would
    wait for each other for ever. names: what the values are.

    The ranks meet once for each set of values; a rank that comes with new ones alone is told by the meeting.
    """
    seen = team.workspace("gemm agreed", set)
    if (op, values) in seen:
        return
    by_rank = team.exchange((op, names, values))
    if any(of_rank != by_rank[0] for of_rank in by_rank):
        members = [{"op": other, **dict(zip(of_rank, theirs, strict=True))} for other, of_rank, theirs in by_rank]
        different = [
            f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(found))}"
            for name in ("op", *names)
            if len(set(found := [member.get(name) for member in members])) > 1
        ]
        raise ValueError(f"{op}: {'; '.join(different)}; pass the same on all ranks")
    seen.add((op, values))


def operands(a: torch.Tensor, b: torch.Tensor, tile: Tile) -> tuple[tuple, bool]:
    """(a, a_stride, b, b_stride) as a kernel is given them, and whether they are descriptors."""
    descriptors = can_describe(a, b)
    one = descriptor_or_self(a, tile.block_m, tile.block_k, descriptors), row_stride(a)
    return (*one, descriptor_or_self(b, tile.block_n, tile.block_k, descriptors), row_stride(b)), descriptors


def programs_for(team: Team, tiles: Tiles, tile: Tile, split: bool) -> int:
    """Programs of a fused kernel: all are resident, one an SM, as each takes most of its shared memory."""
    most = min(team.caps.sms, team.max_programs(tile.num_warps))
    return min(most, tiles.count * (MAX_PARTIALS.value if split else 1))


def with_split(tiles: Tiles, programs: int, split: bool, least: int = 0) -> Tiles:
    """``tiles`` with the tiles of the last round of ``programs`` programs split along K, if ``split``; the first ``least``
    places never."""
    return tiles._replace(whole=whole_places(tiles.count, programs, least)) if split else tiles


class Scratch(NamedTuple):
    """A team's memory for tiles of one size: split-K partials, and the finished tile that each program is sending away."""

    split: SplitK
    send: torch.Tensor


def scratch_for(team: Team, tile: Tile, dtype: torch.dtype) -> Scratch:
    """The team's ``Scratch`` for tiles of this size, all zero between kernels of its stream."""
    elements = tile.block_m * tile.block_n

    def make() -> Scratch:
        sms = team.caps.sms
        split = SplitK(team.local((sms, elements), torch.float32), team.local((sms,), torch.int32))
        return Scratch(split, team.local((sms, elements), dtype))

    return team.workspace(("gemm scratch", elements, dtype), make)

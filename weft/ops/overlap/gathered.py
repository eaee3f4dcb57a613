"""Rows of all ranks for all_gather_matmul, of 16 bits or in fp8 with their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.kernels.fp8 import E4M3, Fp8
from weft.kernels.tile_schedule import place_of
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.overlap.operands import Operand
from weft.plan.planned import machine_of
from weft.runtime.team.channel import Channel
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class Gathered(NamedTuple):
    """Rows of all ranks in a half of A_full, in the order of the result; this rank's are not written.

    data    [W * rows, K]
    scales  of fp8 rows, fp32 [W * rows * groups]: a piece, rows first .. last, has [groups, last - first] scales from
            first * groups on, so that cuBLAS reads them where they arrive; or one scale of all rows. None: rows of 16 bits
    rows    of a rank
    groups  scales of a row that travel with it
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    rows: int
    groups: int = 0

    @classmethod
    def within(cls, half: torch.Tensor, shard: Operand, world: int) -> Gathered:
        """The rows of ``world`` shards at the beginning of a half, which is of bytes for fp8 rows."""
        rows, K = shard.shape
        data = half[: world * rows * K].view(shard.data.dtype).view(world * rows, K)
        if not isinstance(shard, Fp8):
            return cls(data, None, rows)
        groups = groups_of(shard)
        if groups == 0:
            return cls(data, shard.scales, rows)
        first = scales_from(world * rows * K)
        scales = half[first : first + 4 * world * rows * groups].view(torch.float32)
        return cls(data, scales, rows, groups)

    def at(self, places: range, piece: slice) -> Operand:
        """A piece of one rank's rows, or all rows of several adjacent ones, as a GEMM takes them."""
        first, last = places.start * self.rows + piece.start, (places.stop - 1) * self.rows + piece.stop
        data = self.data[first:last]
        if self.scales is None:
            return data
        if self.groups == 0:
            return Fp8(data, self.scales)
        scales = self.scales[first * self.groups : last * self.groups]
        if self.groups > 1 and len(places) > 1:
            # Each rank's scales are by groups; a GEMM of several ranks' rows reads all rows' of a group.
            scales = scales.view(len(places), self.groups, self.rows).transpose(0, 1).contiguous()
        return Fp8(data, scales.view(self.groups, last - first).t())

    def parts(self, place: int, piece: slice) -> list[torch.Tensor]:
        """Memory of a piece of one rank's rows: the rows, then their scales."""
        first, last = place * self.rows + piece.start, place * self.rows + piece.stop
        if self.groups == 0:
            return [_as_sent(self.data[first:last])]
        return [_as_sent(self.data[first:last]), self.scales[first * self.groups : last * self.groups]]


def _as_sent(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8) if rows.dtype == E4M3 else rows


def groups_of(shard: Fp8) -> int:
    """Scales of a row; 0 for one scale of all rows, equal on all ranks."""
    return 0 if len(shard.scales) < len(shard.data) else shard.scales.shape[1]


def scales_from(nbytes: int) -> int:
    """Offset in bytes of the scales after ``nbytes`` of rows."""
    return -(-nbytes // 16) * 16


def with_scales(rows: Operand, b: Operand) -> Operand:
    """Quantized rows with scales of each row, unless b has one scale of all ranks' rows."""
    if not isinstance(rows, Fp8) or b.input_scale is not None:
        return rows
    return rows._replace(data=rows.data.contiguous(), scales=rows.scales.expand(len(rows.data), -1))


def begin_gather(
    team: Team, shard: Operand, pieces: Sequence[slice], local_first: bool
) -> tuple[Gathered, Channel, int]:
    """Begin a call, and have copy engines write ``shard`` by ``pieces`` to every peer's A_full.

    In the current stream. Returns the gathered rows, their flags, and this rank's place. Rank r serves r - 1, r - 2, … : the
    peer that needs this shard next is first, and every link carries one shard at a time. A piece's flag follows its rows and
    the scales of its rows.
    """
    if not isinstance(shard, Fp8) and shard.requires_grad:
        shard = shard.detach()  # copies are made outside the op, where autograd would follow it
    world, me, rows, size = team.size, team.rank, shard.shape[0], team.size * shard.shape[0] * shard.shape[1]
    dtype, own = shard.dtype, [[shard if len(pieces) == 1 else shard[piece]] for piece in pieces]
    if isinstance(shard, Fp8):
        size, dtype = scales_from(size) + 4 * world * rows * groups_of(shard), torch.uint8
        own = [_own_parts(shard, piece) for piece in pieces]

    def make(capacity: int) -> CopyChannel:
        # A row of flags per rank for each order of rows, so that each row has one writer.
        return CopyChannel.make(team, team.empty((2, capacity), dtype=dtype), 2 * world)

    channel = grown_workspace(team, ("all_gather_matmul", dtype), size, make)
    gathered = Gathered.within(channel.begin(team), shard, world)
    team.copy_engine.fork()
    first_flags = world if local_first else 0
    for step in range(1, world):
        peer = (me - step) % world
        place = place_of.fn(me, peer, world, local_first)
        for number, (piece, sources) in enumerate(zip(pieces, own, strict=True)):
            *before, last = zip(gathered.parts(place, piece), sources, strict=True)
            for target, source in before:
                team.copy_engine.put(target, source, peer)
            channel.send(team, *last, first_flags + place, number, peer)
    landed = channel.rows_from(world) if local_first else channel.landed
    return gathered, landed, place_of.fn(me, me, world, local_first)


def _own_parts(shard: Fp8, piece: slice) -> list[torch.Tensor]:
    """Rows and scales of a piece of this rank's rows as ``Gathered.parts`` holds them."""
    rows = [_as_sent(shard.data[piece])]
    return [*rows, shard.scales[piece].t().contiguous().view(-1)] if groups_of(shard) else rows


def gathered_in_sequence(design: Any, team: Team, shard: Fp8, local_first: bool) -> Fp8:
    """All ranks' rows and scales by all_gather. design: of the rows."""
    data = ALL_GATHER.run(design, team, _as_sent(shard.data))
    scales = shard.scales
    if groups_of(shard):
        call = CollectiveCall(scales.nbytes, scales.dtype)
        scales = ALL_GATHER.run(ALL_GATHER.plan(call, machine_of(team)).design, team, scales)
    if local_first:
        data = data.roll(-team.rank * len(shard.data), 0)
        scales = scales.roll(-team.rank * len(shard.data), 0) if groups_of(shard) else scales
    return Fp8(data.view(E4M3), scales)

"""Design "pipelined" of grouped_matmul_reduce_scatter: a peer's sums travel under the next GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.ops.moe import grouped
from weft.ops.moe.arrival import channel_of
from weft.ops.moe.by_nodes import group_tiles
from weft.ops.moe.combine_pieces import CombinePieces, add_received, send_sums
from weft.ops.moe.grouped import GroupedTiles
from weft.ops.moe.routing import Experts, Routing, Schedule
from weft.runtime.codec import exchangeable
from weft.runtime.side_streams import side_streams
from weft.runtime.team.shape import Shape

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class ByOwners:
    """A GEMM for each rank's tokens, the peers' first. sums: of ``moe_combine``'s design of that name."""

    tiles: GroupedTiles
    sums: CombinePieces


def run_by_owners(
    design: ByOwners,
    team: Team,
    h: torch.Tensor,
    down: torch.Tensor,
    schedule: Schedule,
    routing: Routing,
    experts: Experts,
    tokens: int,
) -> torch.Tensor:
    """The op of checked arguments, without a shared summand.

    The schedule's tiles are divided by the rank whose sums need them first, r + 1 before r + 2 and so on, and this rank's last:
    lists begin with this rank's tokens, so few tiles are of two ranks. Sums of a peer are added up on the urgent stream, beside
    the next GEMM: a program of moe_sum fits an SM that has two of the GEMM's (32 registers a thread).

    signals  those of ``send_sums``
    waits    the urgent stream, before a peer's sums: its mark behind the GEMM of the peer's tiles, and so behind all before it
             add_pieces_kernel, behind the last GEMM: the flag of each piece of each rank
    progress add_pieces_kernel begins once all sums of this rank have been added up, so it takes no SM that they need
    reuse    of a half of the received sums: CopyChannel. y is this call's alone

    kernels  | begin | groups | GEMM r+1 | GEMM r+2 | GEMM r   | own sums, sum of ranks |             rank r of three
    urgent                               | sums r+1 | sums r+2 |
    copies                                   | pieces of r+1 | pieces of r+2 |
    """
    (rows, k), H, world, me = routing.ids.shape, down.shape[1], team.size, team.rank
    out, y = h.new_empty((tokens, H)), h.new_empty((rows * k, H))
    channel, streams = channel_of(team, "moe_combine", h.dtype, rows * H), side_streams(team, 1)
    received = channel.begin(team)[: rows * H].view(rows, H)
    results = y, *(tensor.detach().contiguous() for tensor in routing)
    groups = group_tiles(team, schedule, rows // world, Shape(world, 1), arriving=False)
    streams.fork()
    for step, group in enumerate(groups, 1):
        grouped.run(design.tiles, h, down, group, gather=0, out=y)
        if step < world:
            multiplied = streams.mark()
            with streams.urgent():
                streams.after(multiplied)
                held, owner = (experts.first, experts.count), (me + step) % world
                send_sums(design.sums, team, results, held, owner, channel, received)
    # Its programs fill the SMs and wait for peers, who wait for these sums.
    streams.join()
    add_received(design.sums, team, results, experts, experts.sharers(me, world), channel, received, out)
    team.copy_engine.join()
    return out

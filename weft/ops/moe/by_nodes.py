"""AG-MoE and MoE-RS over nodes: experts' GEMMs go node by node, while rails carry other nodes' rows.

Each rank makes one schedule of all nodes' tokens, as in one node. Its tiles are divided into groups: a tile of AG-MoE goes with
the node whose rows it needs last, one of MoE-RS with the node whose sums need it first. A group is one GEMM. No kernel spins
for what moves: streams wait, and copy engines carry it within a node. So rails run under all GEMMs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.over_nodes import added_over_nodes, packed, unpacked
from weft.ops.collectives.reduce_scatter import REDUCE_SCATTER
from weft.ops.knobs import design_type
from weft.ops.moe.exchange.exchange_op import padded
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.gemms import GroupedTiles
from weft.ops.moe.moe_sum import moe_sum
from weft.ops.moe.overlapped import GatherArguments, ScatterArguments, load_tiles, schedule_of, store_tiles
from weft.ops.moe.routing import Routing, Schedule
from weft.plan.planned import Planned
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.side_streams import side_streams
from weft.runtime.team.rail import Piece
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel, await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Tiles that a program of group_tiles_kernel reads at a time.
STEP = tl.constexpr(1024)


@design_type
class ByNodes:
    """A GEMM for each node's rows.

    node  plan of the node's collective by copy engine: an all-gather of choices, or a reduce-scatter of sums
    """

    tiles: GroupedTiles
    node: Planned


@triton.jit(do_not_specialize=["room", "tokens", "me"])
def group_tiles_kernel(
    groups, counts, room, schedule, tokens, me, NODES: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
    ARRIVING: tl.constexpr,
):  # fmt: skip
    """groups[g] = the tiles of group g, in the order of ``schedule``; counts[g] = their number

    grid: (groups,)

    A tile's pairs are of the ranks from its first pair's to its last pair's, in the order of the lists. n: this rank's node
    ARRIVING  lists begin with node n. 0: tiles of this rank's rows alone; 1 + s: of node n + s, and none that comes later
              else they begin anywhere. s: tiles of node n + 1 + s, and none that goes earlier; the last group is node n's
    groups    [groups, room, 4]; tokens: most of a rank; SIZE: ranks of a node

    signals, waits  none
    """
    group, begun = tl.program_id(0), 0
    wl.follow_previous_kernel()
    known, node = tl.load(schedule.tile_count), me // SIZE
    target = groups + group.to(tl.int64) * room * 4
    for begin in range(0, known, STEP):
        tile = begin + tl.arange(0, STEP)
        there = tile < known
        entries = load_tiles(schedule.tiles, tile, there)
        _, first, _, count = entries
        head = tl.load(schedule.pairs + first, mask=there, other=0) // CHOICES
        tail = tl.load(schedule.pairs + first + count - 1, mask=there, other=0) // CHOICES
        of_head, of_tail = head // tokens // SIZE, tail // tokens // SIZE
        if ARRIVING:
            alone = (head // tokens == me) & (tail // tokens == me)
            of = tl.where(alone, 0, 1 + (of_tail + NODES - node) % NODES)
        else:
            place = (of_head + 2 * NODES - node - 1) % NODES
            # A list that begins within a node may end in it, after all other pairs.
            nodes = tl.where((of_head == of_tail) & (head > tail), NODES, (of_tail + NODES - of_head) % NODES + 1)
            of = tl.where(place + nodes > NODES, 0, place)
        inside = there & (of == group)
        store_tiles(target + (begun + tl.cumsum(inside.to(tl.int32), 0) - 1) * 4, entries, inside)
        begun += tl.sum(inside.to(tl.int32), axis=0)
    tl.store(counts + group, begun)


def group_tiles(team: Team, schedule: Schedule, tokens: int, *, arriving: bool) -> list[Schedule]:
    """``schedule`` once for each group, with the group's tiles."""
    (nodes, size), room, node = team.shape, len(schedule.tiles), team.node
    number = nodes + arriving
    groups, counts = schedule.tiles.new_empty((number, room, 4)), schedule.counts.new_empty(number)
    constants = {"NODES": nodes, "SIZE": size, "CHOICES": schedule.choices, "ARRIVING": arriving}
    constants |= launch_options(node.caps)
    launch = launch_of(node, group_tiles_kernel, (nodes, schedule.choices, arriving), lambda: constants)
    launch(number, groups, counts, room, schedule, tokens, team.rank)
    return [schedule._replace(tiles=groups[group], tile_count=counts[group : group + 1]) for group in range(number)]


def gather_by_nodes(design: ByNodes, team: Team, given: GatherArguments) -> tuple[torch.Tensor, ...]:
    """(h, pairs, counts, tiles, tile_count, ids, weights), as ``AllGatherGroupedMatmulSiluMul.run``.

    The choices of all ranks cross before the rows: a schedule needs them.

    signals  copy engine of rank (j, r), after the rows of rank (i, r): landed[(i, r)] = epoch at the ranks of its node j
    waits    wait_kernel, before the GEMM of the node's group: flags of its ranks
    reuse    of a half of the rows: CopyChannel. A rail writes this rank's slots only, after the previous call

    rail      | choices | rows to n-1, from n+1 | to n-2, from n+2 |                                    rank of node n of 3
    copies             | choices | own rows |    | rows of n+1 |     | rows of n+2 |
    kernels                      | schedule | GEMM own | GEMM n |      | GEMM n+1 |     | GEMM n+2 |
    """
    x, (ids, weights), gate_up, most = given.x, given.routing, given.gate_up, given.max_tokens
    (T, K), k, node, (nodes, size) = x.shape, ids.shape[1], team.node, team.shape
    rail, here, rows = team.rail, node.rank, team.size * most
    channel = _channel(team, x.dtype, rows * K)
    gathered = (channel.begin(node) if size > 1 else channel.buffers[0])[: rows * K].view(nodes, size, most, K)
    # Node n first, then the nodes that its rail receives from, in that order.
    order = [(rail.index + step) % nodes for step in range(nodes)]
    own = gathered[rail.index, here]
    own[:T].copy_(x)
    choices = padded(ids, most, -1), padded(weights, most, 0)
    words = packed(choices)
    of_rail = words.repeat(nodes, 1)
    rail.fork()
    pieces = [
        Piece(send=send, to=(rail.index - step) % nodes, receive=into[source], source=source)
        for send, into in ((words, of_rail), (own, gathered[:, here]))
        for step, source in enumerate(order[1:], 1)
    ]
    marks = rail.exchange(pieces)
    rail.after(marks[nodes - 2])
    of_all = ALL_GATHER.run(design.node.design, node, of_rail).view(size, nodes, -1)
    ids, weights = (
        torch.cat(parts)
        for parts in zip(*(unpacked(one, choices) for one in of_all.transpose(0, 1).flatten(0, 1)), strict=True)
    )
    streams = side_streams(node, 1)
    streams.fork()
    _send_slot(node, channel, gathered, rail.index, T)
    schedule = schedule_of(team, ids, given.experts, most, given.block)
    groups = group_tiles(team, schedule, most, arriving=True)
    h = gate_up.new_empty((rows * k, gate_up.shape[1] // 2))

    def multiply(group: Schedule) -> None:
        gemms.run(design.tiles, given.gemm(gathered.view(rows, K), group, None), gated=True, out=h)

    multiply(groups[0])
    for step, (source, group) in enumerate(zip(order, groups[1:], strict=True)):
        if step > 0:
            mark = marks[nodes - 2 + step]
            with streams.urgent():
                rail.after(mark)
                _send_slot(node, channel, gathered, source, most)
            rail.after(mark)
        if size > 1:
            await_chunk(channel.rows_from(source * size), 0, (here + 1) % size, size - 1)
        multiply(group)
    streams.join()
    node.copy_engine.join()
    rail.join()
    return h, *schedule[:4], ids, weights


def _send_slot(node: Team, channel: CopyChannel, gathered: torch.Tensor, of: int, tokens: int) -> None:
    """Have the copy engine write what this rank has of node ``of`` to all ranks of this node."""
    node.copy_engine.fork()
    rows = gathered[of, node.rank, :tokens]
    for step in range(1, node.size):
        channel.send(node, rows, rows, of * node.size + node.rank, 0, (node.rank - step) % node.size)


def _channel(team: Team, dtype: torch.dtype, size: int) -> CopyChannel:
    node = team.node

    def make(capacity: int) -> CopyChannel:
        # A row of flags for each rank of all nodes.
        return CopyChannel.make(node, node.empty((2, capacity), dtype=dtype), team.size)

    return grown_workspace(node, ("all_gather_grouped_matmul_silu_mul over nodes", dtype), size, make)


def scatter_by_nodes(design: ByNodes, team: Team, given: ScatterArguments) -> torch.Tensor:
    """The op of checked arguments: for each node a GEMM and the sums of its tokens; this node's last.

    kernels  | GEMM n+1 | sum | GEMM n+2 | sum | GEMM n | sum | sum of nodes |                      rank of node n of 3
    copies              | n+1 |          | n+2 |        | n |
    rail                      | to n+1, from n-1 | to n+2, from n-2 |
    """
    routing, dtype = given.routing, given.gemm.dtype
    nodes, (rows, _), H = team.shape.nodes, routing.ids.shape, given.gemm.weight.shape[1]
    groups = group_tiles(team, given.gemm.schedule, rows // team.size, arriving=False)
    gemm, y = given.gemm.with_fp8_rows(), routing.weights.new_empty((routing.ids.numel(), H), dtype=dtype)
    parts = y.chunk(nodes), *(tensor.detach().chunk(nodes) for tensor in routing)

    def of(node: int) -> torch.Tensor:
        group = groups[(node - team.rail.index - 1) % nodes]
        gemms.run(design.tiles, gemm._replace(schedule=group), out=y)
        results, ids, weights = (part[node] for part in parts)
        beside = {
            name: x if x is None else x.detach().chunk(nodes)[node]
            for name, x in (("shared", given.shared), ("gate", given.gate))
        }
        summand = moe_sum(results, Routing(ids, weights), given.experts, **beside)
        return REDUCE_SCATTER.run(design.node.design, team.node, summand)

    return added_over_nodes(team, of, design.node)[: given.tokens]

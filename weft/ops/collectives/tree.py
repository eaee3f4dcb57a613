"""All-reduce by a tree in rank order, of the same bits on 1, 2, 4 and 8 ranks (weft.kernels.slices).

Every rank holds one or several neighbouring nodes, [count, ...] in the order of the slices. It adds them up, sends the node
above, and adds up the ranks' nodes; every node is rounded to the dtype. One hop and two give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from weft.kernels.slices import SLICES, node_of, node_of_ranks
from weft.ops.collectives.collective import CollectiveCall, OneShot, TwoShot
from weft.ops.gemm.sliced import total
from weft.ops.knobs import design_type
from weft.plan.planned import Machine, Planned
from weft.runtime.team.team import Team
from weft.transport import exchange
from weft.transport.exchange import Body, place_of

WORLD_SIZES = (1, 2, 4, 8)


@design_type
class Tree:
    """Sum in a tree over the ranks.

    hops  the all-reduce of one hop or two that carries the nodes; None: one rank
    """

    hops: Planned | None = None


@triton.jit
def own_node(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tile of this rank's node: for all ranks, and what this one keeps.

    x: SIZES nodes below it, n elements apart
    """
    start, columns, inside = place_of(message, tile, BLOCK)
    return node_of(message.x + start + columns, inside, message.n, message.SIZES, True, message.out.dtype.element_ty)


@triton.jit
def top_node(received, message, tile, team):
    """out [n] = the node above the ranks' tiles."""
    start, columns, inside = place_of(message, tile, received.shape[1])
    node = node_of_ranks(received).to(message.out.dtype.element_ty)
    tl.store(message.out + start + columns, node, mask=inside)


# out = the node above all ranks' nodes                                                   x [SIZES, n], out [n]
# every rank   | push 0 to all | push 1 | receive, add, store 0 | push 2 | receive, add, store 1 | ...
ONE_SHOT = Body(name="tree_all_reduce_kernel", send=own_node, own=own_node, store=top_node)


def planned(call: CollectiveCall, machine: Machine, choose: Callable[[CollectiveCall], Planned]) -> Planned:
    """Plan of an invariant all-reduce. ValueError where no tree spans the ranks.

    choose: plan of one by stores
    """
    check_ranks("all_reduce", machine)
    if machine.world_size == 1:
        return Planned("tree", Tree(), "invariant, one rank: it adds up its nodes")
    hops = choose(call._replace(invariant=False))
    return Planned("tree", Tree(hops=hops), f"invariant: nodes in rank order; {hops.reason}")


def check_ranks(op: str, machine: Machine) -> None:
    """ValueError unless a tree spans the ranks."""
    if machine.world_size not in WORLD_SIZES or machine.nodes > 1:
        raise ValueError(
            f"{op}: invariant=True on {machine.world_size} ranks of {machine.nodes} node(s): a tree of {SLICES} slices "
            f"spans 1, 2, 4 or 8 ranks of one node"
        )


def run(
    design: Tree,
    team: Team,
    nodes: torch.Tensor,
    dtype: torch.dtype,
    two_shot: Callable[[TwoShot, torch.Tensor, torch.Tensor], None],
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Node above all ranks' ``nodes`` [count, ...], contiguous: ``into``, or a new tensor.

    two_shot  launch of the kernel of two hops for its design, x and out
    """
    if design.hops is None:
        if len(nodes) > 1:
            return total(nodes, dtype, rounded=True, out=into)
        # As a transport would leave it, which carries no -0.0.
        return torch.add(nodes[0], 0.0, out=into)
    out = torch.empty(nodes.shape[1:], dtype=dtype, device=nodes.device) if into is None else into
    hops = design.hops.design
    if isinstance(hops, OneShot):
        exchange.prepare(ONE_SHOT, out.numel(), dtype, team, hops.push, sizes=len(nodes))(nodes, out)
    else:
        two_shot(hops, total(nodes, dtype, rounded=True), out)
    return out

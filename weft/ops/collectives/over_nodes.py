"""Collectives over nodes: each part crosses to a node once, by rail, and is forwarded within it.

L ranks a node, N nodes; rank (k, l) is local rank l of node k, and its rail joins (0, l), (1, l), …

all_gather      rail: own part to every other node         node: an all-gather for each node's parts, as they land
reduce_scatter  node: a reduce-scatter of each node's parts rail: the sums to their nodes         then: add the N sums
all_reduce      a reduce-scatter, then an all-gather, both over nodes
all_to_all      rail: the parts for node k to rank (k, l)   node: an all-to-all of what each node has sent

Bytes of a rank over its rail: all_gather (N - 1) parts, reduce_scatter (N - 1) parts of 1 / W of its input, all_reduce both,
all_to_all (N - 1) / N of its input. No byte crosses twice to one node, and each rail carries 1 / L of what its node gets.

    signals   none of this file: a piece's end is awaited in stream order, so that no kernel spins for a rail
    order     own node first where parts arrive, last where they leave: rails and links of the node are busy together, if the
              node's design leaves room on the GPU (``leaves_room``)
    progress  two-sided NCCL runs a kernel. Beside a grid that fills the GPU and waits for peers, some ranks could have started
              the one and some the other, for ever. So such a grid and the rail take turns, the same on all ranks
    rounding  a node's sum is rounded to x's dtype before it crosses; the N sums are added in fp32 and rounded once more

node k, all_gather      | own parts          | parts of k-1 | parts of k-2 |         by copy engines
rail                    | to k+1, from k-1   | to k+2, from k-2 |
node k, all_gather                                              | own parts | parts of k-1 | parts of k-2 |    pushed
rail                    | to k+1, from k-1 | to k+2, from k-2 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from weft.ops.collectives.copy_engine import add_up
from weft.ops.knobs import design_type
from weft.plan.planned import Planned
from weft.runtime.team.rail import Piece
from weft.runtime.team.team import Team


@design_type
class OverNodes:
    """Rails between the nodes, and the same collective within each. node: its plan there."""

    node: Planned


@design_type
class ScatterGather:
    """All-reduce as a reduce-scatter and an all-gather, both over nodes."""

    scatter: Planned
    gather: Planned


def leaves_room(planned: Planned) -> bool:
    """True if no grid of several programs waits for peers: copy engines carry, and single programs wait."""
    if planned.name == "sequential":
        return planned.design.collective is None or leaves_room(planned.design.collective)
    return planned.name in ("copy", "copy_engine", "pipelined")


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bytes of all ``tensors``, each from a multiple of 16 on, so that they cross as one piece."""
    return torch.cat([F.pad(x.contiguous().view(-1).view(torch.uint8), (0, -x.nbytes % 16)) for x in tensors])


def unpacked(data: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``packed`` data, of the shapes and dtypes of ``like``."""
    parts = data.split([x.nbytes + -x.nbytes % 16 for x in like])
    return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, like, strict=True)]


def swapped(team: Team, parts: Sequence[torch.Tensor], node: Planned) -> Iterator[tuple[int, torch.Tensor]]:
    """Send ``parts[k]`` to node k; yields (j, the part that node j has sent), own node first.

    Each may be read in the current stream. N parts, contiguous, of one size. Take all parts: the last one ends the exchange.
    ``node``: the plan of what is done with them.
    """
    rail = team.rail
    received = [torch.empty_like(parts[0]) for _ in range(rail.size - 1)]
    rail.fork()
    sources = [(rail.index - step) % rail.size for step in range(1, rail.size)]
    marks = rail.exchange(
        [
            Piece(
                send=parts[(rail.index + step) % rail.size],
                to=(rail.index + step) % rail.size,
                receive=into,
                source=source,
            )
            for step, (into, source) in enumerate(zip(received, sources, strict=True), 1)
        ]
    )
    if not leaves_room(node):
        rail.join()
    yield rail.index, parts[rail.index]
    for mark, source, piece in zip(marks, sources, received, strict=True):
        rail.after(mark)
        yield source, piece
    rail.join()


def added_over_nodes(
    team: Team, reduce: Callable[[int], torch.Tensor], node: Planned, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over nodes j of node j's ``reduce(k)``, at node k: ``into``, or a new tensor.

    reduce  gives a contiguous tensor like the result; ``node`` is its plan
    order  own + the parts of nodes k - 1, k - 2, … (mod N), in fp32, rounded once
    """
    rail, pieces, overlaps = team.rail, [], leaves_room(node)
    for step in range(1, rail.size):
        to, source = (rail.index + step) % rail.size, (rail.index - step) % rail.size
        part = reduce(to).view(-1)
        if step == 1:
            received = part.new_empty((rail.size - 1, len(part)))
        pieces.append(Piece(send=part, to=to, receive=received[step - 1], source=source))
        if overlaps:
            rail.fork()
            rail.exchange(pieces[-1:])
    own = reduce(rail.index)
    if not overlaps:
        rail.fork()
        rail.exchange(pieces)
    rail.join()
    out = torch.empty_like(own) if into is None else into
    add_up(own.view(-1), received, out.view(-1), team.node, None)
    return out

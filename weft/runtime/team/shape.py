"""Shape of a team: nodes, each with the same number of ranks, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.arguments import check_int


class Shape(NamedTuple):
    """Shape of a team: rank = node * node_size + local rank.

    nodes      machines whose GPUs reach each other by NVLink or PCIe; 1: every rank reaches every other
    node_size  ranks of each
    """

    nodes: int
    node_size: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.node_size} ranks"


def check_node_size(node_size: int | None, world_size: int) -> int | None:
    """``node_size`` as an int or None. ValueError unless it divides ``world_size``."""
    if node_size is None:
        return None
    node_size = check_int("node_size", node_size, 1)
    if world_size % node_size:
        raise ValueError(f"node_size={node_size} does not divide world_size={world_size}; pass a divisor of it")
    return node_size


def shape_of(nodes: Sequence[int]) -> Shape:
    """Shape of a team whose rank r lies in node ``nodes[r]``.

    ValueError unless the ranks of a node follow each other and all nodes have as many.
    """
    counts: dict[int, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    size = counts[nodes[0]]
    if any(count != size for count in counts.values()):
        listed = ", ".join(f"{count} of node {node}" for node, count in counts.items())
        raise ValueError(f"a team has as many ranks of every node, and this one would have {listed}; leave some out")
    if any(node != nodes[rank - rank % size] for rank, node in enumerate(nodes)):
        raise ValueError(f"the ranks of a node follow each other in a team, and these are of nodes {list(nodes)}")
    return Shape(len(counts), size)

"""Schedules that each op is to have been checked with, which ``python -m tests.check.sweep --goals`` runs in this order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """``schedules`` of each call whose name has one of ``prefixes``, on ``world_size`` ranks.

    ``node_size``: ranks of a node, None: one node.
    """

    schedules: int
    world_size: int
    node_size: int | None = None
    prefixes: tuple[str, ...] = ("",)

    def covers(self, name: str, world_size: int, node_size: int | None) -> bool:
        return (world_size, node_size) == (self.world_size, self.node_size) and name.startswith(self.prefixes)


ATTENTION = ("sharded_decode", "merge_attention", "sequence_to_heads", "heads_to_sequence", "gathered_prefill")
EXPERTS = ("route", "moe", "grouped_matmul", "all_gather_grouped")

# Of several goals for one call the first one counts.
GOALS = (
    Goal(50, 2, 1),
    Goal(500, 2, None, ATTENTION),
    *(Goal(100, size, None, ATTENTION) for size in (1, 3, 4)),
    *(Goal(50, size, node_size) for size, node_size in ((6, 2), (8, 4), (8, 2))),
    Goal(500, 4, 2),
    Goal(500, 2, None, EXPERTS),
    *(Goal(100, size, None, EXPERTS) for size in (3, 4)),
    Goal(100, 8, None, ATTENTION),
    *(Goal(100, size) for size in (2, 3, 4)),
)

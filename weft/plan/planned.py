"""Plans: the design that a call gets, chosen by a pure function of the call and the machine, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.plan.memo import remembered
from weft.plan.table import Row
from weft.runtime.capabilities import Capabilities
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

UNLIMITED = 1 << 62
AUTO = "auto"
# Key of the team's staging buffers, by capacity, for copy-engine collectives.
STAGING = "staging"


@exchangeable
@dataclass(frozen=True, slots=True)
class Planned:
    """Design of a call, with the reason.

    name    of the design, as in ``Op.designs``
    design  a frozen dataclass with that design's own fields; plans of other ops may be among them
    reason  a sentence: the row's file, key and microseconds, or the rule
    row     row of ``weft tune`` that it came from; None: a rule
    """

    name: str
    design: Any
    reason: str
    row: Row | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Inputs of a plan besides its call; equal values are the same object (``machine``).

    caps           capabilities of this rank's GPU, and of its links within the node
    world_size     ranks of the team
    nodes          of the team; its ranks are divided evenly
    staging_bytes  largest staging buffer that copy-engine collectives may use: a power of two; equal on all ranks, since the
                   heaps are filled alike
    heap_bytes     size of the symmetric heap, however it is filled
    """

    caps: Capabilities
    world_size: int
    staging_bytes: int = UNLIMITED
    nodes: int = 1
    heap_bytes: int = UNLIMITED

    @property
    def node(self) -> Machine:
        """Machine of a node's team."""
        return machine(self.caps, self.world_size // self.nodes, self.staging_bytes, heap_bytes=self.heap_bytes)


@remembered
def machine(
    caps: Capabilities, world_size: int, staging_bytes: int = UNLIMITED, nodes: int = 1, heap_bytes: int = UNLIMITED
) -> Machine:
    """Machine with these values."""
    return Machine(caps=caps, world_size=world_size, staging_bytes=staging_bytes, nodes=nodes, heap_bytes=heap_bytes)


def machine_of(team: Team) -> Machine:
    """Machine of ``team``, with its heap (of its node) as filled now."""
    known, node = team.workspace("machines", dict), team.node
    if node.heap_changes not in known:
        made = machine(node.caps, team.size, staging_bytes_of(node), team.shape.nodes, node.heap_bytes)
        known[node.heap_changes] = made
    return known[node.heap_changes]


def staging_bytes_of(team: Team) -> int:
    """Largest staging buffer that a copy-engine collective may use unasked: a power of two, or 0.

    It is the largest existing one, or half of the heap's largest free block, since other ops need workspaces too.
    """
    free = team.largest_free_bytes() // 2
    return max(max(team.workspace(STAGING, dict), default=0), 1 << free.bit_length() >> 1)

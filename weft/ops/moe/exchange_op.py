"""Base of moe_dispatch and moe_combine: their plans, search and traffic."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from weft.ops.case import Case
from weft.ops.collectives.over_nodes import OverNodes
from weft.ops.knobs import around
from weft.ops.local import check_sizes
from weft.ops.moe.exchange import PushRows
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.team.workspace import capacity_for

# chunk, block, num_warps, from many small programs to few large ones.
PUSHES = (
    (1, 1024, 4), (1, 2048, 4), (2, 1024, 4), (2, 1024, 8), (4, 512, 4), (4, 1024, 8), (8, 1024, 8), (8, 512, 8), (8, 2048, 16),
    (16, 512, 8), (16, 1024, 16), (32, 512, 16),
)  # fmt: skip
# Least bytes for each peer by copy engine: 12 us of a link, beside some 4 for each flag. Not measured. Two ranks take "lamport"
# up to limits of their own, which were.
PIPELINED_BYTES = 4 << 20
QUICK_PUSHES = ((1, 1024, 4), (4, 1024, 8), (16, 512, 8))


class ExchangeOp(MoeOp):
    """Rows by the ranks that need them ("push"), or all rows to or from all ranks.

    calls  type of the calls

    Calls have ``tokens``, ``choices``, ``width``, ``dtype`` and ``tp``, the ranks that hold slices of the same experts; sizes
    of a case: max_tokens, k, experts, H.
    """

    calls: ClassVar[type[tuple]]
    internal = ("over_nodes",)
    spans_nodes = True
    sizes = ("max_tokens", "k", "H")

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        tokens = (shape[0],) * world_size
        return super().case_of(shape, dtype, world_size, **{"tokens": tokens, **fields})

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, shape.hidden

    def call_of(self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO) -> Any:
        return self.calls(*check_sizes(self.name, self.sizes, sizes), dtype, design)

    def call_of_case(self, case: Case, machine: Machine) -> Any:
        tokens, k, _, H = case.sizes
        call = self.call_of((tokens, k, H), case.dtype, machine, case.design)
        return call._replace(tp=case.field("tp") or 1)

    def choose(self, call: Any, machine: Machine) -> Planned:
        if machine.nodes == 1:
            return super().choose(call, machine)
        # Where ranks of several nodes hold slices of an expert, each node has all of it.
        node = self.plan(call._replace(tp=min(call.tp, machine.node.world_size)), machine.node)
        return Planned(
            "over_nodes", OverNodes(node=node), f"{machine.nodes} nodes: a token crosses once for each of them"
        )

    def rule(self, call: Any, machine: Machine) -> tuple[str, str]:
        share = share_of_rows(call.choices, machine.world_size // call.tp)
        reason = f"a rank has an expert for {share:.2f} of another's tokens if all experts are chosen alike"
        if machine.world_size == 1 or not self.needs_nearly_all(call, machine):
            return "push", reason
        part = call.tokens * self.token_bytes(call)
        if part < PIPELINED_BYTES or 2 * capacity_for(machine.world_size * part) > machine.heap_bytes // 4:
            return self.for_all_rows(call), reason
        return "pipelined", f"{reason}; {part:,} bytes for each"

    @abstractmethod
    def for_all_rows(self, call: Any) -> str:
        """Name of the design for all rows that needs little of the heap."""

    def needs_nearly_all(self, call: Any, machine: Machine) -> bool:
        """True if a rank has an expert for more than three quarters of another's tokens.

        Then all are sent, in larger pieces.
        """
        return share_of_rows(call.choices, machine.world_size // call.tp) > 0.75

    def token_bytes(self, call: Any) -> int:
        """Bytes of a token's row as it is sent, and what goes with it."""
        return call.width * call.dtype.itemsize

    def default(self, name: str, call: Any, machine: Machine) -> Any:
        return self.designs[name]()

    def table_key(self, call: Any, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.tokens, call.choices, call.width), machine.world_size

    def tuned(self, call: Any, machine: Machine) -> Planned | None:
        # Rows of tables were measured with whole experts.
        found = super().tuned(call, machine) if call.tp == 1 else None
        # Choices decide how many rows a rank needs, the width which designs can send them.
        return found if found is None or found.row.shape[1:] == (call.choices, call.width) else None

    def space(self, call: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield self.default("pipelined", call, machine)
        pushes = QUICK_PUSHES if quick else PUSHES
        for chunk, block, num_warps in pushes:
            yield PushRows(chunk=chunk, block=block, num_warps=num_warps)

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from around(design)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        return int(rows_sent(sizes, world_size) * sizes[3] * dtype.itemsize)

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Rows of all ranks."""
        shape = MoeShape(*sizes)
        return shape.tokens * (shape.experts // shape.held) * shape.hidden * dtype.itemsize


def rows_sent(sizes: Sequence[int], world_size: int) -> float:
    """Rows that leave a rank if all experts are chosen alike: to each peer those that need its experts."""
    tokens, k, experts, _ = sizes
    others = experts - experts // world_size
    return (world_size - 1) * tokens * (1 - math.comb(others, k) / math.comb(experts, k))


def share_of_rows(choices: int, groups: int) -> float:
    """Share of a rank's tokens that another rank gets on average, where all experts are chosen alike.

    groups  of ranks with the same experts
    """
    return 1 - (1 - 1 / max(1, groups)) ** choices

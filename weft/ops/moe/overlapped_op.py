"""Base of the ops that overlap a grouped GEMM with an exchange of rows: AG-MoE and MoE-RS."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from weft.ops.case import BF16, FP16, FP32, Case
from weft.ops.knobs import around
from weft.ops.moe.arrival import of_all_ranks
from weft.ops.moe.exchange_op import rows_sent
from weft.ops.moe.grouped import GroupedTiles
from weft.ops.moe.grouped_op import GroupedOp
from weft.ops.moe.grouped_space import tiles
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.routing import Experts, Routing, Schedule
from weft.ops.registration import FLOATS
from weft.plan.planned import AUTO, Machine, Planned


class GatherArguments(NamedTuple):
    """Arguments of all_gather_grouped_matmul_silu_mul.

    total, first, count  this rank's experts; block: pairs of a tile of the schedule
    """

    x: torch.Tensor
    routing: Routing
    gate_up: torch.Tensor
    total: int
    first: int
    count: int
    max_tokens: int
    block: int
    fp8: bool
    team: str
    algorithm: str

    @property
    def experts(self) -> Experts:
        return Experts(self.total, self.first, self.count)


class ScatterArguments(NamedTuple):
    """Arguments of grouped_matmul_reduce_scatter. total, first, count: this rank's experts."""

    h: torch.Tensor
    down: torch.Tensor
    schedule: Schedule
    routing: Routing
    total: int
    first: int
    count: int
    tokens: int
    team: str
    algorithm: str
    shared: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    @property
    def experts(self) -> Experts:
        return Experts(self.total, self.first, self.count)


class OverlappedOp(MoeOp):
    """Op with a design whose GEMM runs under the exchange, and "sequential", of nested plans.

    Over several nodes ``ByNodes`` takes the place of the first.

    sizes of a case: max_tokens, k, experts, and two that ``gemm_sizes`` orders. Its field ``tokens`` has those of each rank;
    ``layout`` is "slices", or else experts are whole.

    gemm        the op of this rank's GEMM alone
    overlapped  name of the other design, which has ``tiles``
    alone       why one rank has nothing to overlap
    """

    gemm: ClassVar[GroupedOp]
    overlapped: ClassVar[str]
    alone: ClassVar[str]
    dtypes = FLOATS
    spans_nodes = True
    internal = ("over_nodes",)

    @staticmethod
    @abstractmethod
    def gemm_sizes(hidden: Any, features: Any) -> tuple[Any, Any]:
        """(N, K) of the GEMM, in which order a case has them too."""

    def choose(self, call: Any, machine: Machine) -> Planned:
        if machine.nodes > 1:
            return self.over_nodes(call, machine)
        if machine.world_size == 1:
            return Planned("sequential", self.default("sequential", call, machine), f"one rank: {self.alone}")
        return super().choose(call, machine)

    def over_nodes(self, call: Any, machine: Machine) -> Planned:
        """Plan of a team of several nodes."""
        if call.design == self.overlapped:
            raise ValueError(
                f"{self.name}: algorithm={call.design!r} is of one node, and the team has {machine.nodes}; "
                f"pass 'auto' or 'sequential'"
            )
        name, reason = self.rule(call, machine)
        if call.design == "sequential":
            name, reason = call.design, f"asked for design={call.design!r}"
        elif name == self.overlapped:
            name, reason = "over_nodes", f"{machine.nodes} nodes: a GEMM for each node's rows while others' cross"
        return Planned(name, self.default(name, call, machine), reason)

    def table_key(self, call: Any, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        gemm = call.gemm(machine)
        return self.name, (gemm.pairs, gemm.block, call.held, gemm.N, gemm.K), machine.world_size

    def tuned(self, call: Any, machine: Machine) -> Planned | None:
        found = super().tuned(call, machine)
        # Tiles of other rows take another shape, and other experts have other numbers of pairs.
        wanted = call.gemm(machine).block, call.held
        return found if found is None or found.row.shape[1:3] == wanted else None

    def from_row(self, row: Any, call: Any, machine: Machine) -> Any:
        # The row decides that the steps are sequential; each step has its own plan.
        sequential = row.design == "sequential"
        return self.default(row.design, call, machine) if sequential else super().from_row(row, call, machine)

    def config_of(self, design: Any) -> dict[str, Any]:
        return {} if isinstance(design, self.designs["sequential"]) else super().config_of(design)

    def space(self, call: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from (self.default(name, call, machine) for name in self.algorithms[1:])
        base = self.default(self.overlapped, call, machine)
        for one in tiles(base.tiles, call.gemm(machine), machine.caps, quick):
            yield replace(base, tiles=one)

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        if isinstance(design, self.designs[self.overlapped]):
            yield from (one for one in around(design) if not quick or one.tiles == design.tiles)

    # --- figures -----------------------------------------------------------------------------------------------------

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        return super().case_of(shape, dtype, world_size, **{"tokens": (shape[0],) * world_size, **fields})

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, *self.gemm_sizes(shape.hidden, shape.features)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        tokens, k, experts, *of_gemm = sizes
        # The order is its own inverse.
        hidden, _ = self.gemm_sizes(*of_gemm)
        return int(rows_sent((tokens, k, experts, hidden), world_size) * hidden * dtype.itemsize)

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Rows of all ranks."""
        shape = MoeShape(*sizes)
        return shape.tokens * (shape.experts // shape.held) * shape.hidden * dtype.itemsize

    def flops(self, sizes: Sequence[int]) -> int:
        return self.gemm.flops(of_all_ranks(sizes))

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        return self.gemm.memory_bytes(of_all_ranks(sizes), dtype)

    # --- cases -------------------------------------------------------------------------------------------------------

    def case(
        self, w: int, dtype: torch.dtype, T: int, k: int, E: int, hidden: int, features: int, design: Any, **fields: Any
    ) -> Case:
        sizes = (T, k, E, *self.gemm_sizes(hidden, features))
        return Case(op=self.name, world_size=w, dtype=dtype, sizes=sizes, design=design, fields=tuple(fields.items()))

    def cases(self) -> Iterator[Case]:
        case, overlapped = self.case, self.overlapped
        yield case(1, BF16, 5, 2, 4, 24, 16, AUTO, tokens=(5,))
        for w in (2, 3, 4, 8):
            tokens = (3, 0, 2, 1, 3, 3, 0, 2)[:w]
            yield case(w, BF16, 3, 2, 24 if w == 3 else 8, 24, 16, overlapped, tokens=tokens)
        for w in (2, 3):
            yield case(w, BF16, 6, 2, 4, 24, 16, overlapped, tokens=(2, 6, 0)[:w], layout="slices")
        for dtype in (FP16, FP32):
            yield case(2, dtype, 5, 2, 4, 24, 16, overlapped, tokens=(3, 5))
        yield case(2, BF16, 7, 2, 6, 24, 16, "sequential", tokens=(7, 4))
        yield case(2, BF16, 6, 2, 4, 24, 16, "sequential", tokens=(0, 6), layout="slices")
        yield case(2, BF16, 3, 1, 4, 24, 16, overlapped, tokens=(0, 0))
        yield case(2, BF16, 5, 2, 4, 24, 16, overlapped, tokens=(5, 5), skew="some")
        small = GroupedTiles(block_n=32, block_k=32, columns=32, per_sm=2, num_warps=4, num_stages=2)
        yield from self.cases_of_tiles(small)

    @abstractmethod
    def cases_of_tiles(self, small: GroupedTiles) -> Iterator[Case]:
        """Cases of the overlapped design with other fields, from small tiles."""

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for T in (128, 1000):
                for design in self.algorithms[1:]:
                    for layout in ("whole", "slices"):
                        tokens = (T, T - 1, 0, T)[:w]
                        yield self.case(w, BF16, T, 8, 64, 2048, 768, design, tokens=tokens, layout=layout)

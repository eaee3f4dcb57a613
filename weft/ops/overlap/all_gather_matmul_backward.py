"""Backward of all_gather_matmul: A is gathered under the GEMM of its gradient, or under that of B's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.arguments import did_you_mean
from weft.kernels.operands import can_describe, has_dense_rows
from weft.ops.gemm import cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import weight_gradient, weight_gradient_of
from weft.ops.knobs import design_type
from weft.ops.layout import Given
from weft.ops.op import Op, define
from weft.ops.overlap.all_gather_matmul import gathered_rows
from weft.ops.overlap.eager import submit
from weft.ops.overlap.gathered import begin_gather
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.ops.overlap.sequential import rows_overlap
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.team.team import find_team
from weft.transport.copy_channel import await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class InTurn:
    """GEMM-RS, an all-gather of A, then the GEMM of B's gradient. scatter: GEMM-RS's plan."""

    scatter: Planned


@design_type
class UnderScatter(InTurn):
    """Copy engines gather A while GEMM-RS computes A's gradient; then the GEMM of B's gradient."""


@design_type
class ByShards(InTurn):
    """A GEMM of B's gradient for each rank's rows of A as they arrive, added up in fp32; then GEMM-RS."""


class BackwardArguments(NamedTuple):
    """Gradient [M, N] of all_gather_matmul's result, the op's arguments, and the dtype of b's gradient."""

    grad: torch.Tensor
    a_shard: torch.Tensor
    b: torch.Tensor
    team: str
    own_first: bool
    dtype: torch.dtype


class AllGatherMatmulBackward(Op):
    """Gradients of all_gather_matmul: a_shard's [M/W, K], b's [N, K] in ``dtype``."""

    name = alias = "all_gather_matmul_backward"
    saves = ("grad", "a_shard", "b")
    designs = {"under_scatter": UnderScatter, "by_shards": ByShards, "in_turn": InTurn}

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
        """Design for the call of GEMM-RS that gives a_shard's gradient.

        ValueError for one asked for that does not exist, or that one rank or several nodes do not have.
        """
        scatter = MATMUL_REDUCE_SCATTER.plan(call._replace(design=AUTO), machine)
        if call.design != AUTO:
            return self._asked(call.design, scatter, machine)
        name = "in_turn"
        if machine.world_size == 1 or machine.nodes > 1:
            reason = "one rank, or several nodes: no copy engine reaches all ranks"
        elif not rows_overlap(call.M):
            reason = f"M={call.M}: too little to overlap"
        else:
            name, reason = "under_scatter", "copy engines gather A under the GEMM of its gradient"
        return Planned(name, self.designs[name](scatter=scatter), reason)

    def _asked(self, design: str, scatter: Planned, machine: Machine) -> Planned:
        if design not in self.designs:
            near = did_you_mean(design, self.designs)
            raise ValueError(f"{self.name}: design={design!r} is not one of {', '.join(self.designs)}{near}")
        if design != "in_turn" and (machine.world_size == 1 or machine.nodes > 1):
            raise ValueError(f"{self.name}: design={design!r} needs several ranks of one node; take in_turn")
        return Planned(design, self.designs[design](scatter=scatter), f"asked for design={design!r}")

    def forward(self, given: BackwardArguments) -> list[torch.Tensor]:
        team, results = find_team(given.team), self.fake(given)
        fields = given.own_first, given.dtype
        submit(self.name, team, (*given[:3], *results), fields, lambda: self.run(AUTO, team, given, results))
        return results

    def run(
        self, design: str, team: Team, given: BackwardArguments, into: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Gradients by the design of this name, the same on all ranks: ``into``, or new tensors."""
        results, grad, own_first = into or self.fake(given), given.grad, given.own_first
        (M, N), K, by_columns = grad.shape, given.b.shape[1], given.b.t()
        dense = has_dense_rows(by_columns)
        call = GemmCall(M, K, N, grad.dtype, can_describe(grad, by_columns), own_first, design=design, dense=dense)
        planned = self.plan(call, machine_of(team)).design
        if isinstance(planned, UnderScatter):
            _run_under_scatter(planned, team, given, results)
        elif isinstance(planned, ByShards):
            _run_by_shards(planned, team, given, results)
        else:
            of_a, of_b = results
            MATMUL_REDUCE_SCATTER.run(planned.scatter.design, team, grad, by_columns, own_first, of_a)
            a = gathered_rows(given.a_shard, team.name, own_first)
            weight_gradient_of(grad, a, given.dtype, of_b)
        return results

    def fake(self, given: BackwardArguments) -> list[torch.Tensor]:
        return [given.a_shard.new_empty(given.a_shard.shape), given.b.new_empty(given.b.shape, dtype=given.dtype)]

    def backward(self, given: Given, ways: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        grad, a_shard, b, where = given.grad, given.a_shard, given.b, (given.team, given.own_first)
        of_a, of_b = ways[0], ways[1].to(b.dtype)
        of_grad, several = torch.ops.weft.all_gather_matmul.default(of_a, b, *where), torch.ops.weft.all_gather_matmul
        of_grad = of_grad + several.default(a_shard, of_b, *where)
        of_shard = torch.ops.weft.matmul_reduce_scatter.default(grad, of_b.t(), *where)
        of_rows = weight_gradient(grad, gathered_rows(of_a, *where), b)
        return {"grad": of_grad, "a_shard": of_shard, "b": of_rows}


def _run_under_scatter(
    design: UnderScatter, team: Team, given: BackwardArguments, results: Sequence[torch.Tensor]
) -> None:
    """Run the two GEMMs, the gather beside the first.

    signals  copy engine of rank s, after its shard: as in all_gather_matmul's pipelined design, whose channel this is
    waits    wait_kernel, between the GEMMs: the shards of all peers
    reuse    of a half of A_full: CopyChannel; B's gradient is computed before the next call begins

    copy  | s1 | s2 | s3 | o1 | o2 | o3 |                  shards that arrive, then GEMM-RS's partial results
    gemm  | o1 | o2 | o3 | own | of b |                    rank 0 of 4: A's gradient by owner, then B's
    """
    world, shard, (of_a, of_b) = team.size, given.a_shard.contiguous(), results
    gathered, landed, own = begin_gather(team, shard, [slice(0, len(shard))], given.own_first)
    gathered.data.view(world, *shard.shape)[own].copy_(shard.detach())
    MATMUL_REDUCE_SCATTER.run(design.scatter.design, team, given.grad, given.b.t(), given.own_first, of_a)
    await_chunk(landed, 0, (own + 1) % world, world - 1)
    weight_gradient_of(given.grad, gathered.data, of_b.dtype, of_b)
    team.copy_engine.join()


def _run_by_shards(design: ByShards, team: Team, given: BackwardArguments, results: Sequence[torch.Tensor]) -> None:
    """Run a GEMM of B's gradient for each rank's rows, as they arrive, then GEMM-RS.

    B's gradient is a sum over the rows of A: each shard gives a summand of all of it, which cuBLAS adds in fp32.

    signals  copy engine of rank s, after its shard: as in all_gather_matmul's pipelined design, whose channel this is
    waits    wait_kernel, before the GEMM of a peer's shard: this shard
    reuse    of a half of A_full: CopyChannel; its last GEMM is before GEMM-RS

    copy  | s1 | s2 | s3 |      | o1 | o2 | o3 |           shards that arrive, then GEMM-RS's partial results
    gemm  | s0 | s1 | s2 | s3 | o1 | o2 | o3 | own |       rank 0 of 4: summands of B's gradient, then A's by owner
    """
    world, shard, (of_a, of_b) = team.size, given.a_shard.contiguous(), results
    gathered, landed, own = begin_gather(team, shard, [slice(0, len(shard))], given.own_first)
    panels, of_panels = gathered.data.view(world, *shard.shape), given.grad.view(world, len(shard), -1)
    total = cublas.widened(of_panels[own].t(), shard.t(), torch.float32)
    for step in range(1, world):
        place = (own + step) % world
        await_chunk(landed, 0, place)
        cublas.widened(of_panels[place].t(), panels[place].t(), torch.float32, total)
    of_b.copy_(total)
    MATMUL_REDUCE_SCATTER.run(design.scatter.design, team, given.grad, given.b.t(), given.own_first, of_a)
    team.copy_engine.join()


ALL_GATHER_MATMUL_BACKWARD = define(AllGatherMatmulBackward())

"""Mixture of experts as one function for ranks with different tokens, as in data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.arguments import check_int, quoted
from weft.costs.exchanges import Rows
from weft.kernels.fp8 import E4M3, Fp8
from weft.ops.moe.moe_dispatch import MOE_DISPATCH, DispatchCall
from weft.parallel.quantized import rows_between
from weft.plan.planned import Machine, machine_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Share of another rank's rows up to which they are sent alone: more rows travel under the GEMMs instead.
MOST_SHARE = 0.75


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor | Fp8,
    down: Tensor | Fp8,
    team: Team,
    *,
    k: int,
    max_tokens: int,
    experts: str | tuple[int, int] = "whole",
    **gating: object,
) -> Tensor:
    """y[t] = sum over t's k experts e of weight[t, e] * mlp[e](x[t]). Collective.

    with mlp[e](x) = down[e] @ (silu(gate[e] @ x) * (up[e] @ x))

    x           [T, H], fp16, bf16 or fp32, this rank's tokens; T may differ by rank and be 0
    router      [E, H], the same on all ranks
    gate_up, down
                [held, 2 N, H] and [held, H, N]: this rank's experts, N of their features; of gate_up gate's N rows first.
                Or both ``Fp8``, as of ``weft.ops.grouped_matmul``, with x of 16 bits: rows that are sent in fp8 stay so through
                both GEMMs, where scales are of blocks; no gradients
    max_tokens  of any rank; the same on all ranks
    experts     layout: "whole", E / W on each rank; "slices", 1/W of the features of all; (ep, tp), E / ep in each of ep groups
                of tp neighbouring ranks, of which a rank has slice rank % tp of the features
    gating      of ``weft.ops.route``

    Where ``moe_dispatch`` would send each row to the ranks that need it alone, by its plan, and a rank needs at most MOST_SHARE
    of another's, it does, and ``moe_combine`` sends sums back. Else all rows go to all ranks by
    ``all_gather_grouped_matmul_silu_mul``, and sums back by ``grouped_matmul_reduce_scatter``, both under the GEMMs. Nothing is
    dropped, the host waits for nothing, and the bits are the same from run to run. Gradients of x and all weights. ValueError
    for arguments that do not fit.
    """
    layouts = {"whole": (team.size, 1), "slices": (1, team.size)}
    groups = layouts.get(experts) if isinstance(experts, str) else experts
    if groups not in [(team.size // tp, tp) for tp in range(1, team.size + 1) if team.size % tp == 0]:
        raise ValueError(
            f"moe: experts={quoted(experts)} is neither 'whole' nor 'slices' nor (ep, tp) with ep * tp = {team.size} ranks"
        )
    ep, tp = groups
    held = ops.Experts.grouped(len(router), team.rank, ep, tp)
    if gate_up.shape[0] != held.count:
        raise ValueError(
            f"moe: gate_up has {gate_up.shape[0]} experts; {experts} gives each of {team.size} ranks {held.count}"
        )
    check_int("moe: max_tokens", max_tokens, max(1, len(x)))
    routing = ops.route(x @ router.T, k, **gating)  # a GEMM by torch, which takes no rows too; route
    format = rows_between(gate_up, down, x.dtype)
    if not _sends_alone(team.name, int(max_tokens), int(k), int(x.shape[1]), x.dtype, tp):
        h, schedule, dispatched = ops.all_gather_grouped_matmul_silu_mul(
            x, routing, gate_up, held, team, max_tokens=max_tokens, fp8=format
        )
        return ops.grouped_matmul_reduce_scatter(h, down, schedule, dispatched, len(x), team)
    blocks = isinstance(gate_up, Fp8) and gate_up.is_grouped and team.rail is None
    dispatched = ops.moe_dispatch(x, routing, team, experts=held, max_tokens=max_tokens, dtype=E4M3 if blocks else None)
    schedule = ops.moe_schedule(dispatched.routing.ids, held, start=team.rank * max_tokens)
    h = ops.grouped_matmul_silu_mul(dispatched.rows, gate_up, schedule, scales=dispatched.scales, fp8=format)
    y = ops.grouped_matmul(h, down, schedule)
    return ops.moe_combine(y, dispatched, len(x), team)


@torch.compiler.assume_constant_result
def _sends_alone(team: str, max_tokens: int, k: int, width: int, dtype: torch.dtype, tp: int) -> bool:
    """``sends_needed_alone``, decided as torch.compile traces: it cannot trace a plan or a heap."""
    return sends_needed_alone(DispatchCall(max_tokens, k, width, dtype, tp=tp), machine_of(find_team(team)))


def sends_needed_alone(call: DispatchCall, machine: Machine) -> bool:
    """True if in a node a row goes to the ranks with its experts; False if all rows go to all."""
    node = machine.node
    rows = Rows(call.tokens, call.choices, call.width, call.dtype.itemsize, node.world_size, call.tp)
    few = node.world_size == 1 or rows.share <= MOST_SHARE
    return few and MOE_DISPATCH.plan(call, node).name == "push"

"""Mixture of experts as one function, of tokens on their own ranks, as behind data-parallel attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from weft import ops
from weft.arguments import check_int, quoted
from weft.ops.moe.moe_dispatch import MOE_DISPATCH, DispatchCall
from weft.plan.planned import Machine, machine_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    team: Team,
    *,
    k: int,
    max_tokens: int,
    experts: str | tuple[int, int] = "whole",
    **gating: Any,
) -> Tensor:
    """y[t] = sum over t's k experts e of weight[t, e] * mlp[e](x[t]). Collective.

    with mlp[e](x) = down[e] @ (silu(gate[e] @ x) * (up[e] @ x))

    x           [T, H], fp16, bf16 or fp32, this rank's tokens; T may differ by rank and be 0
    router      [E, H], the same on all ranks
    gate_up, down
                [held, 2 N, H] and [held, H, N]: this rank's experts, N of their features; of gate_up gate's N rows first
    max_tokens  of any rank; the same on all ranks
    experts     layout of them: "whole", E / W on each rank; "slices", 1/W of the features of all; (ep, tp), of ep groups of tp
                neighbouring ranks each has E / ep, a rank slice rank % tp of their features
    gating      of ``weft.ops.route``

    Where ``moe_dispatch`` would send each row to the ranks that need it alone, by its plan, it does, and ``moe_combine`` sends
    sums back. Else all rows go to all ranks by ``all_gather_grouped_matmul_silu_mul``, and sums back by
    ``grouped_matmul_reduce_scatter``, both under the GEMMs. Nothing is dropped, the host waits for nothing, and the bits are
    the same from run to run. Gradients of x and all weights. ValueError for arguments that do not fit.
    """
    layouts = {"whole": (team.size, 1), "slices": (1, team.size)}
    groups = layouts.get(experts) if isinstance(experts, str) else experts
    if groups not in [(team.size // tp, tp) for tp in range(1, team.size + 1) if team.size % tp == 0]:
        raise ValueError(
            f"moe: experts={quoted(experts)} is neither 'whole' nor 'slices' nor (ep, tp) with ep * tp = {team.size} ranks"
        )
    ep, tp = groups
    mine = ops.Experts.grouped(len(router), team.rank, ep, tp)
    if len(gate_up) != mine.count:
        raise ValueError(
            f"moe: gate_up has {len(gate_up)} experts; {experts} gives each of {team.size} ranks {mine.count}"
        )
    check_int("moe: max_tokens", max_tokens, max(1, len(x)))
    routing = ops.route(x @ router.T, k, **gating)  # a GEMM by torch, which takes no rows too; route
    if not sends_needed_alone(DispatchCall(max_tokens, k, x.shape[1], x.dtype, tp=tp), machine_of(team)):
        h, schedule, found = ops.all_gather_grouped_matmul_silu_mul(
            x, routing, gate_up, mine, team, max_tokens=max_tokens
        )
        return ops.grouped_matmul_reduce_scatter(h, down, schedule, found, len(x), team)
    found = ops.moe_dispatch(x, routing, team, experts=mine, max_tokens=max_tokens)
    schedule = ops.moe_schedule(found.routing.ids, mine, start=team.rank * max_tokens)
    h = ops.grouped_matmul_silu_mul(found.rows, gate_up, schedule)
    y = ops.grouped_matmul(h, down, schedule)
    return ops.moe_combine(y, found, len(x), team)


def sends_needed_alone(call: DispatchCall, machine: Machine) -> bool:
    """True if in a node a row goes to the ranks with its experts; False if all rows go to all."""
    return MOE_DISPATCH.plan(call, machine.node).name == "push"

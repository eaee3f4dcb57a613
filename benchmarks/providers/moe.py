"""Baselines of the ops of a mixture of experts on one rank: torch and cuBLAS, as frameworks use them.

What a framework knows before the timed call is made beforehand here: the order of the pairs for a grouped GEMM, and in
moe_over_ranks.py the counts of a dispatch for the combine that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from weft.bench.harness.provider import Prepared, Provider
from weft.bench.ops.buffers import group_of
from weft.bench.ops.normed import copy_into
from weft.bench.ops.problem import OpProblem
from weft.ops.gemm.cublas import matmul
from weft.ops.moe.choices import experts_of
from weft.ops.moe.routing import Experts


class Order(NamedTuple):
    """Pairs expert by expert, tokens ascending.

    pairs  int64 [n]: of the rank's experts; ends: int32 [experts], where each expert's end
    """

    pairs: torch.Tensor
    ends: torch.Tensor


def sorted_pairs(ids: torch.Tensor, experts: Experts) -> Order:
    """All pairs, those of other ranks' experts last, by torch's sort."""
    local = torch.where(experts.chosen(ids), ids - experts.first, experts.count).flatten()
    found, pairs = local.sort(stable=True)
    ends = torch.searchsorted(found, torch.arange(experts.count, device=ids.device), right=True)
    return Order(pairs, ends.int())


def written(problem: OpProblem, buffers: list[torch.Tensor]) -> Callable[[int], None]:
    """``Prepared.prepare`` for copies of the first tensors of the sets."""
    return lambda number: copy_into(buffers[number], problem.sets[number][0])


def mine(problem: OpProblem) -> Experts:
    """Experts of this rank."""
    return experts_of(problem.case, problem.case.sizes[2], problem.team.rank)


# --- route, schedule, sum ------------------------------------------------------------------------------------------------


def route(problem: OpProblem) -> Prepared:
    """Softmax of the k largest logits: what softmax, topk and renormalising give, in two kernels."""
    group_of(problem)
    k = problem.case.sizes[2]

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        [logits] = problem.sets[number]
        best, ids = logits.topk(k, dim=-1)
        return ids, best.softmax(-1)

    def compare(out: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        # Of equal logits any may be chosen.
        [logits] = problem.sets[0]
        found, best = logits.gather(1, out[0]), logits.topk(k, dim=-1).values
        return (found, out[1]), (best.float(), problem.answer().topk(k, dim=-1).values)

    return Prepared(run=run, compare=compare)


def schedule(problem: OpProblem) -> Prepared:
    """Order and ends of the pairs, as torch's grouped GEMM needs them; no table of tiles."""
    group_of(problem)
    experts = mine(problem)

    def compare(out: Order) -> tuple[Any, Any]:
        pairs, counts, *_ = problem.answer()
        return (out.pairs[: int(out.ends[-1])].int(), out.ends.diff(prepend=out.ends[:1] * 0)), (
            pairs[pairs >= 0],
            counts,
        )

    return Prepared(run=lambda number: sorted_pairs(problem.sets[number][0], experts), compare=compare)


def routed(problem: OpProblem) -> Prepared:
    """The router's GEMM, softmax of the k largest logits, and order and ends of the pairs."""
    group_of(problem)
    experts, k = mine(problem), problem.case.sizes[3]

    def run(number: int) -> tuple[Order, torch.Tensor]:
        x, router, *_ = problem.sets[number]
        best, ids = F.linear(x, router).topk(k, dim=-1)
        return sorted_pairs(ids, experts), best.softmax(-1)

    # Of equal logits any may be chosen, so that pairs differ.
    return Prepared(run=run, compare=lambda out: (out[1], problem.answer()[0].topk(k, dim=-1).values))


def weighted_sum(y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Weighted results of the rank's experts, added up by token."""
    rows = torch.where(experts.chosen(ids)[..., None], y.view(*ids.shape, -1).float(), 0.0)
    return (rows * weights.float()[..., None]).sum(1).to(y.dtype)


def summed(problem: OpProblem) -> Prepared:
    """One kernel of torch.compile."""
    group_of(problem)
    add, experts = torch.compile(weighted_sum, dynamic=False), mine(problem)
    return Prepared(run=lambda number: add(*problem.sets[number], experts))


# --- grouped GEMMs -------------------------------------------------------------------------------------------------------


def orders(problem: OpProblem) -> list[Order]:
    """Order of each set, cut to the rank's own pairs, whose number the host knows."""
    found = [sorted_pairs(ids, mine(problem)) for ids, *_ in problem.sets]
    return [Order(order.pairs[: int(order.ends[-1])], order.ends) for order in found]


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped(problem: OpProblem, compiled: bool = False) -> Prepared:
    """torch's grouped GEMM, index_select before it and silu and product behind it where the op has them.

    Without gathering rows stay in the order of the schedule, where weft stores them by pair.
    """
    group_of(problem)
    gather, gated, k = problem.case.field("gather") is not False, problem.op.gated, problem.case.sizes[1]
    found = orders(problem)
    tokens = [order.pairs // k for order in found]
    finish = torch.compile(silu_mul, dynamic=True) if compiled else silu_mul

    def run(number: int) -> torch.Tensor:
        _, x, weight = problem.sets[number]
        order = found[number]
        rows = x.index_select(0, tokens[number]) if gather else x[: len(order.pairs)]
        out = torch._grouped_mm(rows, weight.transpose(1, 2), offs=order.ends)
        return finish(out) if gated else out

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        return out, problem.answer() if gather else problem.answer()[found[0].pairs]

    for number in range(len(problem.sets) if compiled else 0):
        run(number)  # sets have other numbers of pairs; a graph must not compile
    # torch.compile keeps silu in fp32, but gate, up and their product are rounded.
    return Prepared(run=run, compare=compare, roundings=1 if not gated else 3 if compiled else 4)


def dense(problem: OpProblem, all_weights: bool) -> Prepared:
    """One GEMM by cuBLAS with as many operations.

    all_weights  of the mean number of rows with the weights of all active experts, so that it reads as many bytes too
    """
    group_of(problem)
    operands = []
    for (_, x, weight), order in zip(problem.sets, orders(problem), strict=True):
        counts = order.ends.diff(prepend=order.ends[:1] * 0)
        active = int((counts > 0).sum()) if all_weights else 1
        rows = max(1, round(len(order.pairs) / max(1, active)))
        a = x.repeat(-(-rows // len(x)), 1)[:rows]
        operands.append((a, weight[:active].reshape(-1, weight.shape[2])))

    def run(number: int) -> torch.Tensor:
        a, b = operands[number]
        return matmul(a, b, a.new_empty((len(a), len(b))))

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        a, b = operands[0]
        return out, a.float() @ b.float().T

    return Prepared(run=run, compare=compare)


def _provider(op: str, name: str, make: Callable[[OpProblem], Prepared], role: str = "other") -> Provider:
    return Provider(name=name, ops=(op,), role=role, make=make)


GROUPED = ("grouped-gemm-silu", "grouped-gemm")
PROVIDERS = (
    _provider("route", "torch", route),
    _provider("moe-schedule", "torch", schedule),
    _provider("moe-route", "torch", routed),
    _provider("moe-sum", "torch.compile", summed),
    *(_provider(op, "torch.grouped", grouped) for op in GROUPED),
    _provider("grouped-gemm-silu", "torch.grouped+compile", partial(grouped, compiled=True)),
    *(
        _provider(op, name, partial(dense, all_weights=name == "cublas.weights"), role="ceiling")
        for op in GROUPED
        for name in ("cublas.dense", "cublas.weights")
    ),
)

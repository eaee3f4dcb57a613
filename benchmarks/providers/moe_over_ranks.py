"""Baselines of the ops of a mixture of experts that move rows between ranks: NCCL and torch, as frameworks use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.ops.buffers import group_of
from weft.bench.ops.normed import add_norm
from weft.bench.ops.problem import OpProblem
from weft.kernels.fp8 import by_torch
from weft.ops.moe.grouped_matmul import grouped_matmul, grouped_matmul_silu_mul
from weft.ops.moe.moe_schedule import moe_schedule
from weft.ops.moe.routing import Experts

from .moe import Order, mine, silu_mul, sorted_pairs, weighted_sum, written

# torch's exchange of rows by expert refuses more experts of a rank.
MOST_EXPERTS = 16

# --- dispatch and combine ------------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """Pairs of one set by the rank of their expert, then by expert, tokens ascending.

    sent      int64 [n]: this rank's; to: their number by rank
    arriving  int64 [m]: pairs of all ranks that come here, numbered as in the whole ids, by rank; of: their number by rank
    """

    sent: torch.Tensor
    to: list[int]
    arriving: torch.Tensor
    of: list[int]


def exchange_of(ids: torch.Tensor, problem: OpProblem) -> Exchange:
    """``ids`` [W * T, k] of all ranks."""
    W, me, total = problem.team.size, problem.team.rank, problem.case.sizes[2]
    by_rank = ids.view(W, -1, ids.shape[1])
    choices = by_rank[0].numel()

    def pairs(source: int, target: int) -> torch.Tensor:
        order = sorted_pairs(by_rank[source], Experts.whole(total, target, W))
        return order.pairs[: int(order.ends[-1])]

    to, of = [pairs(me, rank) for rank in range(W)], [pairs(rank, me) for rank in range(W)]
    arriving = torch.cat([order + rank * choices for rank, order in enumerate(of)])
    return Exchange(torch.cat(to), list(map(len, to)), arriving, list(map(len, of)))


def all_ids(problem: OpProblem, number: int) -> torch.Tensor:
    """Ids of all ranks' tokens in a set of a dispatch."""
    return torch.cat([problem.inputs(rank, number)[1] for rank in range(problem.team.size)])


def nccl_dispatch(problem: OpProblem, counts_known: bool) -> Prepared:
    """A row for each choice, expert by expert, by all_to_all_single.

    counts_known  without the sort and the exchange of counts, for which the host waits
    """
    group, (_, k, total, H) = group_of(problem), problem.case.sizes
    exchanges = [exchange_of(all_ids(problem, number), problem) for number in range(len(problem.sets))]
    buffers, W = [x.clone() for x, *_ in problem.sets], problem.team.size
    tokens = [one.sent // k for one in exchanges]

    def known(number: int) -> torch.Tensor:
        x, one = buffers[number], exchanges[number]
        out = x.new_empty((len(one.arriving), H))
        dist.all_to_all_single(out, x.index_select(0, tokens[number]), one.of, one.to, group=group)
        return out

    def run(number: int) -> torch.Tensor:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Unavailable("the host waits for the counts")
        x, ids = buffers[number], problem.sets[number][1]
        order = sorted_pairs(ids, Experts.slices(total))
        sent = order.ends.diff(prepend=order.ends[:1] * 0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        both = torch.stack((sent, received)).view(2, W, -1).sum(-1).tolist()
        out = x.new_empty((sum(both[1]), H))
        dist.all_to_all_single(out, x.index_select(0, order.pairs // k), both[1], both[0], group=group)
        return out

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        return out, problem.answer()[0][exchanges[0].arriving // k]

    return Prepared(
        run=known if counts_known else run,
        prepare=written(problem, buffers),
        compare=compare,
    )


def nccl_gather(problem: OpProblem) -> Prepared:
    """All rows, ids and weights to all ranks; for rows in fp8, made by torch.compile, their scales too.

    A compiled division errs by a unit in the last place, of scales and so of some bytes: such ones count as right.
    """
    group, W = group_of(problem), problem.team.size
    buffers, fp8 = [x.clone() for x, *_ in problem.sets], problem.case.field("fp8")
    quantize = torch.compile(by_torch, dynamic=False)

    def run(number: int) -> tuple[torch.Tensor, ...]:
        mine = buffers[number], *problem.sets[number][1:]
        if fp8:
            rows, scales = quantize(mine[0])
            mine = rows.view(torch.uint8), *mine[1:], scales
        out = tuple(x.new_empty((W * len(x), x.shape[1])) for x in mine)
        for whole, x in zip(out, mine, strict=True):
            dist.all_gather_into_tensor(whole, x, group=group)
        return out

    def compare(out: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        expected = problem.answer()
        found = problem.op.defined(problem.case, problem.team, out, *problem.sets[0])
        return tuple(map(within_a_unit, found, expected)), expected

    return Prepared(run=run, prepare=written(problem, buffers), compare=compare if fp8 else None)


def within_a_unit(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``actual``, with ``expected`` where it is at most a unit in the last place from it.

    Of bytes, which are e4m3, and of fp32; integers have no such unit.
    """
    if expected.dtype == torch.uint8:
        # Sign and magnitude: neighbours differ by 1, but for those of two signs.
        near = (actual.short() - expected.short()).abs() <= 1
    elif expected.dtype == torch.float32:
        near = (actual.view(torch.int32).long() - expected.view(torch.int32)).abs() <= 1
    else:
        return actual
    return torch.where(near, expected, actual)


def nccl_combine(problem: OpProblem) -> Prepared:
    """A row for each choice back to its rank by all_to_all_single, with known counts; then the sum."""
    group, (T, _, total, H) = group_of(problem), problem.case.sizes
    buffers, me = [y.clone() for y, *_ in problem.sets], problem.team.rank
    exchanges = [exchange_of(ids, problem) for _, ids, _ in problem.sets]
    # Place of each of this rank's pairs among the rows that come back.
    places = [one.sent.argsort() for one in exchanges]
    add = torch.compile(weighted_sum, dynamic=False)
    everything = Experts.slices(total)

    def run(number: int) -> torch.Tensor:
        y, one, own = buffers[number], exchanges[number], slice(me * T, (me + 1) * T)
        _, ids, weights = problem.sets[number]
        back = y.new_empty((len(one.sent), H))
        dist.all_to_all_single(back, y.index_select(0, one.arriving), one.to, one.of, group=group)
        return add(back.index_select(0, places[number]), ids[own], weights[own], everything)

    return Prepared(run=run, prepare=written(problem, buffers))


def nccl_reduce_scatter(problem: OpProblem) -> Prepared:
    """Each rank's choices weighted and added up, then a reduce-scatter of all tokens."""
    group, W = group_of(problem), problem.team.size
    buffers, experts = [y.clone() for y, *_ in problem.sets], Experts.whole(problem.case.sizes[2], problem.team.rank, W)
    add = torch.compile(weighted_sum, dynamic=False)

    def run(number: int) -> torch.Tensor:
        partial_sums = add(buffers[number], *problem.sets[number][1:], experts)
        out = partial_sums.new_empty((len(partial_sums) // W, partial_sums.shape[1]))
        dist.reduce_scatter_tensor(out, partial_sums, group=group)
        return out

    return Prepared(run=run, prepare=written(problem, buffers))


def grouped_all_reduce(problem: OpProblem) -> Prepared:
    """torch's grouped GEMM, NCCL's all-reduce, and by torch.compile the weighted sum and the norm."""
    group, experts = group_of(problem), mine(problem)
    add, norm = (torch.compile(function, dynamic=False) for function in (weighted_sum, add_norm))
    found = [sorted_pairs(ids, experts) for _, _, ids, *_ in problem.sets]
    pairs = [order.pairs[: int(order.ends[-1])] for order in found]
    buffers = [x.clone() for x, *_ in problem.sets]

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, weight, ids, weights, residual, scale = problem.sets[number]
        x, own = buffers[number], pairs[number]
        y = x.new_empty((len(x), weight.shape[1]))
        y[own] = torch._grouped_mm(x[: len(own)], weight.transpose(1, 2), offs=found[number].ends)
        summand = add(y, ids, weights, experts)
        dist.all_reduce(summand, group=group)
        return norm(summand, residual, scale)

    return Prepared(run=run, prepare=written(problem, buffers))


# --- AG-MoE and MoE-RS ---------------------------------------------------------------------------------------------------


def gathered_orders(problem: OpProblem) -> list[Order]:
    """Order of all ranks' pairs in each set: each expert's from this rank's tokens on, as the op has them."""
    (T, k, *_), me, W = problem.case.sizes, problem.team.rank, problem.team.size
    found = []
    for number in range(len(problem.sets)):
        order = sorted_pairs(all_ids(problem, number).roll(-me * T, 0), mine(problem))
        pairs = (order.pairs[: int(order.ends[-1])] + me * T * k) % (W * T * k)
        found.append(Order(pairs, order.ends))
    return found


def nccl_gather_grouped(problem: OpProblem) -> Prepared:
    """All rows by all_gather_into_tensor, index_select, torch's grouped GEMM, silu and product.

    The choices of all ranks, and so the order of the pairs, are known before.
    """
    group, W, k = group_of(problem), problem.team.size, problem.case.sizes[1]
    orders = gathered_orders(problem)
    tokens = [order.pairs // k for order in orders]
    finish = torch.compile(silu_mul, dynamic=True)  # sets have other numbers of pairs; a graph must not compile

    def run(number: int) -> torch.Tensor:
        x, _, _, gate_up = problem.sets[number]
        rows = x.new_empty((W * len(x), x.shape[1]))
        dist.all_gather_into_tensor(rows, x, group=group)
        rows = rows.index_select(0, tokens[number])
        return finish(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=orders[number].ends))

    for number in range(len(problem.sets)):
        run(number)
    # torch.compile keeps silu in fp32, but gate, up and their product are rounded.
    return Prepared(run=run, compare=lambda out: (out, problem.answer()[0][: len(out)]), roundings=3)


def first_gemm_alone(problem: OpProblem) -> Prepared:
    """weft's own grouped GEMM of all ranks' rows; they and their schedule are there before."""
    T, _, total, *_ = problem.case.sizes
    W, me = problem.team.size, problem.team.rank
    operands = []
    for number in range(len(problem.sets)):
        rows = torch.cat([problem.inputs(rank, number)[0] for rank in range(W)])
        schedule = moe_schedule(all_ids(problem, number), Experts.whole(total, me, W), start=me * T)
        rows, scales = by_torch(rows) if problem.case.field("fp8") else (rows, None)
        operands.append(((rows, problem.sets[number][3], schedule), scales))

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        expected, counts = problem.answer()
        computed = int(counts.sum())
        return out[:computed], expected[:computed]

    def run(number: int) -> torch.Tensor:
        given, scales = operands[number]
        return grouped_matmul_silu_mul(*given, scales=scales)

    return Prepared(run=run, compare=compare)


def scattered_orders(problem: OpProblem) -> list[Order]:
    """Order of the pairs of h in each set."""
    (T, k, *_), me, W = problem.case.sizes, problem.team.rank, problem.team.size
    found = []
    for _, _, ids, _ in problem.sets:
        order = sorted_pairs(ids.roll(-me * T, 0), mine(problem))
        found.append(Order((order.pairs[: int(order.ends[-1])] + me * T * k) % (W * T * k), order.ends))
    return found


def nccl_grouped_scatter(problem: OpProblem) -> Prepared:
    """torch's grouped GEMM, rows put in the pairs' order and added up, reduce_scatter_tensor."""
    group, W = group_of(problem), problem.team.size
    orders, experts = scattered_orders(problem), mine(problem)
    add = torch.compile(weighted_sum, dynamic=False)

    def run(number: int) -> torch.Tensor:
        h, down, ids, weights = problem.sets[number]
        order, y = orders[number], h.new_empty((ids.numel(), down.shape[1]))
        y.index_copy_(0, order.pairs, torch._grouped_mm(h[: len(order.pairs)], down.transpose(1, 2), offs=order.ends))
        sums = add(y, ids, weights, experts)
        out = sums.new_empty((len(sums) // W, sums.shape[1]))
        dist.reduce_scatter_tensor(out, sums, group=group)
        return out

    return Prepared(run=run)


def second_gemm_alone(problem: OpProblem) -> Prepared:
    """weft's own grouped GEMM, without the sums."""
    (h, down, _, _), [order, *_] = problem.sets[0], scattered_orders(problem)

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        counts = order.ends.diff(prepend=order.ends[:1] * 0).tolist()
        rows = h[: len(order.pairs)].double().split(counts)
        wanted = [row @ weight.double().T for row, weight in zip(rows, down, strict=True)]
        return out[order.pairs], torch.cat(wanted)

    return Prepared(run=lambda number: grouped_matmul(*problem.arguments[number][:3]), compare=compare)


def vdev_2d(problem: OpProblem) -> Prepared:
    """torch.ops.symm_mem.all_to_all_vdev_2d, where it runs: nowhere that this harness does."""
    group_of(problem)
    held = problem.case.field("held")
    if held > MOST_EXPERTS:
        raise Unavailable(f"takes at most {MOST_EXPERTS} experts a rank, and there are {held}")
    raise Unavailable("needs torch's NVSHMEM backend, which cannot be had beside the CUDA one that other baselines use")


def _provider(op: str, name: str, make: Callable[[OpProblem], Prepared], role: str = "other") -> Provider:
    return Provider(name=name, ops=(op,), role=role, make=make)


PROVIDERS = (
    _provider("moe-dispatch", "nccl", partial(nccl_dispatch, counts_known=False)),
    _provider("moe-dispatch", "nccl.counts_known", partial(nccl_dispatch, counts_known=True), role="ceiling"),
    _provider("moe-dispatch", "nccl.all_gather", nccl_gather),
    _provider("moe-dispatch+fp8", "nccl.all_gather", nccl_gather),
    _provider("moe-combine", "nccl", nccl_combine),
    _provider("moe-combine", "nccl.reduce_scatter", nccl_reduce_scatter),
    _provider("moe-ar-rms-norm", "torch.grouped+nccl", grouped_all_reduce),
    _provider("ag-moe", "nccl+torch.grouped", nccl_gather_grouped),
    _provider("ag-moe", "weft.gemm_alone", first_gemm_alone, role="ceiling"),
    _provider("ag-moe+fp8", "weft.gemm_alone", first_gemm_alone, role="ceiling"),
    _provider("moe-rs", "torch.grouped+nccl", nccl_grouped_scatter),
    _provider("moe-rs", "weft.gemm_alone", second_gemm_alone, role="ceiling"),
    *(_provider(op, "torch.all_to_all_vdev_2d", vdev_2d) for op in ("moe-dispatch", "moe-combine")),
)

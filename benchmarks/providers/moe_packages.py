"""Ops of a mixture of experts by packages that may be installed beside weft.

Dispatch and combine of DeepEP and of pplx-kernels, which are built from source (benchmarks/packages.sh), and grouped GEMMs of
Liger-Kernel, which is on PyPI (docs/moe-designs.md). weft does not depend on them, and they are not in its lists.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.ops.buffers import group_of
from weft.bench.ops.problem import OpProblem
from weft.kernels.fp8 import E4M3, quantize_rows, scales_of
from weft.runtime.arithmetic import cdiv

from .moe import Order, mine, orders, sorted_pairs, weighted_sum, written
from .moe_over_ranks import all_ids

# Of DeepEP's buffer, as in its own tests.
BUFFER_BYTES = 10**9
# Pairs of a tile: BLOCK_M_TOKEN of liger_kernel 0.8.5.
LIGER_TILE = 64


def package(name: str, how: str) -> Any:
    """The module. Unavailable where it, or what it imports, is not installed, with ``how`` to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        first = name.split(".")[0]
        missing = "" if error.name in (None, first) else f", or {error.name}, which it imports"
        raise Unavailable(f"{first} is not installed{missing}; {how}") from None


def rounded(problem: OpProblem, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows, scales) to send: in fp8 by weft's kernel, in the package's own format, or ``x`` with None."""
    return quantize_rows(x, len(x), problem.team.caps) if problem.case.field("fp8") else (x, None)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """e4m3 rows as uint8, as answers hold them, others as they are."""
    return rows.view(torch.uint8) if rows.dtype == E4M3 else rows


# --- DeepEP, intranode -----------------------------------------------------------------------------------------------------


def deep_ep_buffer(problem: OpProblem) -> Any:
    module = package("deep_ep", "build it with benchmarks/packages.sh")
    return module.Buffer(group_of(problem), BUFFER_BYTES, 0, explicitly_destroy=True)


def deep_ep_sent(buffer: Any, x: Any, ids: torch.Tensor, weights: torch.Tensor, experts: int, most: int = 0) -> tuple:
    """(rows that came, handle) of its dispatch of rows, or of (rows, scales); makes the layout.

    most  rows to have room for; 0: the host waits for the count
    """
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    named = {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_in_rank, "num_tokens_per_expert": per_expert}
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=most, **named)
    return rows, handle


def deep_ep_dispatch(problem: OpProblem) -> Prepared:
    """One row for each rank that needs it, by source rank; int64 ids and fp32 weights are there before.

    The buffer has room for all rows of all ranks, so that the host does not wait and a CUDA graph holds it.
    """
    buffer, (T, _, experts, _) = deep_ep_buffer(problem), problem.case.sizes
    buffers, fp8 = [x.clone() for x, *_ in problem.sets], problem.case.field("fp8")
    routings = [(ids.long(), weights.float()) for _, ids, weights in problem.sets]

    def run(number: int) -> tuple[torch.Tensor, ...]:
        sent = rounded(problem, buffers[number])
        came = deep_ep_sent(buffer, sent if fp8 else sent[0], *routings[number], experts, problem.team.size * T)[0]
        return came if fp8 else (came,)

    def compare(out: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        needed = mine(problem).chosen(all_ids(problem, 0)).any(-1)
        expected = tuple(answer[needed] for answer in row_answers(problem))
        return tuple(as_bytes(rows[: int(needed.sum())]) for rows in out), expected

    return Prepared(run=run, prepare=written(problem, buffers), compare=compare, close=buffer.destroy)


def row_answers(problem: OpProblem) -> tuple[torch.Tensor, ...]:
    """Rows that the dispatch answers with, and in fp8 their scales."""
    answer = problem.answer()
    return (answer[0], answer[-1]) if problem.case.field("fp8") else (answer[0],)


def deep_ep_combine(problem: OpProblem) -> Prepared:
    """Weighted sums of this rank's choices, then its combine, for the rows of a dispatch before."""
    buffer, (T, _, total, H) = deep_ep_buffer(problem), problem.case.sizes
    team, buffers, experts = problem.team, [y.clone() for y, *_ in problem.sets], mine(problem)
    own = slice(team.rank * T, (team.rank + 1) * T)
    handles, came = [], []
    for y, ids, weights in problem.sets:
        routing = ids[own].long(), weights[own].float()
        handles.append(deep_ep_sent(buffer, y.new_zeros((T, H)), *routing, total)[1])
        came.append(experts.chosen(ids).any(-1).nonzero()[:, 0])
    add = torch.compile(weighted_sum, dynamic=False)

    def run(number: int) -> torch.Tensor:
        sums = add(buffers[number], *problem.sets[number][1:], experts)
        return buffer.combine(sums.index_select(0, came[number]), handles[number])[0]

    return Prepared(run=run, prepare=written(problem, buffers), close=buffer.destroy)


# --- pplx-kernels, intranode -----------------------------------------------------------------------------------------------


def pplx_module() -> Any:
    return package("pplx_kernels", "build it with benchmarks/packages.sh")


class Pplx:
    """Its exchange for one problem. A combine has to follow each dispatch: ``is_open`` between the two.

    ids, weights  of each set, this rank's, as it takes them
    rows          [held, W * T, H], slots of this rank's experts; scales [held, W * T, H / 128] if in fp8; counts [held]
    """

    def __init__(self, problem: OpProblem, own: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        module, (T, k, total, H), team = pplx_module(), problem.case.sizes, problem.team
        self.is_open, fp8 = False, problem.case.field("fp8")
        scales, dtype = (scales_of(H), E4M3) if fp8 else (0, problem.dtype)
        sizes = {"max_num_tokens": T, "num_experts": total, "experts_per_token": k, "hidden_dim": H}
        ranks = {"rank": team.rank, "world_size": team.size, "dp_size": 1}
        row = {"hidden_dim_bytes": H * dtype.itemsize, "hidden_dim_scale_bytes": 4 * scales}
        group = with_cpu(group_of(problem)).group_name
        self.exchange = module.AllToAll.intranode(**sizes, **ranks, **row, group_name=group)
        self.ids, self.weights = [ids.to(torch.uint32) for ids, _ in own], [weights.float() for _, weights in own]
        slots, device = (mine(problem).count, team.size * T), team.device
        self.rows = torch.zeros((*slots, H), dtype=torch.uint8 if fp8 else dtype, device=device).view(dtype)
        self.scales = torch.zeros((*slots, scales), dtype=torch.float32, device=device) if fp8 else None
        self.counts = torch.zeros(slots[0], dtype=torch.int32, device=device)
        self.sums = torch.empty((T, H), dtype=problem.dtype, device=device)

    def dispatch(self, number: int, x: torch.Tensor, scales: torch.Tensor | None) -> None:
        if self.is_open:
            raise Unavailable("a combine has to follow each dispatch")
        self.is_open = True
        into = {"out_expert_num_tokens": self.counts, "out_expert_x": self.rows, "out_expert_x_scale": self.scales}
        self.exchange.dispatch(**into, dp_x=x, dp_x_scale=scales, indices=self.ids[number], bound_m=None)

    def combine(self, number: int, y: torch.Tensor) -> torch.Tensor:
        """Weighted sums of ``y``, in bf16 and in the slots of the last dispatch, which was of the same set."""
        if not self.is_open:
            raise Unavailable("a dispatch has to precede each combine")
        self.is_open = False
        routing = {"indices": self.ids[number], "weights": self.weights[number]}
        self.exchange.combine(out_tokens=self.sums, expert_y=y, bound_m=None, **routing)
        return self.sums


def pplx_dispatch(problem: OpProblem) -> Prepared:
    """A row for each choice, in slots of its expert. Its combines are not timed."""
    k, fp8, last = problem.case.sizes[1], problem.case.field("fp8"), 0
    one = Pplx(problem, [(ids, weights) for _, ids, weights in problem.sets])
    buffers = [x.clone() for x, *_ in problem.sets]
    results = torch.zeros_like(one.rows, dtype=problem.dtype)
    write = written(problem, buffers)

    def prepare(number: int) -> None:
        if one.is_open:
            one.combine(last, results)
        write(number)

    def run(number: int) -> tuple[torch.Tensor, ...]:
        nonlocal last
        one.dispatch(number, *rounded(problem, buffers[number]))
        last = number
        return (one.counts, one.rows, one.scales) if fp8 else (one.counts, one.rows)

    def compare(out: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        order = sorted_pairs(all_ids(problem, 0), mine(problem))
        pairs, counts = order.pairs[: int(order.ends[-1])], order.ends.diff(prepend=order.ends[:1] * 0).tolist()
        given, *whole = out
        found = [tuple(as_bytes(x[e, :count]) for x in whole) for e, count in enumerate(given.tolist())]
        expected = zip(*(answer[pairs // k].split(counts) for answer in row_answers(problem)), strict=True)
        return joined(map(in_order, found)), joined(map(in_order, expected))

    return Prepared(run=run, prepare=prepare, compare=compare, close=one.exchange.destroy)


def pplx_combine(problem: OpProblem) -> Prepared:
    """Each choice's row back, and a token's weighted sum.

    Its dispatches are not timed; they send numbers of tokens, from which the results get into their slots.
    """
    (T, _, total, _), team = problem.case.sizes, problem.team
    own = slice(team.rank * T, (team.rank + 1) * T)
    one = Pplx(problem, [(ids[own], weights[own]) for _, ids, weights in problem.sets])
    first = mine(problem).first
    # By set, token and expert: the pair, or 0 where the token did not choose the expert.
    pairs = []
    for _, ids, _ in problem.sets:
        of_expert = torch.zeros((len(ids), total), dtype=torch.int64, device=team.device)
        numbers = torch.arange(ids.numel(), device=team.device).view_as(ids)
        pairs.append(of_expert.scatter_(1, ids.long(), numbers)[:, first : first + len(one.rows)])
    tokens = torch.zeros((T, one.rows.shape[2]), dtype=one.rows.dtype, device=team.device)
    tokens.view(torch.int32)[:, 0] = torch.arange(own.start, own.stop, device=team.device)
    results = torch.zeros_like(one.rows)

    def prepare(number: int) -> None:
        if one.is_open:
            one.combine(number, results)
        one.dispatch(number, tokens, None)
        came = one.rows.view(torch.int32)[..., 0].long()
        slots = torch.arange(len(results), device=team.device)[:, None]
        torch.index_select(problem.sets[number][0], 0, pairs[number][came, slots].flatten(), out=results.flatten(0, 1))

    def run(number: int) -> torch.Tensor:
        return one.combine(number, results)

    prepare(0)
    return Prepared(run=run, prepare=prepare, close=one.exchange.destroy)


def with_cpu(group: Any) -> Any:
    """A group of these ranks that sends CPU tensors too: pplx exchanges its handles so."""
    return dist.new_group(dist.get_process_group_ranks(group), backend="cpu:gloo,cuda:nccl")


def in_order(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Rows of all tensors by what the first contains: slots are taken in any order."""
    rows = tensors[0]
    order = (rows.double() * torch.arange(1, rows.shape[1] + 1, device=rows.device)).sum(1).argsort()
    return tuple(one[order] for one in tensors)


def joined(of_experts: Iterable[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.cat, zip(*of_experts, strict=True)))


# --- Liger-Kernel ----------------------------------------------------------------------------------------------------------


class LigerOrder(NamedTuple):
    """Pairs of a set as its kernels take them, int32, with expert e's from starts[e] to starts[e + 1].

    tokens [pairs]; starts [experts + 1]; tile_rows, tile_experts [tiles]: first pair and expert of each tile
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    tile_rows: torch.Tensor
    tile_experts: torch.Tensor

    @classmethod
    def of(cls, order: Order, k: int) -> LigerOrder:
        ends = order.ends.tolist()
        spans = enumerate(pairwise([0, *ends]))
        tiles = [(row, expert) for expert, (begin, end) in spans for row in range(begin, end, LIGER_TILE)]
        listed = [0, *ends], [row for row, _ in tiles], [expert for _, expert in tiles]
        made = (torch.tensor(one, dtype=torch.int32, device=order.ends.device) for one in listed)
        return cls((order.pairs // k).int(), *made)


def liger_grouped(problem: OpProblem) -> Prepared:
    """Its kernel of one of the two GEMMs, in tiles of 64 pairs; their order is there before.

    That of the first GEMM gathers rows, applies SiLU and product in fp32, and stores gate and up as well, for its backward.
    The second takes rows in the order of the experts, and its result stays in that order. Its autotuner runs before the clock.
    """
    kernels = package("liger_kernel.ops.fused_moe_kernels", "pip install liger-kernel")
    gather, gated, k = problem.case.field("gather") is not False, problem.op.gated, problem.case.sizes[1]
    orders_of_pairs = orders(problem)
    found = [LigerOrder.of(order, k) for order in orders_of_pairs]

    def run(number: int) -> torch.Tensor:
        (_, x, weight), (tokens, *tiles) = problem.sets[number], found[number]
        pairs, (_, columns, K) = len(tokens), weight.shape
        N = columns // 2 if gated else columns
        out = x.new_empty((pairs, N))
        if pairs == 0:
            return out
        if gated:
            both = x.new_empty((pairs, columns))
            strides = {"stride_x_T": x.stride(0), "stride_x_H": 1, "stride_pre_TK": columns, "stride_pre_N": 1}
            strides |= {
                "stride_w_E": columns * K,
                "stride_w_N": K,
                "stride_w_K": 1,
                "stride_post_TK": N,
                "stride_post_N": 1,
            }
            sizes = {"H_dim": K, "I_dim": N, "BLOCK_M": LIGER_TILE}
            kernel, tensors = kernels._fused_up_proj_swiglu_kernel, (x, weight, tokens, *tiles, both, out)
        else:
            rows = x.index_select(0, tokens) if gather else x[:pairs]
            strides = {"stride_post_TK": rows.stride(0), "stride_post_I": 1, "stride_Y_TK": N, "stride_Y_H": 1}
            strides |= {"stride_w_E": N * K, "stride_w_H": K, "stride_w_I": 1}
            sizes = {"H_dim": N, "I_dim": K, "BLOCK_M": LIGER_TILE}
            kernel, tensors = kernels._fused_down_proj_kernel, (rows, weight, *tiles, out)
        kernel[lambda meta: (len(tiles[1]), cdiv(N, meta["BLOCK_N"]))](*tensors, **sizes, **strides)
        return out

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        return out, problem.answer() if gather else problem.answer()[orders_of_pairs[0].pairs]

    run(0)
    return Prepared(run=run, compare=compare)


PROVIDERS = tuple(
    Provider(name=name, ops=(op,), role="other", make=make)
    for name, op, make in (
        ("deep_ep", "moe-dispatch", deep_ep_dispatch),
        ("deep_ep", "moe-dispatch+fp8", deep_ep_dispatch),
        ("deep_ep", "moe-combine", deep_ep_combine),
        ("pplx", "moe-dispatch", pplx_dispatch),
        ("pplx", "moe-dispatch+fp8", pplx_dispatch),
        ("pplx", "moe-combine", pplx_combine),
        ("liger", "grouped-gemm", liger_grouped),
        ("liger", "grouped-gemm-silu", liger_grouped),
    )
)

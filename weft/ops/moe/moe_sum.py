"""moe_sum: the results of each token's chosen experts, weighted and added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import quoted
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.moe.moe_cases import draw_ids
from weft.ops.moe.routing import Experts, Routing
from weft.ops.op import Op, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

# Columns that a program adds up: 8 a thread of 4 warps, so that bf16 is loaded 16 bytes at a time.
BLOCK = 1024


@triton.jit(do_not_specialize=["first", "count"])
def moe_sum_kernel(y, ids, weights, out, N, first, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t, :] = sum of weights[t, j] * y[t * K + j, :] over j with first <= ids[t, j] < first + count

    grid: (T, cdiv(N, BLOCK)). Added up in fp32 in the order of j, rounded once; other rows of y are not read.
    """
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        pair = token.to(tl.int64) * K + j
        expert = tl.load(ids + pair) - first
        mine = (expert >= 0) & (expert < count)
        row = tl.load(y + pair * N + column, mask=(column < N) & mine, other=0.0).to(tl.float32)
        weight = tl.load(weights + pair).to(tl.float32)
        total += tl.where(mine, row * weight, 0.0)
    tl.store(out + token.to(tl.int64) * N + column, total.to(out.dtype.element_ty), mask=column < N)


def moe_sum(y: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """Sum over j of routing.weights[t, j] * y[t * k + j] -> [T, N], of the choices among ``experts``.

    y        [T * k, N], fp16, bf16 or fp32, as ``grouped_matmul`` gives it; rows of other choices are not read
    routing  ids int32 [T, k]; weights [T, k] in any of these dtypes

    Added up in fp32 in the order of the choices, rounded once to y's dtype; 0 for a token that chose none of ``experts``.
    Gradients of y and the weights. ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "moe_sum"
    if not isinstance(routing, Routing):
        raise ValueError(f"{op}: routing={quoted(routing)} is not a Routing; weft.ops.route gives one")
    if not isinstance(experts, Experts):
        raise ValueError(
            f"{op}: experts={quoted(experts)} is not an Experts; pass weft.ops.Experts(total, first, count)"
        )
    check_like(op, "y", y, None, FLOATS)
    check_like(op, "ids", routing.ids, y.device, (torch.int32,))
    check_like(op, "weights", routing.weights, y.device, FLOATS)
    check_shape(op, "ids", routing.ids, ("T", "k"))
    check_shape(op, "weights", routing.weights, routing.ids.shape)
    check_shape(op, "y", y, (routing.ids.numel(), "N"))
    return MOE_SUM.dispatch(y, *routing, experts.first, experts.count)


class MoeSum(Op):
    """sizes of a case: T, k, experts in all, N."""

    name, alias = "moe_sum", "moe-sum"
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """y with NaN in the rows of other ranks' choices, ids and weights."""
        T, k, total, N = case.sizes
        ids, (first, count) = draw_ids(draw, T, k, total), case.field("local") or (0, total)
        y, mine = draw.own("y", (T * k, N)), ((ids >= first) & (ids < first + count)).flatten()
        return y.masked_fill(~mine[:, None], torch.nan), ids, draw.own("weights", (T, k)).abs()

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        y, ids, weights = by_rank[rank]
        T, k, total, N = case.sizes
        first, count = case.field("local") or (0, total)
        mine = ((ids >= first) & (ids < first + count))[..., None]
        rows = torch.where(mine, y.view(T, k, N).double(), 0.0)
        return (rows * weights.double()[..., None]).sum(1)

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[1])

    def call(self, case: Case, team: Any, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = case.sizes[2]
        return moe_sum(y, Routing(ids, weights), Experts(total, *(case.field("local") or (0, total))))

    def cases(self) -> Iterator[Case]:
        def case(dtype: torch.dtype, *sizes: int, **fields: Any) -> Case:
            return Case(op=self.name, world_size=1, dtype=dtype, sizes=sizes, fields=tuple(fields.items()))

        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 8, 128, 1), (5, 2, 8, 1030), (3, 16, 16, 64)):
                yield case(dtype, *sizes)
            yield case(dtype, 9, 4, 60, 100, local=(15, 15))
        for skew in ("some", "none", "last expert"):
            yield case(BF16, 6, 2, 8, 40, skew=skew, local=(0, 4))
        yield case(BF16, 0, 2, 8, 40)

    def large_cases(self) -> Iterator[Case]:
        for sizes in ((128, 8, 128, 2048), (4096, 8, 128, 2048)):
            yield Case(op=self.name, world_size=1, dtype=BF16, sizes=sizes, fields=(("local", (64, 64)),))

    def forward(
        self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, count: int
    ) -> torch.Tensor:
        (T, k), N, out = ids.shape, y.shape[1], self.fake(y, ids, weights, first, count)
        if out.numel() > 0:
            options = launch_options(capabilities_of(y.device))
            launch = launch_on(y.device, moe_sum_kernel, k, lambda: {"K": k, "BLOCK": BLOCK, **options})
            arguments = y.contiguous(), ids.contiguous(), weights.contiguous(), out, N, first, count
            launch((T, cdiv(N, BLOCK)), *arguments)
        return out

    def fake(self, y, ids, weights, first, count):
        return y.new_empty((ids.shape[0], y.shape[1]))

    def setup_context(self, ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        y, ids, weights, ctx.first, ctx.count = inputs
        ctx.save_for_backward(y, ids, weights)

    def backward(self, ctx: Any, grad: torch.Tensor) -> tuple:
        y, ids, weights = ctx.saved_tensors
        mine = ((ids >= ctx.first) & (ids < ctx.first + ctx.count))[..., None]
        grad, rows = grad.float()[:, None], y.view(*ids.shape, y.shape[1])
        # Other rows of y have not been written: they are masked, not multiplied by 0.
        of_y = torch.where(mine, grad * weights.float()[..., None], 0.0).to(y.dtype).view(y.shape)
        of_weights = torch.where(mine, grad * rows.float(), 0.0).sum(-1).to(weights.dtype)
        return of_y, None, of_weights, None, None


MOE_SUM = MoeSum()
register(MOE_SUM)

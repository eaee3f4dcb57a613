"""moe_sum: the results of each token's chosen experts, weighted and added up; and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.layout import Given
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.moe.check import check_experts, check_routing
from weft.ops.moe.choices import common, draw_ids, experts_of
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.routing import Experts, Routing
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Columns that a program adds up: 8 a thread of 4 warps, so that bf16 is loaded 16 bytes at a time.
BLOCK = 1024


class Shared(NamedTuple):
    """Summand of all tokens beside their choices, also a kernel's argument.

    rows    [T, N], each dense; None: there is none
    gate    [T], ``stride`` apart: rows[t] is multiplied by sigmoid(gate[t]); None: it is not
    pitch   from row to row, which ``add_up`` sets: rows may be columns of wider ones
    """

    rows: torch.Tensor | None
    gate: torch.Tensor | None
    stride: int
    pitch: int = 0

    @classmethod
    def of(cls, rows: torch.Tensor | None, gate: torch.Tensor | None) -> Shared:
        """Summand of rows of any strides."""
        return cls(None if rows is None else rows.contiguous(), gate, 0 if gate is None else gate.stride(0))


NO_SUMMAND = Shared(None, None, 0)


@triton.jit(do_not_specialize=["first", "count"])
def moe_sum_kernel(y, ids, weights, shared, out, N, first, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t, :] = sum of weights[t, j] * y[t * K + j, :] over j with first <= ids[t, j] < first + count

    grid: (T, cdiv(N, BLOCK)). Added up in fp32 in the order of j, then ``shared``, a Shared; rounded once. Other rows of y are
    not read. All ids are loaded, then all rows: one after the other takes K times the memory's latency.
    """
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    pair, held, factors, rows = token.to(tl.int64) * K, (), (), ()
    for j in tl.static_range(K):
        expert = tl.load(ids + pair + j) - first
        held += ((expert >= 0) & (expert < count),)
        factors += (tl.load(weights + pair + j).to(tl.float32),)
    for j in tl.static_range(K):
        rows += (tl.load(y + (pair + j) * N + column, mask=(column < N) & held[j], other=0.0),)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        total += tl.where(held[j], rows[j].to(tl.float32) * factors[j], 0.0)
    if shared.rows is not None:
        row = tl.load(shared.rows + token.to(tl.int64) * shared.pitch + column, mask=column < N, other=0.0).to(
            tl.float32
        )
        if shared.gate is not None:
            gate = tl.load(shared.gate + token.to(tl.int64) * shared.stride).to(tl.float32)
            row *= 1.0 / (1.0 + tl.exp(-gate))
        total += row
    tl.store(out + token.to(tl.int64) * N + column, total.to(out.dtype.element_ty), mask=column < N)


def moe_sum(
    y: torch.Tensor,
    routing: Routing,
    experts: Experts,
    *,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over j of routing.weights[t, j] * y[t * k + j] -> [T, N], of the choices among ``experts``.

    y        [T * k, N], fp16, bf16 or fp32, as ``grouped_matmul`` gives it; rows of other choices are not read
    routing  ids int32 [T, k]; weights [T, k] in any of these dtypes
    shared   [T, N] of y's dtype, added to the sum: the result of an expert of all tokens
    gate     [T] of y's dtype, strided or not: shared[t] is multiplied by sigmoid(gate[t])

    Added up in fp32 in the order of the choices, rounded once to y's dtype: a token's bits depend on its rows alone; 0 for a
    token that chose none of ``experts``, unless there is ``shared``. Gradients of y, the weights, shared and gate. ValueError
    for shapes, dtypes or devices that do not fit.
    """
    op = "moe_sum"
    check_like(op, "y", y, None, FLOATS)
    ids, _ = check_routing(op, routing, y.device)
    check_experts(op, experts)
    check_shape(op, "y", y, (ids.numel(), "N"))
    check_shared(op, y, (len(ids), y.shape[1]), shared, gate)
    return MOE_SUM.dispatch(y, routing, experts.first, experts.count, shared, gate)


def moe_nodes(ys: Sequence[torch.Tensor], routing: Routing, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """``moe_sum`` of each y for the experts of its range (first, count): [ranges, T, N]."""
    nodes = ys[0].new_empty((len(ranges), len(routing.ids), ys[0].shape[1]))
    for y, held, node in zip(ys, ranges, nodes, strict=True):
        add_up(y, routing, held, NO_SUMMAND, node)
    return nodes


def check_shared(
    op: str, y: torch.Tensor, shape: tuple[int, int], shared: torch.Tensor | None, gate: torch.Tensor | None
) -> None:
    """ValueError unless a shared summand and its gate, if any, fit results [T, N] of y's dtype and device."""
    if shared is not None:
        check_like(op, "shared", shared, y.device, (y.dtype,), shape)
    if gate is not None:
        if shared is None:
            raise ValueError(f"{op}: gate is that of shared, which is None; pass both or shared alone")
        check_like(op, "gate", gate, y.device, (y.dtype,), shape[:1])


def add_up(y: torch.Tensor, routing: Routing, held: tuple[int, int], shared: Shared, out: torch.Tensor) -> None:
    """Launch moe_sum_kernel for checked arguments; held: number of the first expert, and of experts."""
    ids, weights = routing
    (T, k), N = ids.shape, y.shape[1]
    if shared.rows is not None:
        shared = shared._replace(pitch=shared.rows.stride(0))
    if out.numel() > 0:
        options = launch_options(capabilities_of(y.device))
        launch = launch_on(y.device, moe_sum_kernel, k, lambda: {"K": k, "BLOCK": BLOCK, **options})
        tensors = y.contiguous(), ids.contiguous(), weights.contiguous(), shared, out
        launch((T, cdiv(N, BLOCK)), *tensors, N, *held)


def drawn_beside(
    draw: Draw, shape: tuple[int, int], of_gate: Callable[..., torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Summand of all tokens in a case, and its gate, by the case's field ``shared``.

    That is "gated" or "ungated"; None: there is none.
    of_gate  draws the gate; None: ``draw.own``
    """
    kind = draw.case.field("shared")
    if kind is None:
        return ()
    # A column of a wider matrix, as a router has it.
    gate = ((of_gate or draw.own)("gate", (shape[0], 3), 2.0)[:, 2],) if kind == "gated" else ()
    return draw.own("shared", shape), *gate


def exact_beside(shared: Sequence[torch.Tensor]) -> torch.Tensor | float:
    """Summand of ``drawn_beside``, times the sigmoid of its gate, in fp64; 0 without one."""
    row, *gate = (one.double() for one in shared) if shared else (0.0,)
    return row * gate[0].sigmoid()[:, None] if gate else row


class MoeSum(MoeOp):
    """sizes of a case: T, k, experts in all, N."""

    name, alias = "moe_sum", "moe-sum"
    bits = INVARIANT
    saves = ("y", "ids", "weights", "shared", "gate")
    no_plan = "one kernel; a program takes a block of a token's columns"
    collective = False

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, shape.hidden

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """y with NaN in the rows of other ranks' choices, ids and weights; then shared and gate, if any."""
        T, k, total, N = case.sizes
        ids, weights = draw_ids(common(draw), T, k, total), common(draw).own("weights", (T, k)).abs()
        here = experts_of(case, total, rank).chosen(ids).flatten()
        y = draw.own("y", (T * k, N)).masked_fill(~here[:, None], torch.nan)
        return y, ids, weights, *drawn_beside(draw, (T, N))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        y, ids, weights, *shared = by_rank[rank]
        T, k, total, N = case.sizes
        here = experts_of(case, total, rank).chosen(ids)[..., None]
        rows = torch.where(here, y.view(T, k, N).double(), 0.0)
        return (rows * weights.double()[..., None]).sum(1) + exact_beside(shared)

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[1] + (case.field("shared") is not None))

    def results(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> torch.Tensor:
        y, ids, weights, *shared = tensors
        experts = experts_of(case, case.sizes[2], 0 if team is None else team.rank)
        return moe_sum(y, Routing(ids, weights), experts, **dict(zip(("shared", "gate"), shared, strict=False)))

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        shape = MoeShape(*sizes)
        rows = (shape.pairs + shape.tokens) * shape.hidden * dtype.itemsize
        return int(rows) + shape.tokens * shape.k * (4 + dtype.itemsize)

    def cases(self) -> Iterator[Case]:
        case = functools.partial(self.case, 1)
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 8, 128, 1), (5, 2, 8, 1030), (3, 16, 16, 64)):
                yield case(dtype, *sizes)
            yield case(dtype, 9, 4, 60, 100, local=(15, 15))
        for skew in ("some", "none", "last expert"):
            yield case(BF16, 6, 2, 8, 40, skew=skew, local=(0, 4))
        yield case(BF16, 0, 2, 8, 40)
        for dtype, kind in ((BF16, "gated"), (FP32, "gated"), (FP16, "ungated")):
            yield case(dtype, 7, 4, 8, 1030, shared=kind, local=(4, 4))

    def large_cases(self) -> Iterator[Case]:
        for sizes in ((128, 8, 128, 2048), (4096, 8, 128, 2048)):
            yield self.case(1, BF16, *sizes, local=(64, 64))

    def forward(
        self,
        y: torch.Tensor,
        routing: Routing,
        first: int,
        count: int,
        shared: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        out = self.fake(y, routing)
        add_up(y, routing, (first, count), Shared.of(shared, gate), out)
        return out

    def fake(self, y, routing, *_):
        return y.new_empty((len(routing.ids), y.shape[1]))

    def backward(self, given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor | None]:
        pairs = given.y, given.ids, given.weights, grad, given.first, given.count
        gradients = dict(zip(("y", "weights"), torch.ops.weft.moe_sum_grad.default(*pairs), strict=True))
        if given.gate is not None:
            factor, whole = given.gate.float().sigmoid(), grad.float()
            of_gate = (whole * given.shared.float()).sum(-1) * factor * (1 - factor)
            return {
                **gradients,
                "shared": (whole * factor[:, None]).to(grad.dtype),
                "gate": of_gate.to(given.gate.dtype),
            }
        return {**gradients, "shared": None if given.shared is None else grad}


@triton.jit(do_not_specialize=["first", "count"])
def moe_sum_grad_kernel(y, ids, weights, grad, of_y, of_weights, N, first, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """of_y[p] = weights[t, j] * grad[t] and of_weights[t, j] = grad[t] . y[p] of pair p = t * K + j

    grid: (T, K). Both are 0 unless first <= ids[t, j] < first + count; then grad's row t and y's row p are not read. In fp32,
    rounded once.
    """
    token = tl.program_id(0).to(tl.int64)
    pair = token * K + tl.program_id(1)
    wl.follow_previous_kernel()
    expert = tl.load(ids + pair) - first
    held = (expert >= 0) & (expert < count)
    weight, total = tl.load(weights + pair).to(tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, N, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < N
        row = tl.load(grad + token * N + column, mask=inside & held, other=0.0).to(tl.float32)
        total += row * tl.load(y + pair * N + column, mask=inside & held, other=0.0).to(tl.float32)
        # A weight may be infinite, and 0 times it no number.
        of_row = tl.where(held, row * weight, 0.0)
        tl.store(of_y + pair * N + column, of_row.to(of_y.dtype.element_ty), mask=inside)
    tl.store(of_weights + pair, tl.sum(total, axis=0).to(of_weights.dtype.element_ty))


class MoeSumGrad(Op):
    """Gradients of moe_sum's y and weights; of moe_combine's, from gradients of all ranks' tokens.

    Rows of ``grad`` of tokens that chose none of the experts are not read, nor are other choices' rows of y.
    """

    name = alias = "moe_sum_grad"

    def forward(
        self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, first: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_y, of_weights = self.fake(y, ids, weights, grad, first, count)
        (T, k), N = ids.shape, y.shape[1]
        if of_y.numel() > 0:
            constants = {"K": k, "BLOCK": BLOCK, **launch_options(capabilities_of(y.device))}
            launch = launch_on(y.device, moe_sum_grad_kernel, k, lambda: constants)
            dense = (x.contiguous() for x in (y, ids, weights, grad))
            launch((T, k), *dense, of_y, of_weights, N, first, count)
        return of_y, of_weights

    def fake(self, y, ids, weights, grad, first, count):
        return y.new_empty(y.shape), weights.new_empty(weights.shape)


MOE_SUM = register(MoeSum())
_GRAD = define(MoeSumGrad())

"""route: each token's k experts and weights from logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int
from weft.kernels.expert_choices import TINY, Scoring, choices_of
from weft.kernels.operands import rows_contiguous
from weft.kernels.partial_sums import rounded_sum
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.layout import Given
from weft.ops.local import capabilities_of, check_like
from weft.ops.moe.choices import draw_ids, popularity
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.routing import MAX_CHOICES, Gating, Routing
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_flag, check_scalar
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


MAX_EXPERTS = 1024
SCORINGS = ("softmax", "sigmoid")
# Scores that a program holds: 16 a thread of 4 warps.
TILE = 2048
# Tokens up to which each has a program of one warp: reductions then are shuffles, without barriers between warps. One H200, 128
# tokens in a row: 1.9 us, before that 3.8 (benchmarks/lab/h200-route.json, before docs/performance/h200-x1.md).
LONE_TOKENS = 512


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits,
    stride,
    bias,
    ids,
    weights,
    gate,
    T,
    E,
    scale,
    SCORING: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """ids[t, j] = the expert with the j-th greatest score of token t; weights[t, j] = scale * its weight

    grid    (cdiv(T, ROWS),)
    logits  [T, E], rows ``stride`` apart; with PARTS fp32 [PARTS, T, stride], which are added up in this order and rounded to
            the dtype of the weights
    bias    fp32 [E], any tensor if not SCORING.biased
    ids     int32 [T, K]; weights [T, K], computed in fp32 and rounded once
    gate    [T], for the sums of column E of the parts; None: there are none
    BLOCK   a power of two, at least E

    signals, waits  none, except the wait for the previous kernel
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK)[None, :]
    wl.follow_previous_kernel()
    asked, there = logits + row.to(tl.int64) * stride + expert, (row < T) & (expert < E)
    if PARTS == 0:
        x = tl.load(asked, mask=there, other=float("-inf")).to(tl.float32)
    else:
        dtype: tl.constexpr = weights.dtype.element_ty
        x = rounded_sum(asked, there, T * stride, PARTS, dtype).to(tl.float32)
        x = tl.where(there, x, float("-inf"))
        if gate is not None:
            of_gate = rounded_sum(logits + row.to(tl.int64) * stride + E, row < T, T * stride, PARTS, dtype)
            tl.store(gate + row, of_gate, mask=row < T)
    _, _, chosen, weight = choices_of(x, bias, E, SCORING, K)
    if SCORING.renormalize:
        weight = weight / (tl.sum(weight, axis=1, keep_dims=True) + TINY)
    choice = tl.arange(0, 16)[None, :]
    at, inside = row.to(tl.int64) * K + choice, (row < T) & (choice < K)
    tl.store(ids + at, chosen, mask=inside)
    tl.store(weights + at, (weight * scale).to(weights.dtype.element_ty), mask=inside)


def route(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    group_limit: int = 1,
    scale: float = 1.0,
) -> Routing:
    """The k experts with the greatest scores of each token, best first: ids int32 [T, k], weights [T, k].

    logits       [T, E], fp16, bf16 or fp32; the weights have its dtype. Rows may be strided
    k            1 to 16, and at most the experts of the chosen groups; E is at most 1024
    scoring      "softmax" (Qwen, Mixtral) or "sigmoid" (DeepSeek-V3) of the logits, in fp32
    renormalize  weights are scores divided by the sum of the k chosen ones (plus 1e-20), else the scores themselves
    bias         fp32 [E], added to the scores to choose, not in the weights
    groups       experts lie in this many equal groups, one after the other: choices are from the ``group_limit`` best groups. A
                 group is as good as its best expert, with a bias as the sum of its two best (DeepSeek-V2, DeepSeek-V3)
    scale        factor of the weights

    Among equal scores the lowest expert comes first. NaN counts as less than any number; softmax gives a row with NaN the
    weights NaN. A token's bits depend on its logits, and on whether there are more than 512 tokens. Gradients flow from the
    weights to the logits; the choice and the bias have none. ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "route"
    check_like(op, "logits", logits, None, FLOATS, ("T", "E"))
    E = logits.shape[1]
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}; it must have 1 to {MAX_EXPERTS} experts")
    gating = check_gating(op, E, Gating(k, scoring, renormalize, groups, group_limit, scale))
    if bias is not None:
        check_like(op, "bias", bias, logits.device, (torch.float32,), (E,))
    return Routing(*ROUTE.dispatch(logits, bias, gating))


def check_gating(op: str, E: int, gating: Gating) -> Gating:
    """``gating``, its scale as a float. ValueError unless ``route`` takes it for E experts."""
    k, scoring, renormalize, groups, group_limit, scale = gating
    check_int(f"{op}: k", k, 1)
    check_int(f"{op}: groups", groups, 1)
    check_int(f"{op}: group_limit", group_limit, 1)
    check_choice(op, "scoring", scoring, SCORINGS)
    check_flag(op, "renormalize", renormalize)
    check_scalar(op, "scale", scale)
    if E % groups:
        raise ValueError(f"{op}: groups={groups} does not divide the {E} experts; groups are equal")
    if group_limit > groups:
        raise ValueError(f"{op}: group_limit={group_limit} is more than groups={groups}")
    if k > min(MAX_CHOICES, E // groups * group_limit):
        raise ValueError(
            f"{op}: k={k} is more than {MAX_CHOICES}, or than the {E // groups * group_limit} experts to choose from"
        )
    return Gating(k, scoring, renormalize, groups, group_limit, float(scale))


def scoring_of(bias: torch.Tensor | None, gating: Gating) -> Scoring:
    """Form of ``gating`` for kernels."""
    softmax = gating.scoring == "softmax"
    return Scoring(softmax, bias is not None, gating.renormalize, gating.groups, gating.group_limit)


def launch_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    gating: Gating,
    routing: Routing,
    gate: torch.Tensor | None = None,
    experts: int | None = None,
) -> None:
    """Launch ``route_kernel`` on checked arguments, of one token or more.

    logits   [T, E] with contiguous rows; or fp32 parts [parts, T, columns], of which the first ``experts`` are E
    gate     as the kernel takes it, beside parts
    """
    k = gating.k
    T, E = logits.shape[-2], experts or logits.shape[-1]
    caps, block = capabilities_of(logits.device), max(16, next_power_of_2(E))
    rows, warps = (1, cdiv(block, 256)) if T <= LONE_TOKENS else (max(1, TILE // block), 4)
    form = scoring_of(bias, gating)
    parts = 0 if experts is None else len(logits)
    sizes = {"K": k, "ROWS": rows, "BLOCK": block, "PARTS": parts, "num_warps": warps}
    launch = launch_on(
        logits.device,
        route_kernel,
        (form, k, rows, block, parts),
        lambda: {"SCORING": form, **sizes, **launch_options(caps)},
    )
    shift = logits if bias is None else bias.contiguous()
    launch(cdiv(T, rows), logits, logits.stride(-2), shift, *routing, gate, T, E, gating.scale)


def gating_of(case: Case, k: int) -> Gating:
    """Gating of a case, by its fields."""
    given = {name: case.field(name) for name in ("scoring", "renormalize", "scale") if case.field(name) is not None}
    return Gating(k, **given, **dict(zip(("groups", "group_limit"), case.field("groups") or (), strict=False)))


def choices_by_torch(
    logits: torch.Tensor, bias: torch.Tensor | None, gating: Gating
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [T, k], weights [T, k]) of ``route`` by torch, computed in the dtype of ``logits``."""
    k, scoring, renormalize, groups, group_limit, scale = gating
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choose_by = logits if bias is None else scores + bias
    by_group = choose_by.unflatten(-1, (groups, -1))
    of_group = by_group.amax(-1) if bias is None else by_group.topk(min(2, by_group.shape[-1])).values.sum(-1)
    best = of_group.sort(descending=True, stable=True).indices[:, :group_limit]
    inside = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
    allowed = by_group.masked_fill(~inside[..., None], -torch.inf).flatten(1)
    ids = allowed.sort(descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


class Route(MoeOp):
    """sizes of a case: T, E, k."""

    name = alias = "route"
    bits = f"depend on whether a call has more than {LONE_TOKENS} tokens, and on nothing else"
    no_plan = "one kernel; a program takes one of few tokens, of many as its registers hold logits of"
    collective = False

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.experts, shape.k

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Logits, and a bias where the case has one. Logits of few values have ties."""
        T, E, _ = case.sizes
        logits = draw.own("logits", (T, E), 2.0)
        if case.field("ties"):
            logits = logits.float().round().to(case.dtype)
        if case.field("skew") == "zipf":
            logits = logits + popularity(E, case.field("held")).log().to(logits)
        if case.field("skew") == "recorded":
            # Beyond the range of all other logits, so that exactly these ids are chosen.
            ids = draw_ids(draw, T, case.sizes[2], E).long()
            logits = logits.clamp(-8, 8).scatter_add(1, ids, logits.new_full(ids.shape, 16))
        return (logits, draw.own("bias", (E,), dtype=FP32)) if case.field("biased") else (logits,)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        """Weights by expert, [T, E]: 0 for experts that are not chosen."""
        logits, *bias = (x.double() for x in by_rank[rank])
        ids, weights = choices_by_torch(logits, bias[0] if bias else None, gating_of(case, case.sizes[2]))
        return torch.zeros_like(logits).scatter(1, ids, weights)

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[1])

    def results(self, case: Case, team: Team | None, logits: torch.Tensor, *bias: torch.Tensor) -> Routing:
        return route(logits, bias=bias[0] if bias else None, **gating_of(case, case.sizes[2])._asdict())

    def defined(
        self, case: Case, team: Team | None, out: Routing, logits: torch.Tensor, *bias: torch.Tensor
    ) -> torch.Tensor:
        """Weights by expert, as ``reference`` has them; of an expert chosen twice their sum."""
        T, E = logits.shape
        ids = torch.where((out.ids >= 0) & (out.ids < E), out.ids, E).long()
        return logits.new_zeros((T, E + 1)).scatter_add(1, ids, out.weights)[:, :E].contiguous()

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        shape = MoeShape(*sizes)
        return shape.tokens * (shape.experts * dtype.itemsize + shape.k * (4 + dtype.itemsize))

    def cases(self) -> Iterator[Case]:
        case = functools.partial(self.case, 1)
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 128, 8), (5, 60, 4), (33, 8, 2), (3, 1, 1), (2, 256, 8), (4, 16, 16)):
                yield case(dtype, *sizes)
            yield case(dtype, 17, 64, 6, ties=True)
            yield case(dtype, 9, 60, 4, renormalize=False)
        yield case(BF16, 3, 1000, 10, renormalize=False, scale=2.5)
        yield case(BF16, 0, 8, 2)
        # Scores of fp32 logits with a bias: no two are so close that fp32 and fp64 could order them differently.
        for fields in ({}, {"biased": True, "scale": 2.5}, {"groups": (4, 2)}, {"biased": True, "groups": (8, 3)}):
            yield case(FP32, 7, 64, 6, scoring="sigmoid", **fields)
        yield case(FP32, 5, 256, 8, scoring="sigmoid", biased=True, groups=(8, 4), scale=2.5)
        yield case(BF16, 5, 160, 6, groups=(8, 3), renormalize=False, scale=16.0)
        yield case(FP32, 7, 64, 6, biased=True)

    def large_cases(self) -> Iterator[Case]:
        for T in (1, 128, 4096):
            for E, k in ((128, 8), (256, 8), (8, 2)):
                yield self.case(1, BF16, T, E, k)

    def forward(
        self, logits: torch.Tensor, bias: torch.Tensor | None, gating: Gating
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self.fake(logits, bias, gating)
        if len(logits) > 0:
            launch_route(rows_contiguous(logits), bias, gating, routing)
        return tuple(routing)

    def fake(self, logits, bias, gating):
        shape = logits.shape[0], gating.k
        return Routing(logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape))

    def keeps(self, ctx: Any, given: Given, output: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        ctx.mark_non_differentiable(output[0])
        return {"logits": given.logits, "ids": output[0]}

    def backward(self, given: Given, of_ids: None, of_weights: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            x = given.logits.detach().float().requires_grad_()
            scores = x.sigmoid() if given.scoring == "sigmoid" else x.softmax(-1)
            weights = scores.gather(1, given.ids.long())
            if given.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + TINY.value)
            [of_logits] = torch.autograd.grad(weights * given.scale, x, of_weights.float())
        return {"logits": of_logits.to(given.logits.dtype)}


ROUTE = register(Route())

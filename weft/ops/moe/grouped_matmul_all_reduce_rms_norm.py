"""grouped_matmul_all_reduce_rms_norm: second GEMM of experts, all sums and the next norm.

    y[p]      = x[i] @ weight[e].T                  for the i-th pair p = (t, j) of the schedule, of expert e
    hidden[t] = sum over ranks of (sum over j of routing.weights[t, j] * y[t, j] + shared[t]) + residual[t]
    normed[t] = RMSNorm(hidden[t]) * norm

in_norm     grouped GEMM | all-reduce + norm, which adds up the pairs as it loads them
sequential  grouped GEMM | moe_sum | all-reduce + norm

All ranks have the same tokens and choices, and each some experts, slices of all, or slices of some. Both designs give the same
bits: each sum is in fp32 in the order of the choices, rounded once, and what is sent is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl

from weft.arguments import quoted
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, check_e4m3, fp8_of
from weft.kernels.pair_sums import PairSum
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, format_of, norm_dtype
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM, NormCall, check_factored, check_row
from weft.ops.collectives.collective import Sums
from weft.ops.knobs import design_type
from weft.ops.local import check_rounds, check_shape, norm_dtypes
from weft.ops.moe.check import check_routing
from weft.ops.moe.choices import draw_ids, experts_of
from weft.ops.moe.grouped.cases import exact_operands, quantized_rows_of, with_matrix, with_scales
from weft.ops.moe.grouped.check import check_grouped
from weft.ops.moe.grouped.gemms import GroupedArguments
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL, OWN_FEATURES, OWN_SCHEDULE
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.moe_schedule import moe_schedule
from weft.ops.moe.moe_sum import Shared, check_shared, drawn_beside, exact_beside, moe_sum
from weft.ops.moe.routing import Experts, Routing, Schedule, check_distinct
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_scalar, check_tensor
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class SumInNorm:
    """Two kernels: the all-reduce + norm adds up the pairs as it loads them.

    norm  algorithm of all_reduce_rms_norm
    """

    norm: str = AUTO


@design_type
class SumThenNorm:
    """Three kernels: moe_sum between the two. norm: algorithm of all_reduce_rms_norm."""

    norm: str = AUTO


class PairsArguments(NamedTuple):
    """Arguments of grouped_matmul_all_reduce_rms_norm.

    first  this rank's first expert; the weight has as many as it holds
    """

    gemm: GroupedArguments
    routing: Routing
    first: int
    shared: torch.Tensor | None
    gate: torch.Tensor | None
    residual: torch.Tensor
    norm: torch.Tensor
    eps: float
    deferred: bool
    team: str
    algorithm: str
    kind: str = ""
    static_scale: torch.Tensor | None = None

    @property
    def format(self) -> RowFormat | None:
        """Form of the normed rows in fp8; None: in 16 or 32 bits."""
        return RowFormat(self.kind, self.static_scale) if self.kind else None


class PairsCall(NamedTuple):
    """Sizes that the plan depends on. width: of a row of the result."""

    tokens: int
    choices: int
    width: int
    dtype: torch.dtype
    design: str = AUTO

    @property
    def norm(self) -> NormCall:
        """Call of the all-reduce + norm."""
        row_bytes = self.width * self.dtype.itemsize
        return NormCall(self.tokens * row_bytes, row_bytes, self.dtype)


def grouped_matmul_all_reduce_rms_norm(
    x: torch.Tensor | Fp8,
    weight: torch.Tensor | Fp8,
    schedule: Schedule,
    routing: Routing,
    experts: Experts,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    team: Team,
    *,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    factored: bool = False,
    fp8: RowFormat | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor | Fp8 | DeferredNorm, torch.Tensor]:
    """(RMSNorm(hidden) * ``norm``, hidden), hidden = the experts' sum over all ranks + ``residual``.

    That sum is of all choices' results, weighted, of all ranks' shares.

    x          [T * k, K], row i of the i-th pair of the schedule, as ``grouped_matmul_silu_mul`` gives it; fp16, bf16 or fp32
    weight     [experts.count, H, K] of x's dtype: of whole experts or of slices, K the features that this rank holds. Or
               ``Fp8``, as of ``grouped_matmul``; the result's dtype then counts below in place of x's
    schedule   of ``moe_schedule(routing.ids, experts)``
    routing    of all T tokens, the same on all ranks: ids int32 [T, k], weights [T, k] of any of these dtypes
    experts    this rank's
    residual   [T, H] of x's dtype, the same on all ranks; norm [H] of that dtype or fp32; eps is added to the mean square
    shared     [T, H] of x's dtype, added to this rank's sums; gate [T] of that dtype, strided or not: shared[t] is multiplied
               by sigmoid(gate[t])
    bias       [experts.count, H] of x's dtype, added to the experts' results before they are weighted: of slices one rank has
               it, and 0 the rest. None: there is none
    factored   return a DeferredNorm in place of the normed rows, as all_reduce_rms_norm does
    fp8        the normed rows, or the DeferredNorm's, are put in fp8 so, as all_reduce_rms_norm does
    algorithm  "auto", "in_norm" (the norm's kernel adds up the pairs) or "sequential" (moe_sum does): the same bits

    New contiguous tensors [T, H], bitwise equal on all ranks and from run to run. Collective: all ranks call it, in the same
    order, on one stream. Captured in a CUDA graph it replays correctly, after one call outside. No backward. ValueError for
    shapes, dtypes or devices that do not fit.
    """
    op = "grouped_matmul_all_reduce_rms_norm"
    gemm = GroupedArguments.of(x, weight, schedule, False, bias=bias)
    check_tensor(op, "x", gemm.x, team, (*FLOATS, E4M3), over_nodes=True)
    check_grouped(op, gemm, gated=False)
    ids, _ = check_routing(op, routing, team.device)
    tokens, H = len(ids), gemm.weight.shape[1]
    if not isinstance(experts, Experts) or experts.count != len(gemm.weight):
        raise ValueError(f"{op}: experts={quoted(experts)} is not an Experts of the {len(gemm.weight)} that weight has")
    if schedule.pairs.shape[1] != tokens or schedule.choices != ids.shape[1]:
        raise ValueError(
            f"{op}: schedule has {schedule.pairs.shape[1]} tokens with {schedule.choices} choices and ids shape "
            f"{tuple(ids.shape)}; pass the schedule of these ids"
        )
    for name, tensor, shape in (("residual", residual, (tokens, H)), ("norm", norm, (H,))):
        dtypes = norm_dtypes(gemm.dtype) if name == "norm" else (gemm.dtype,)
        check_tensor(op, name, tensor, team, dtypes, over_nodes=True)
        check_shape(op, name, tensor, shape)
    check_shared(op, residual, (tokens, H), shared, gate)
    check_row(H, residual.itemsize)
    check_scalar(op, "eps", eps)
    check_factored(op, factored, team)
    check_choice(op, "algorithm", algorithm, GROUPED_MATMUL_ALL_REDUCE_RMS_NORM.algorithms)
    check_rounds(op, fp8, "residual", residual)
    of_experts = routing, experts.first, shared, gate
    of_rows = fp8[:2] if fp8 is not None else ("", None)
    given = PairsArguments(gemm, *of_experts, residual, norm, eps, factored, team.name, algorithm, *of_rows)
    rows, scales, hidden, squares = GROUPED_MATMUL_ALL_REDUCE_RMS_NORM.dispatch(given)
    normed = rows if fp8 is None else fp8_of(rows, scales, fp8)
    return (DeferredNorm(normed, squares, eps) if factored else normed), hidden


class GroupedMatmulAllReduceRMSNorm(MoeOp):
    """sizes of a case: T, k, experts in all, H, K.

    Its field ``held`` has the number of whole experts of a rank; without it a rank has slices of all.
    """

    name, alias = "grouped_matmul_all_reduce_rms_norm", "moe-ar-rms-norm"
    bits = "depend on T, k, the experts, W and the design"
    designs = {"in_norm": SumInNorm, "sequential": SumThenNorm}
    calls = PairsCall
    sizes = ("T", "k", "H")
    dtypes = FLOATS
    spans_nodes = True
    pinned = slice(1, None)
    # The rank's experts, its share of their features, its summand.
    differs = {**OWN_SCHEDULE, **OWN_FEATURES, "shared": (), "gate": ()}

    # --- choosing ----------------------------------------------------------------------------------------------------

    def call_of_case(self, case: Case, machine: Machine) -> PairsCall:
        T, k, _, H, _ = case.sizes
        return self.call_of((T, k, H), case.dtype, machine, case.design)

    def rule(self, call: PairsCall, machine: Machine) -> tuple[str, str]:
        """By hops; not measured.

        With two a program loads a row of each rank, too many for all choices at once.
        """
        if machine.nodes > 1:
            return "sequential", f"{machine.nodes} nodes: the norm is no part of the all-reduce's kernels"
        if ALL_REDUCE_RMS_NORM.plan(call.norm, machine).name == "one_shot":
            return (
                "in_norm",
                "one hop: the norm's kernel loads all choices of a row at once, and moe_sum is not launched",
            )
        return "sequential", "two hops: the loads of all choices would not fit the registers"

    def default(self, name: str, call: PairsCall, machine: Machine) -> Any:
        if name == "in_norm" and machine.nodes > 1:
            raise ValueError(
                f"{self.name}: algorithm='in_norm' is of one node, and the team has {machine.nodes}; pass 'sequential'"
            )
        return self.designs[name]()

    def table_key(self, call: PairsCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.tokens, call.choices, call.width), machine.world_size

    def space(self, call: PairsCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        for algorithm in ALL_REDUCE_RMS_NORM.algorithms[: 1 if quick else None]:
            yield from (SumInNorm(norm=algorithm), SumThenNorm(norm=algorithm))

    # --- running -----------------------------------------------------------------------------------------------------

    def planned(self, given: PairsArguments, team: Team) -> Planned:
        """Plan of a call."""
        sizes = len(given.routing.ids), given.gemm.schedule.choices, given.gemm.weight.shape[1]
        return self.plan(PairsCall(*sizes, given.gemm.dtype, given.algorithm), machine_of(team))

    def run(self, design: SumInNorm | SumThenNorm, team: Team, given: PairsArguments) -> tuple[torch.Tensor, ...]:
        """(normed, hidden), or if ``given.deferred`` (scaled, hidden, squares), of checked arguments.

        In a ``given.format`` of fp8 rows and their scales in place of normed or scaled.
        """
        self.check_design(design)
        y = GROUPED_MATMUL.forward(given.gemm)
        first, count, shared, gate = given.first, len(given.gemm.weight), given.shared, given.gate
        summed: torch.Tensor | PairSum
        if isinstance(design, SumThenNorm):
            summed = moe_sum(y, given.routing, Experts(first + count, first, count), shared=shared, gate=gate)
        else:
            ids, weights = (tensor.contiguous() for tensor in given.routing)
            summand = Shared.of(shared, gate)
            summed = PairSum(y, tl.constexpr(ids.shape[1]), ids, weights, count, 2 * first + 3, *summand[:3])
        by = ALL_REDUCE_RMS_NORM.plan_of(given.residual, team, Sums(design.norm))
        if given.format is not None:
            check_e4m3(self.name, team.caps)
        of_norm = given.residual, given.norm, given.eps, given.deferred, given.format
        return ALL_REDUCE_RMS_NORM.run(by, team, summed, *of_norm)

    def forward(self, given: PairsArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        team = find_team(given.team)
        return self._with_all(given, self.run(self.planned(given, team).design, team, given))

    def _with_all(self, given: PairsArguments, made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(rows, scales, hidden, squares) of what ``run`` made, [0] in place of what it did not."""
        none, rows, *more = given.residual.new_empty(0, dtype=torch.float32), *made
        scales = none if given.format is None else more.pop(0)
        return rows, scales, more[0], more[1] if given.deferred else none.clone()

    def examine(self, given: Mapping[str, Any]) -> None:
        check_distinct(self.name, given["ids"])

    def fake(self, given: PairsArguments) -> tuple[torch.Tensor, ...]:
        sums = Sums(self.planned(given, find_team(given.team)).design.norm)
        like = ALL_REDUCE_RMS_NORM.like(given.residual, given.team, sums, given.deferred, given.format)
        return self._with_all(given, like)

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """x, this rank's experts, ids, weights, residual, norm; then shared and gate, if any."""
        T, k, total, H, K = case.sizes
        same = Draw(case, 0, draw.call, draw.device)
        ids, weights = draw_ids(same, T, k, total), same.own("weights", (T, k)).abs()
        x, weight = draw.own("x", (T * k, K)), draw.own("weight", (experts_of(case, total, rank).count, H, K), K**-0.5)
        residual, norm = draw.shared("residual", (T, H)), 1 + draw.shared("norm", (H,), dtype=norm_dtype(case)) / 8
        inputs = x, weight, ids, weights, residual, norm, *drawn_beside(draw, (T, H), draw.shared)
        if case.field("bias"):
            inputs += (draw.own("bias", weight.shape[:2]),)
        return with_scales(case, inputs, 1)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        """[2, T, H]: normed and hidden."""
        T, k, total, H, _ = case.sizes
        _, _, ids, weights, residual, norm, *_ = by_rank[rank]
        hidden, flat = residual.double(), ids.flatten()
        for source, tensors in enumerate(by_rank):
            x, weight, _, _, _, _, *shared = with_matrix(case, tensors, 1)
            bias = shared.pop().double() if case.field("bias") else None
            x, weight = exact_operands(case, x, weight)
            experts, y = experts_of(case, total, source), torch.zeros((T * k, H), dtype=torch.float64, device=x.device)
            place = 0
            for e in range(experts.count):
                pairs = (flat == experts.first + e).nonzero().flatten()
                rows = x[place : place + len(pairs)] @ weight[e].T
                y[pairs] = rows if bias is None else rows + bias[e]
                place += len(pairs)
            hidden = hidden + (y.view(T, k, H) * weights.double()[..., None]).sum(1) + exact_beside(shared)
        return torch.stack((case.exact_norm(hidden.to(case.dtype), norm), hidden))

    def accuracy(self, case: Case) -> Accuracy:
        _, k, _, H, K = case.sizes
        # By row, since a token's rounding errors grow with its weights.
        return Accuracy(terms=K + k + case.world_size + 2 + H, partials=1, by_row=True, replicated=True)

    def arguments(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple:
        """Positional arguments of the function up to norm, then shared and gate, if any."""
        x, weight, ids, weights, residual, norm, *shared = with_matrix(case, tensors, 1)
        x = quantized_rows_of(case, x) if case.field("fp8") else x
        experts = experts_of(case, case.sizes[2], team.rank)
        return x, weight, moe_schedule(ids, experts), Routing(ids, weights), experts, residual, norm, *shared

    def results(self, case: Case, team: Team, *arguments: Any) -> tuple[torch.Tensor | DeferredNorm, torch.Tensor]:
        *of_experts, residual, norm = arguments[:7]
        *shared, bias = arguments[7:] if case.field("bias") else (*arguments[7:], None)
        beside, deferred = dict(zip(("shared", "gate"), shared, strict=False)), bool(case.field("deferred"))
        if isinstance(case.design, str):
            named = {"factored": deferred, "algorithm": case.design, "bias": bias, **beside}
            given = *of_experts, residual, norm, case.eps, team
            normed, hidden = grouped_matmul_all_reduce_rms_norm(*given, **named)
            if format := format_of(case, hidden):
                rows, hidden = grouped_matmul_all_reduce_rms_norm(*given, **named, fp8=format)
                normed = agreed(normed, rows, format)
            return normed, hidden
        x, weight, schedule, routing, experts = of_experts
        gemm = GroupedArguments.of(x, weight, schedule, False, bias=bias)
        kept = beside.get("shared"), beside.get("gate")
        given = PairsArguments(gemm, routing, experts.first, *kept, residual, norm, case.eps, deferred, team.name, AUTO)
        normed, hidden, *squares = self.run(case.design, team, given)
        return (DeferredNorm(normed, squares[0], case.eps) if deferred else normed), hidden

    def defined(self, case: Case, team: Team, out: tuple, *tensors: torch.Tensor) -> torch.Tensor:
        normed, hidden = out
        return torch.stack((normed.normed() if isinstance(normed, DeferredNorm) else normed, hidden))

    def cases(self) -> Iterator[Case]:
        case = self.case
        for design in ("in_norm", "sequential"):
            yield case(2, BF16, 5, 3, 4, 72, 24, design=design, held=2)
            yield case(3, FP32, 3, 2, 5, 36, 16, design=design, shared="gated", deferred=True)
        for w in (1, 4):
            yield case(w, BF16, 3, 2, 2 * w, 40, 16, design="in_norm", held=2)
        for skew in ("last expert", "none", "recorded"):
            yield case(2, FP16, 4, 2, 4, 40, 16, design="in_norm", held=2, skew=skew)
        # A row of several programs, each of which loads part of every choice's.
        yield case(2, FP16, 2, 2, 4, 640, 16, design="in_norm", shared="ungated")
        for w, design, deferred in (
            (2, SumInNorm(norm="two_shot"), False),
            (2, SumThenNorm(norm="two_shot"), True),
            (3, SumInNorm(norm="two_shot"), True),
        ):
            yield case(w, BF16, 5, 2, w, 304, 16, design=design, held=1, deferred=deferred, shared="gated")
        for fields in ({"block_fp8": True, "fp8": True, "held": 2}, {"channel_fp8": True}, {"block_fp8": True}):
            yield case(2, BF16, 5, 3, 4, 136, 272, **fields)
        for fields in (
            {"held": 2, "design": "in_norm"},
            {"shared": "gated", "design": "sequential"},
            {"block_fp8": True},
        ):
            yield case(2, BF16, 5, 3, 4, 136, 272, bias=True, **fields)
        for design in ("in_norm", "sequential"):
            yield case(2, BF16, 5, 3, 4, 72, 24, design=design, held=2, wide_norm=True, deferred=design == "in_norm")
        for w, design, deferred, kind in (
            (2, "in_norm", False, "group"), (2, "sequential", True, "group"), (3, "in_norm", True, "static"),
            (2, "in_norm", False, "token"),
        ):  # fmt: skip
            fields = {"design": design, "deferred": deferred, "fp8_rows": kind, "block_fp8": True}
            yield case(w, BF16, 5, 3, 2 * w, 400, 272, held=2, **fields)
        yield case(2, BF16, 0, 2, 4, 48, 16, held=2)
        yield case(8, BF16, 2, 8, 8, 40, 16, held=1)

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for T in (1, 7, 128, 700):
                for design in ("in_norm", "sequential"):
                    for fp8 in ({}, {"block_fp8": True, "fp8": True}, *([{"channel_fp8": True}] if T == 7 else ())):
                        sizes = T, 8, 128, 2048, 768
                        fields = fp8 | ({"fp8_rows": "group"} if fp8 and T != 128 else {})
                        yield self.case(w, BF16, *sizes, design=design, held=128 // w, deferred=T == 7, **fields)

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, shape.hidden, shape.features

    def flops(self, sizes: Sequence[int]) -> int:
        return GROUPED_MATMUL.flops(sizes)

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Only experts that are chosen are read."""
        shape = MoeShape(*sizes)
        rows = shape.pairs * (shape.features + 2 * shape.hidden) + 3 * shape.tokens * shape.hidden
        return int((shape.active * shape.hidden * shape.features + rows) * dtype.itemsize)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        tokens, _, _, hidden, _ = sizes
        return 2 * tokens * hidden * dtype.itemsize * (world_size - 1) // world_size

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        shape = MoeShape(*sizes)
        return shape.tokens * shape.hidden * dtype.itemsize


GROUPED_MATMUL_ALL_REDUCE_RMS_NORM = register(GroupedMatmulAllReduceRMSNorm())

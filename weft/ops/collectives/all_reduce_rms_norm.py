"""Fused all-reduce + residual + RMSNorm, the step between the halves of a tensor-parallel layer.

hidden[t, :] = round(sum over s of x_s[t, :] + residual[t, :])                  summed in fp32, rounded once to x.dtype
normed[t, :] = round(hidden[t, :] / sqrt(mean(hidden[t, :]^2) + eps) * weight)  from the rounded hidden, in fp32
deferred:    round(hidden[t, :] * weight) and the parts' shares of mean(hidden[t, :]^2), for the GEMM that follows
one_shot   a row --to all--> sum, norm                          1 hop
two_shot   W rows --one to each--> sum --to all--> W norms      2 hops, fewer bytes
tree       either with the sum in a tree over the ranks, of the same bits on any number (weft.ops.collectives.tree_norm)

A row is cut into parts of about 512 bytes, a program each, because one program is slow to push a whole row to three peers. The
programs of a row exchange their sums of squares through the GPU's own memory. A deferred RMS scale needs no exchange, which
saves a fifth to a third of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from weft.costs import fitted, pushes
from weft.costs.choice import least
from weft.costs.gpu import gpu_of
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import (
    COLUMNS,
    Fp8,
    RowFormat,
    RowsBeside,
    check_e4m3,
    empty_rows,
    fp8_of,
    quantized_parts,
    rows_argument,
    written_of,
)
from weft.kernels.pair_sums import PairSum
from weft.ops.case import Accuracy, Case, Draw, Inputs, agreed, format_of, norm_dtype, sum_of
from weft.ops.collectives import all_reduce, cases, fp8_wire, tree_norm
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import (
    OWN_FIRST,
    PLAIN_SUMS,
    RANK_ORDER,
    CollectiveCall,
    NormCall,
    OneShot,
    Sums,
    TwoShot,
    checked_shape,
)
from weft.ops.collectives.copy_engine import add_up
from weft.ops.collectives.norm_kernel import Norm, Summands, all_reduce_rms_norm_kernel, sums_of
from weft.ops.collectives.space import ROW_PARTS
from weft.ops.collectives.tree import Tree
from weft.ops.collectives.tree_norm import TreeThenNorm
from weft.ops.elementwise.add_rms_norm import ADD_RMS_NORM, ADD_RMS_NORM_FP8
from weft.ops.knobs import design_type
from weft.ops.local import check_rounds, norm_dtypes
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import (
    FLOATS,
    HALVES,
    check_choice,
    check_flag,
    check_has_rows,
    check_is_tensor,
    check_scalar,
    check_tensor,
)
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.team.team import Team, find_team
from weft.transport.plans import LINE_BYTES, PushPlan
from weft.transport.push import launch, slots_of

MAX_ROW_BYTES = 65536
# Four H200s, a row of 5,120: 4.1 us in parts, 6.2 by one program (lab/h200-x4-collectives.json@cd3ccc0).
PART_BYTES = 512
# Two H200s, one shot of more programs of 512 bytes than this an SM: 413 rows of 6 KiB 16.4 us, with parts twice as long 14.8;
# 800 of 8 KiB 36.4 and 27.7, 53 of 16 KiB 8.7 and 8.2 (lab/h200-regret-unseen/w2.json). More bytes were not measured.
MANY_PER_SM, MOST_BYTES = 8, 8 << 20
# Most programs of an SM that put rows in fp8 in two shots: W rows and their bytes are in registers at once.
MOST_PER_SM_FP8 = 12
# Columns of a part of a row that travels in fp8, a power of two, and warps of a program.
FP8_PARTS = ((256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4))


@design_type
class ReduceThenNorm:
    """An all-reduce over nodes, then ``add_rms_norm``."""

    reduce: Planned


Design = OneShot | TwoShot | ReduceThenNorm | Tree | TreeThenNorm


class AllReduceRMSNorm(Op):
    name, alias = "all_reduce_rms_norm", "all-reduce-rms-norm"
    bits = {
        "one_shot": RANK_ORDER,
        "two_shot": RANK_ORDER,
        "over_nodes": OWN_FIRST,
        "tree": INVARIANT,
        "tree_then_norm": INVARIANT,
    }
    designs = {
        "one_shot": OneShot,
        "two_shot": TwoShot,
        "over_nodes": ReduceThenNorm,
        "tree": Tree,
        "tree_then_norm": TreeThenNorm,
    }
    internal = ("over_nodes", "tree", "tree_then_norm")
    sizes = ("shape",)
    form = "rows"
    moves_quickly = True
    dtypes = FLOATS
    variants = options = ("invariant", "fp8_wire")
    spans_nodes = True
    differs = {"x": ()}  # of residual's shape, or partials of it, as many as the rank has

    def call_of(
        self,
        sizes: Sequence[Any],
        dtype: torch.dtype,
        machine: Machine,
        design: str = AUTO,
        invariant: bool = False,
        fp8_wire: bool = False,
    ) -> NormCall:
        shape = checked_shape(self.name, sizes[0])
        check_row(shape[-1] if shape else 0, dtype.itemsize)
        row_bytes = shape[-1] * dtype.itemsize
        return NormCall(math.prod(shape) * dtype.itemsize, row_bytes, dtype, design, invariant, fp8_wire)

    def choose(self, call: NormCall, machine: Machine) -> Planned:
        if call.fp8_wire:
            fp8_wire.check_call(self.name, call, machine)
        if call.invariant and call.design == AUTO:
            return tree_norm.planned(self.name, call, machine, self.default)
        if machine.nodes == 1:
            return super().choose(call, machine)
        if call.design != AUTO:
            raise ValueError(
                f"{self.name}: algorithm={call.design!r} is of one node, and the team has {machine.nodes}; leave it out"
            )
        reduce = ALL_REDUCE.plan(CollectiveCall(call.nbytes, call.dtype), machine)
        reason = f"{machine.nodes} nodes: no kernel waits for a rail, so the norm follows the all-reduce"
        return Planned("over_nodes", ReduceThenNorm(reduce=reduce), reason)

    def table_key(self, call: NormCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        width = call.row_bytes // call.dtype.itemsize
        name = f"{self.name}+fp8_wire" if call.fp8_wire else self.name
        return name, (call.nbytes // call.row_bytes, width), machine.world_size

    def tuned(self, call: NormCall, machine: Machine) -> Planned | None:
        planned = None if machine.world_size == 1 else super().tuned(call, machine)
        # The programs of a row wait for each other: all must be resident.
        fits = (
            planned is not None
            and parts_of(call.row_bytes, call.dtype.itemsize, planned.design.push) <= machine.caps.sms
        )
        return planned if fits else None

    def no_row(self, call: NormCall, machine: Machine) -> str:
        return "" if machine.world_size == 1 else super().no_row(call, machine)

    def space(self, call: NormCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        searched = machine.world_size > 1 and machine.nodes == 1 and not call.invariant
        for kind in (OneShot, TwoShot) if searched else ():
            for part, num_warps in () if call.fp8_wire else ROW_PARTS:
                parts = min(cdiv(call.row_bytes, part), machine.caps.sms)
                row_bytes = cdiv(call.row_bytes, parts * LINE_BYTES) * LINE_BYTES
                per_sm = max(1, 16 // num_warps)
                push = PushPlan(transport="lamport", row_bytes=row_bytes, num_warps=num_warps, programs_per_sm=per_sm)
                yield kind(push=push)
            for columns, num_warps in FP8_PARTS if call.fp8_wire else ():
                yield kind(push=fp8_push(call, machine, columns, num_warps))

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        # A part's length is the row's, divided evenly.
        return (one for one in super().around(design, machine, quick) if one.push.row_bytes == design.push.row_bytes)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        return 2 * math.prod(sizes) * dtype.itemsize * (world_size - 1) // world_size

    def traffic_of(self, case: Case) -> int:
        return fp8_wire.sent(super().traffic_of(case), case)

    def rule(self, call: NormCall, machine: Machine) -> tuple[str, str]:
        if machine.world_size == 1:
            return "one_shot", "one rank: nothing to send"
        return least(self.times(call, machine), machine.caps)

    def times(self, call: NormCall, machine: Machine) -> dict[str, float]:
        """Predicted µs by design."""
        width = call.row_bytes // call.dtype.itemsize
        sizes = call.nbytes // call.row_bytes, width, call.dtype.itemsize, machine.world_size
        return pushes.all_reduce_rms_norm(gpu_of(machine.caps), fitted.read(), *sizes, call.fp8_wire)

    def default(self, name: str, call: NormCall, machine: Machine) -> OneShot | TwoShot:
        if call.fp8_wire and machine.world_size > 1:
            # W rows of a part are in registers at once.
            columns = 512 if name == "one_shot" else 1024 // next_power_of_2(machine.world_size)
            return self.designs[name](push=fp8_push(call, machine, columns, 1))
        # No more parts than SMs, so that all programs of a row are resident.
        many = MANY_PER_SM * machine.caps.sms * PART_BYTES < call.nbytes <= MOST_BYTES
        longer = many and name == "one_shot" and machine.world_size == 2
        parts = min(cdiv(call.row_bytes, PART_BYTES * (1 + longer)), machine.caps.sms)
        row_bytes = cdiv(call.row_bytes, parts * 16) * 16
        return self.designs[name](
            push=PushPlan(transport="lamport", row_bytes=row_bytes, num_warps=1, programs_per_sm=16)
        )

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        weight = 1 + draw.shared("weight", case.sizes[-1:], dtype=norm_dtype(case)) / 8
        return all_reduce.drawn(case, draw), draw.shared("residual", case.sizes), weight

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        """[2, ...]: normed and hidden."""
        _, residual, weight = by_rank[rank]
        whole = [all_reduce.whole_of(case, x) for x, _, _ in by_rank]
        hidden = (fp8_wire.reference(case, whole) if case.field("fp8_wire") else sum_of(whole)) + residual.double()
        return torch.stack((case.exact_norm(hidden.to(case.dtype), weight), hidden))

    def accuracy(self, case: Case) -> Accuracy:
        if case.field("fp8_wire"):
            return fp8_wire.accuracy(case, terms=case.world_size + 1 + case.sizes[-1])
        # Over nodes their sums are rounded, and once more before the residual is added.
        nodes = case.field("nodes")
        partials = nodes + 2 if nodes else 1
        return Accuracy(terms=case.world_size + 1 + case.sizes[-1], partials=partials, replicated=True)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        normed, hidden = self.results(case, team, *tensors)
        return torch.stack((normed.normed() if isinstance(normed, DeferredNorm) else normed, hidden))

    def results(
        self, case: Case, team: Team, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor | DeferredNorm, torch.Tensor]:
        deferred = bool(case.field("deferred"))
        arguments, options = (x, residual, weight, case.eps, team), {"invariant": bool(case.field("invariant"))}
        options["wire"] = "fp8" if case.field("fp8_wire") else "same"
        if isinstance(case.design, str):
            options |= {"factored": deferred, "algorithm": case.design}
        if format := format_of(case, residual):
            normed, _ = all_reduce_rms_norm(*arguments, **options)
            rows, hidden = all_reduce_rms_norm(*arguments, **options, fp8=format)
            return agreed(normed, rows, format), hidden
        if isinstance(case.design, str):
            return all_reduce_rms_norm(*arguments, **options)
        normed, hidden, *squares = self.run(case.design, team, x, residual, weight, case.eps, deferred)
        return (DeferredNorm(normed, squares[0], case.eps) if deferred else normed), hidden

    cases, large_cases = cases.rms_norm_cases, cases.large_rms_norm_cases

    def plan_of(self, residual: torch.Tensor, team: Team, sums: Sums) -> Design:
        """Design for tensors of the shape and dtype of ``residual``."""
        row_bytes, here = residual.shape[-1] * residual.itemsize, machine_of(team)
        call = NormCall(residual.nbytes, row_bytes, residual.dtype, sums.algorithm, sums.invariant)
        return self.plan(fp8_wire.asked(self, sums.wire, call, here), here).design

    def run(
        self,
        design: Design,
        team: Team,
        x: torch.Tensor | PairSum,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        deferred: bool = False,
        format: RowFormat | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(normed, hidden), or if ``deferred`` (scaled, hidden, squares): new contiguous tensors.

        In a ``format`` of fp8 rows and their scales, in place of normed or scaled, and with rows ``beside`` these last.
        Arguments are checked, of any strides. x: of a tree also its nodes.
        """
        self.check_design(design)
        if isinstance(design, (ReduceThenNorm, TreeThenNorm)):
            in_tree, reduce = isinstance(design, TreeThenNorm), design.reduce.design
            if in_tree:
                nodes = x.contiguous().view(-1, *residual.shape)
                total = ALL_REDUCE.run_of_nodes(reduce, team, nodes, residual.dtype)
            else:
                total = ALL_REDUCE.run(reduce, team, _joined(x, residual, team))
            if format is not None:
                return ADD_RMS_NORM_FP8.forward(total, residual, weight, eps, format, in_tree)
            return ADD_RMS_NORM.forward(total, residual, weight, eps, in_tree)
        if format is not None and format.kind == "token":
            # The parts of a row would have to wait for each other once more.
            normed, *more = self.run(design, team, x, residual, weight, eps, deferred)
            return *quantized_parts(normed, format, team.caps), *more, *(normed for _ in range(format.beside))
        width, itemsize, fp8 = residual.shape[-1], residual.itemsize, None
        in_tree, design = isinstance(design, Tree), design.hops.design if isinstance(design, Tree) else design
        plan, two_shot = push_of(design, itemsize, format), isinstance(design, TwoShot)
        hidden = torch.empty_like(residual, memory_format=torch.contiguous_format)
        beside: list[torch.Tensor] = []
        if format is None:
            made = (normed := torch.empty_like(hidden),)
        else:
            made = normed, scales = empty_rows(residual, *residual.shape, format)
            beside = [torch.empty_like(hidden) for _ in range(format.beside)]
            fp8 = rows_argument(scales, format, residual.dtype, COLUMNS.value, *beside)
        rows = residual.numel() // max(1, width)
        in_fp8 = plan.transport == "fp8"
        sent = 1 if in_fp8 else itemsize  # bytes of a column
        parts = parts_of(width * itemsize, itemsize, plan)
        squares = residual.new_empty((*residual.shape[:-1], parts), dtype=torch.float32) if deferred else None
        if rows > 0:
            tiles = cdiv(rows, team.size) if two_shot else rows
            word = 4 if in_fp8 else itemsize
            resident = slots_of(team, plan, word).programs
            if parts > resident:
                raise ValueError(
                    f"{self.name}: {parts} programs of a row wait for each other, and a rank holds {resident} at a time; "
                    f"run it where as many fit, as with weft.simulate(sms={parts})"
                )
            programs = resident // parts * parts
            if squares is not None:
                sums = squares, squares
            else:
                sums = sums_of(team, plan, word, next_power_of_2(team.size) if two_shot else 1, parts)
            if isinstance(x, torch.Tensor):
                count = tl.constexpr(x.shape[0] if x.dim() > residual.dim() else 1)
                x = Summands(x.contiguous(), residual.numel(), count)
            launch(
                all_reduce_rms_norm_kernel,
                x,
                hidden,
                rows,
                min(tiles * parts, programs),
                team,
                plan,
                Norm(normed, residual.contiguous(), weight.contiguous(), eps, *sums, fp8),
                WIDTH=width,
                PART=plan.row_bytes // sent,
                TWO_SHOT=two_shot,
                DEFERRED=deferred,
                TREE=in_tree,
            )
        return (*made, hidden, *beside) if squares is None else (*made, hidden, squares)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        team: str,
        sums: Sums = PLAIN_SUMS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        members = find_team(team)
        return self.run(self.plan_of(residual, members, sums), members, x, residual, weight, eps)

    def fake(self, x, residual, weight, eps, team, sums):
        return self.like(residual, team, sums)

    def like(
        self, residual: torch.Tensor, team: str, sums: Sums, deferred: bool = False, format: RowFormat | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Empty tensors like the results of ``run``."""
        normed, hidden = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
        made = (normed,) if format is None else empty_rows(residual, *residual.shape, format)
        if not deferred:
            beside = format is not None and format.beside
            return *made, hidden, *(torch.empty_like(hidden) for _ in range(beside))
        plan = push_of(self.plan_of(residual, find_team(team), sums), residual.itemsize, format)
        parts = parts_of(residual.shape[-1] * residual.itemsize, residual.itemsize, plan)
        return *made, hidden, residual.new_empty((*residual.shape[:-1], parts), dtype=torch.float32)


class AllReduceDeferredNorm(Op):
    """AllReduceRMSNorm with a deferred RMS scale: a torch op by itself, since it has one result more."""

    name = alias = "all_reduce_deferred_norm"
    differs = AllReduceRMSNorm.differs

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, team: str, sums: Sums = PLAIN_SUMS
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        members = find_team(team)
        design = ALL_REDUCE_RMS_NORM.plan_of(residual, members, sums)
        return ALL_REDUCE_RMS_NORM.run(design, members, x, residual, weight, 0.0, deferred=True)

    def fake(self, x, residual, weight, team, sums):
        return ALL_REDUCE_RMS_NORM.like(residual, team, sums, deferred=True)


class AllReduceRMSNormFp8(Op):
    """AllReduceRMSNorm and AllReduceDeferredNorm with rows in fp8.

    Results are rows, scales, hidden, and if deferred squares, or rows of 16 bits where the format has them beside.
    """

    name = alias = "all_reduce_rms_norm_fp8"
    differs = AllReduceRMSNorm.differs

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        team: str,
        sums: Sums,
        deferred: bool,
        format: RowFormat,
    ) -> list[torch.Tensor]:
        members = find_team(team)
        check_e4m3("all_reduce_rms_norm", members.caps)
        design = ALL_REDUCE_RMS_NORM.plan_of(residual, members, sums)
        return list(ALL_REDUCE_RMS_NORM.run(design, members, x, residual, weight, eps, deferred, format))

    def fake(self, x, residual, weight, eps, team, sums, deferred, format):
        return list(ALL_REDUCE_RMS_NORM.like(residual, team, sums, deferred, format))


ALL_REDUCE_RMS_NORM = register(AllReduceRMSNorm())
_FP8 = define(AllReduceRMSNormFp8())
_DEFERRED = define(AllReduceDeferredNorm())


def push_of(design: OneShot | TwoShot, itemsize: int, format: RowFormat | None) -> PushPlan:
    """Plan of a design's pushes, whose parts have whole groups of columns where rows are put in fp8."""
    if format is None or format.kind != "group" or design.push.transport == "fp8":
        return design.push
    grain, per_sm = COLUMNS.value * itemsize, design.push.programs_per_sm
    if isinstance(design, TwoShot):
        per_sm = min(per_sm, MOST_PER_SM_FP8)
    return replace(design.push, row_bytes=cdiv(design.push.row_bytes, grain) * grain, programs_per_sm=per_sm)


def parts_of(row_bytes: int, itemsize: int, plan: PushPlan) -> int:
    """Number of parts of a row of ``row_bytes``, whose columns have ``itemsize``."""
    return cdiv(row_bytes // itemsize if plan.transport == "fp8" else row_bytes, plan.row_bytes)


def fp8_push(call: NormCall, machine: Machine, columns: int, num_warps: int) -> PushPlan:
    """Plan of pushes in fp8, in parts of ``columns`` or the multiple that leaves no more parts than SMs."""
    width = call.row_bytes // call.dtype.itemsize
    columns = max(min(columns, next_power_of_2(width)), COLUMNS.value, next_power_of_2(cdiv(width, machine.caps.sms)))
    return PushPlan(transport="fp8", row_bytes=columns, num_warps=num_warps, programs_per_sm=max(1, 16 // num_warps))


def _joined(x: torch.Tensor, residual: torch.Tensor, team: Team) -> torch.Tensor:
    """Summand like ``residual``: ``x``, or the sum of its split-K partials, rounded once."""
    if x.dim() == residual.dim():
        return x
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        partials = x.contiguous().view(len(x), -1)
        add_up(partials[0], partials[1:], out, team.node, None)
    return out


def takes_rows(row_bytes: int) -> bool:
    """True if the op takes rows of this length."""
    return row_bytes % 16 == 0 and 0 < row_bytes <= MAX_ROW_BYTES


def check_row(width: int, itemsize: int) -> None:
    """ValueError unless a row of ``width`` elements can be cut into parts."""
    row_bytes = width * itemsize
    if not takes_rows(row_bytes):
        raise ValueError(
            f"all_reduce_rms_norm: rows of {width} elements have {row_bytes} bytes, not a multiple of 16 from "
            f"16 to {MAX_ROW_BYTES}; use all_reduce and torch's rms_norm"
        )


def check_factored(op: str, factored: bool, team: Team) -> None:
    """ValueError unless ``factored`` is a flag, and False for a team of several nodes."""
    check_flag(op, "factored", factored)
    if factored and isinstance(team, Team) and team.rail is not None:
        raise ValueError(
            f"{op}: factored=True is for a norm within the all-reduce's kernel, and the team has {team.shape}; leave it out"
        )


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    team: Team,
    algorithm: str = "auto",
    *,
    factored: bool = False,
    fp8: RowFormat | None = None,
    invariant: bool = False,
    wire: str = "same",
) -> tuple[torch.Tensor | Fp8 | RowsBeside | DeferredNorm, torch.Tensor]:
    """(RMSNorm(hidden) * ``weight``, hidden), where hidden = sum of all ranks' ``x`` + ``residual``.

    x          [..., H], any strides, fp16, bf16 or fp32, on ``team.device``, H a multiple of 16 bytes and at most 64 KiB; or
               split-K partials from ``matmul_parts``: fp32 [partials, ..., H], with a residual of 2 bytes, added up in
               order and rounded to residual's dtype before they are sent
    residual   the same on all ranks, of x's shape and dtype
    weight     [H] of residual's dtype, or fp32
    algorithm  "auto" (the least predicted time), "one_shot" or "two_shot"
    factored   return a DeferredNorm in place of the normed rows, for the GEMMs that follow: faster, since no part of a row
               waits for another. fp16 may overflow, since hidden * weight is not yet divided. For a team of one node
    fp8        the normed rows, or the DeferredNorm's, are rounded to 16 bits, then put in fp8 so; ``row_format`` of the
               weight that follows. residual is then [T, H]. With a scale for each token by a kernel more. With ``beside``,
               of whole norms alone, a ``RowsBeside`` is returned
    invariant  the bits of ``all_reduce(invariant=True)``, then ``add_rms_norm(invariant=True)``, which are the same on 1, 2, 4
               and 8 ranks: the sum is a tree in rank order, each node of it rounded to x's dtype, of 16 bits, before the
               residual is added. x may be a rank's nodes, [nodes, ..., H] of a power of two of neighbours, at most 8 / W, in
               place of partials. With algorithm "auto", whole norms
    wire       "same": x travels in residual's dtype; "fp8", "auto": as of ``all_reduce``, whose bound holds for hidden. The
               residual does not travel

    New contiguous tensors of residual's shape and dtype, bitwise equal on all ranks and from run to run. The same rules for
    streams, graphs and -0.0 as ``all_reduce``. Over several nodes it is that op and ``add_rms_norm``. ValueError for wrong
    arguments. No backward.
    """
    op = "all_reduce_rms_norm"
    check_is_tensor(op, "x", x)
    check_is_tensor(op, "residual", residual)
    check_scalar(op, "eps", eps)
    check_factored(op, factored, team)
    check_flag(op, "invariant", invariant)
    of_parts = (residual.dtype,) if invariant else (torch.float32,)
    in_partials = x.dtype in of_parts and residual.dtype in HALVES and x.dim() == residual.dim() + 1
    check_tensor(op, "x", x, team, FLOATS, over_nodes=True)
    for name, tensor in (("residual", residual), ("weight", weight)):
        dtype = residual.dtype if in_partials else x.dtype
        dtypes = norm_dtypes(dtype) if name == "weight" else (dtype,)
        check_tensor(op, name, tensor, team, dtypes, over_nodes=True)
    check_choice(op, "algorithm", algorithm, ALL_REDUCE_RMS_NORM.algorithms)
    if wire != "same":
        check_choice(op, "wire", wire, fp8_wire.WIRES)
    check_has_rows(op, "x", x)
    if invariant:
        tree_norm.check(op, x, residual, team.size, algorithm, factored)
    if in_partials and x.shape[0] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, no partial; pass the result of matmul_parts")
    whole, partials = (
        (x.shape[1:], " in nodes" if invariant else " in split-K partials") if in_partials else (x.shape, "")
    )
    for name, tensor, shape in (("residual", residual, whole), ("weight", weight, whole[-1:])):
        if tensor.shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}; with x of {tuple(x.shape)}{partials} it "
                f"must be {tuple(shape)}"
            )
    check_row(residual.shape[-1], residual.itemsize)
    check_rounds(op, fp8, "residual", residual, beside=True)
    sums = Sums(algorithm, invariant, wire)
    if fp8 is not None:
        if factored and fp8.beside:
            raise ValueError(f"{op}: fp8.beside=True with factored=True, whose rows are not whole; pass one of the two")
        of_norm = weight, 0.0 if factored else eps
        rows, scales, hidden, *more = _FP8.dispatch(x, residual, *of_norm, team.name, sums, factored, fp8)
        if factored:
            return DeferredNorm(fp8_of(rows, scales, fp8), *more, eps), hidden
        return written_of(rows, scales, fp8, more), hidden
    if factored:
        scaled, hidden, squares = _DEFERRED.dispatch(x, residual, weight, team.name, sums)
        return DeferredNorm(scaled, squares, eps), hidden
    return ALL_REDUCE_RMS_NORM.dispatch(x, residual, weight, eps, team.name, sums)

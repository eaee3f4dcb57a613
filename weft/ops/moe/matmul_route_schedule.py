"""matmul_route_schedule: a mixture's choices from rows of hidden state, and their schedule.

    logits = x @ router.T;  routing = route(logits[:, :E]);  schedule = moe_schedule(routing.ids, experts)

fused       one kernel, for one token: programs multiply parts of H, and the last one to end does the rest
split       parts of H | route, which adds them up | moe_schedule: for few tokens
sequential  matmul | route | moe_schedule
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.costs.predicted import FUSED_LOGITS as MOST_LOGITS
from weft.kernels.operands import row_stride, rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.gemm.matmul import matmul
from weft.ops.knobs import counts, design_type, halved, knob, powers, stepped
from weft.ops.local import capabilities_of, check_like, machine_on
from weft.ops.moe.check import needs_gradients
from weft.ops.moe.choices import experts_of, schedule_by_torch
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.moe_schedule import MOE_SCHEDULE, Lists, block_for, check_schedule
from weft.ops.moe.route import MAX_EXPERTS, ROUTE, check_gating, gating_of, launch_route, scoring_of
from weft.ops.moe.router_kernel import Found, RouterForm, Rows, matmul_route_schedule_kernel, router_parts_kernel
from weft.ops.moe.routing import Experts, Gating, Routed, Routing, Schedule
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Tokens that a program multiplies at once: 16 fp32 sums a thread of 4 warps.
MOST_TOKENS = 128
# Partial sums that the last program reads, at most: 64 KiB, which one SM reads from the L2 in about 0.6 us (by its width).
MOST_PARTIALS = 16384
# Bytes of the router that a program reads at least.
LEAST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """The router's GEMM in parts of H.

    parts    programs that share a tile of logits, each with its share of H: 1 .. 32
    rows_of  rows of the router that a program multiplies, ``step`` columns at a time: powers of two, at least 16
    num_warps, num_stages  compiler options
    """

    parts: int = knob(8, counts(32), halved())
    rows_of: int = knob(16, powers(16), halved(high=64))
    step: int = knob(128, powers(16), halved(high=512))
    num_warps: int = knob(4, near=halved(1, 16))
    num_stages: int = knob(3, near=stepped())


@design_type
class OneLaunch(RouterParts):
    """One kernel: the last program to end adds up the parts, chooses and schedules."""


@design_type
class RouteOfParts(RouterParts):
    """Three launches: route adds up the parts as it loads them, and moe_schedule follows."""


@design_type
class ThreeLaunches:
    """matmul, route and moe_schedule, each by its plan."""


class RouterCall(NamedTuple):
    """Sizes that the plan depends on: T, H, E, and k choices."""

    tokens: int
    hidden: int
    experts: int
    k: int
    dtype: torch.dtype
    design: str = AUTO

    @property
    def logits(self) -> int:
        """Logits, with tokens and experts rounded up as the kernel does."""
        return next_power_of_2(max(1, self.tokens)) * max(16, next_power_of_2(self.experts))


def parts_for(call: RouterCall, kind: type[RouterParts]) -> RouterParts:
    """Design of a ``kind`` of parts where no row decides."""
    # A part is 4 KiB of the router or more, and there are as many as the programs that add them up can load quickly.
    step = 128 if call.dtype.itemsize == 2 else 32
    bytes_of_tile = 16 * call.hidden * call.dtype.itemsize
    parts = min(16, cdiv(bytes_of_tile, LEAST_BYTES), cdiv(call.hidden, step))
    if kind is RouteOfParts:
        return kind(parts=parts, step=step)
    warps = max(1, min(8, call.logits // 256))
    return kind(parts=max(1, min(parts, MOST_PARTIALS // call.logits)), step=step, num_warps=warps)


def matmul_route_schedule(
    x: torch.Tensor,
    router: torch.Tensor,
    experts: Experts,
    k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    group_limit: int = 1,
    scale: float = 1.0,
    logit_bias: torch.Tensor | None = None,
    block: int | None = None,
    tickets: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> Routed:
    """The k experts of each row of x by the router, and the pairs of this rank's experts.

    x        [T, H], fp16, bf16 or fp32; rows may be strided
    router   [E, H] of x's dtype, E = experts.total at most 1024; a row more is that of a shared expert's gate, whose logits [T]
             come back as ``gate``, else None
    experts  the ones to schedule
    k, scoring, renormalize, bias, groups, group_limit, scale   of ``weft.ops.route``
    logit_bias  [E] of x's dtype, added to the experts' logits; by "sequential" after they have been rounded, and rounded again.
             None: there is none
    block, tickets   of ``weft.ops.moe_schedule``
    algorithm  "auto", "fused" (one kernel), "split" (the GEMM in parts of H, which ``route`` adds up, for up to
               128 tokens) or "sequential" (``matmul``, ``route``, ``moe_schedule``)

    Logits are fp32 sums, rounded once to x's dtype, before experts are chosen; The same from run to run; the order of a sum
    depends on the design, so a logit's last bit may, and where two experts are that close the choice. Ranks with equal x and
    router choose alike. Nothing is read by the host. Gradients flow from weights and gate to x and router, by the sequential
    design. ValueError for arguments that do not fit.
    """
    op = "matmul_route_schedule"
    check_like(op, "x", x, None, FLOATS, ("T", "H"))
    check_like(op, "router", router, x.device, (x.dtype,))
    check_schedule(op, experts, block, tickets, x.device)
    E = experts.total
    _check_router(op, router, E, x.shape[1])
    gating = check_gating(op, E, Gating(k, scoring, renormalize, groups, group_limit, scale))
    for name, vector, dtype in (("bias", bias, torch.float32), ("logit_bias", logit_bias, x.dtype)):
        if vector is not None:
            check_like(op, name, vector, x.device, (dtype,), (E,))
    check_choice(op, "algorithm", algorithm, MATMUL_ROUTE_SCHEDULE.algorithms)
    block = block or block_for(len(x) * k, E)
    trained = needs_gradients(x, router, logit_bias)
    if trained and algorithm in ("fused", "split"):
        raise ValueError(
            f"{op}: algorithm={algorithm!r} has no backward; take 'auto', or call it under torch.no_grad()"
        )
    held = E, experts.first, experts.count
    given = RouterArguments(x, router, *held, bias, gating, block, tickets, algorithm, logit_bias)
    if trained or _is_in_three(given):
        return in_three(given)
    ids, weights, gate, *lists = MATMUL_ROUTE_SCHEDULE.dispatch(given)
    return Routed(Routing(ids, weights), Schedule(*lists, k, block), gate if len(router) > E else None)


def _check_router(op: str, router: torch.Tensor, experts: int, hidden: int) -> None:
    if router.dim() != 2 or len(router) not in (experts, experts + 1) or router.shape[1] != hidden:
        raise ValueError(
            f"{op}: router has shape {tuple(router.shape)}; it must be ({experts}, {hidden}), or ({experts + 1}, {hidden}) "
            f"with the gate of a shared expert"
        )
    if experts > MAX_EXPERTS:
        raise ValueError(f"{op}: experts.total={experts} is more than {MAX_EXPERTS}")


class RouterArguments(NamedTuple):
    """Arguments of matmul_route_schedule: experts first .. first + count - 1 of ``total`` are scheduled."""

    x: torch.Tensor
    router: torch.Tensor
    total: int
    first: int
    count: int
    bias: torch.Tensor | None
    gating: Gating
    block: int
    tickets: torch.Tensor | None
    algorithm: str
    logit_bias: torch.Tensor | None = None


def _is_in_three(given: RouterArguments) -> bool:
    """True if the plan is three launches; False while torch.compile traces, since it cannot trace a plan."""
    if torch.compiler.is_compiling():
        return False
    x = given.x
    call = RouterCall(*x.shape, given.total, given.gating.k, x.dtype, given.algorithm)
    return isinstance(MATMUL_ROUTE_SCHEDULE.plan(call, machine_on(x.device)).design, ThreeLaunches)


def in_three(given: RouterArguments) -> Routed:
    """``Routed`` by matmul, route and moe_schedule, of checked arguments."""
    x, router, total = given.x, given.router, given.total
    logits = matmul(x, router) if len(x) > 0 else x @ router.T
    of_experts = logits[:, :total] if given.logit_bias is None else logits[:, :total] + given.logit_bias
    routing = Routing(*ROUTE.dispatch(of_experts, given.bias, given.gating))
    lists = MOE_SCHEDULE.dispatch(routing.ids, given.first, given.count, given.block, 0, given.tickets)
    gate = logits[:, total] if len(router) > total else None
    return Routed(routing, Schedule(*lists, given.gating.k, given.block), gate)


class MatmulRouteSchedule(MoeOp):
    """sizes of a case: T, H, experts in all, k."""

    name, alias = "matmul_route_schedule", "moe-route"
    bits = "depend on T, the number of experts and the design"
    designs = {"fused": OneLaunch, "split": RouteOfParts, "sequential": ThreeLaunches}
    calls = RouterCall
    sizes = ("T", "H", "E", "k")
    dtypes = FLOATS
    mutates = ("tickets",)
    rare = ("fused", "split")
    pinned = slice(1, None)
    collective = False
    moves_quickly = True

    # --- choosing ----------------------------------------------------------------------------------------------------

    def rule(self, call: RouterCall, machine: Machine) -> tuple[str, str]:
        """By the number of tokens (benchmarks/lab/h200-route-parts.json)."""
        tokens = f"{call.tokens} tokens and {call.experts} experts"
        if machine.caps.arch.startswith("gfx"):
            return "sequential", f"{machine.caps.arch}: not measured"
        if call.tokens == 1:
            return "fused", f"{tokens}: one program chooses and schedules in less time than two launches take"
        if call.tokens <= MOST_TOKENS:
            return (
                "split",
                f"{tokens}, at most {MOST_TOKENS}: route adds up parts of the router's GEMM as it loads them",
            )
        return "sequential", f"{tokens}, more than {MOST_TOKENS}: the router's GEMM has enough tiles"

    def default(self, name: str, call: RouterCall, machine: Machine) -> RouterParts | ThreeLaunches:
        if name == "sequential":
            return ThreeLaunches()
        if name == "split":
            if call.tokens > MOST_TOKENS:
                raise ValueError(
                    f"{self.name}: algorithm='split' takes up to {MOST_TOKENS} tokens, not tokens={call.tokens}; pass "
                    f"'sequential' or 'auto'"
                )
            return parts_for(call, RouteOfParts)
        if call.logits > MOST_LOGITS:
            raise ValueError(
                f"{self.name}: algorithm='fused' takes up to {MOST_LOGITS} logits, tokens and experts rounded up to powers of "
                f"two; tokens={call.tokens} and experts={call.experts} are {call.logits}; pass 'sequential' or 'auto'"
            )
        return parts_for(call, OneLaunch)

    def table_key(self, call: RouterCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.tokens, call.hidden, call.experts), 1

    def tuned(self, call: RouterCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        return planned if planned is not None and planned.name in self.able(call) else None

    def able(self, call: RouterCall) -> list[str]:
        """Designs that take a call."""
        fits = {"fused": call.logits <= MOST_LOGITS, "split": call.tokens <= MOST_TOKENS}
        return [name for name in self.designs if fits.get(name, True)]

    def space(self, call: RouterCall, machine: Machine, quick: bool = False) -> Iterator[RouterParts | ThreeLaunches]:
        for name in self.able(call):
            base = self.default(name, call, machine)
            yield base
            for parts in (4, 8, 16) if isinstance(base, RouterParts) and not quick else ():
                for rows_of in (16, 32):
                    yield replace(base, parts=parts, rows_of=rows_of)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, design: RouterParts | ThreeLaunches, team: None, given: RouterArguments) -> Found:
        """Results of checked arguments."""
        self.check_design(design)
        x, router, E, first, count, bias, gating, block, tickets, _, added = given
        (T, H), R = x.shape, len(router)
        if isinstance(design, ThreeLaunches) or T == 0:
            (ids, weights), schedule, gate = in_three(given)
            return Found(ids, weights, x.new_empty(0) if gate is None else gate.contiguous(), *schedule[:4])
        x, router = rows_contiguous(x), rows_contiguous(router)
        parts, stride = min(design.parts, cdiv(H, design.step)), row_stride(router)
        ahead = router.data_ptr() % 16 == 0 and stride * router.itemsize % 16 == 0
        tokens = next_power_of_2(T)
        of_parts = parts, design.rows_of, design.step, ahead, added is not None
        form = RouterForm(E, count, R, gating.k, tokens, block, *of_parts)
        options = {"FORM": form, "num_warps": design.num_warps, "num_stages": design.num_stages}
        caps = capabilities_of(x.device)
        partials = x.new_empty((parts, T, R), dtype=torch.float32)
        programs = cdiv(R, design.rows_of) * parts
        biases = (partials if one is None else one.contiguous() for one in (bias, added))
        rows = Rows(x, row_stride(x), router, stride, *biases)
        if isinstance(design, RouteOfParts):
            launch = launch_on(
                x.device, router_parts_kernel, (form, design), lambda: {**options, **launch_options(caps)}
            )
            launch(programs, rows, partials, T, H)
            routing, gate = ROUTE.fake(x, bias, gating), x.new_empty(T if R > E else 0)
            launch_route(partials, bias, gating, routing, gate if R > E else None, experts=E)
            lists = MOE_SCHEDULE.run(Lists(block=block), None, routing.ids, first, count, 0, tickets)
            return Found(*routing, gate, *lists)
        scored = scoring_of(bias, gating)
        launch = launch_on(
            x.device,
            matmul_route_schedule_kernel,
            (form, scored, design),
            lambda: {"SCORING": scored, **options, **launch_options(caps)},
        )
        results = Found(*self.fake(given))
        arrivals = torch.zeros(1, dtype=torch.int32, device=x.device) if tickets is None else tickets
        launch(programs, rows, results, partials, arrivals, T, H, first, gating.scale)
        return results

    def forward(
        self, given: RouterArguments
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x = given.x
        call = RouterCall(*x.shape, given.total, given.gating.k, x.dtype, given.algorithm)
        return tuple(self.run(self.plan(call, machine_on(x.device)).design, None, given))

    def fake(self, given: RouterArguments) -> tuple[torch.Tensor, ...]:
        ids, weights = ROUTE.fake(given.x, given.bias, given.gating)
        gate = given.x.new_empty(len(given.x) if len(given.router) > given.total else 0)
        return (ids, weights, gate, *MOE_SCHEDULE.fake(ids, given.first, given.count, given.block, 0, given.tickets))

    # --- judging -----------------------------------------------------------------------------------------------------

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.hidden, shape.experts, shape.k

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """x, router, and a bias where the case has one.

        Integers, and eighths: sums are exact, and some are equal.
        """
        T, H, E, _ = case.sizes
        x = draw.own("x", (T, H), 1.5).round()
        router = draw.own("router", (E + bool(case.field("gated")), H), 0.7).round() / 8
        tensors: Inputs = (x, router, draw.own("bias", (E,), dtype=FP32)) if case.field("biased") else (x, router)
        return (*tensors, draw.own("logit_bias", (E,)).round()) if case.field("added") else tensors

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(weights by expert [T, E], zeros [4]), and the logits of the gate [T] where there is one.

        The zeros are numbers of wrong entries in the schedule of the choices: of pairs, counts, tiles, tile_count.
        """
        x, router, *bias = by_rank[rank]
        T, _, E, k = case.sizes
        logits = x.double() @ router.double().T
        if case.field("added"):
            logits[:, :E] += bias.pop().double()
        logits = logits.to(case.dtype)
        weights = ROUTE.reference(replace(case, sizes=(T, E, k)), 0, [(logits[:, :E], *bias)])
        return (weights, x.new_zeros(4), *logits[:, E:].T)

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[2])

    def arguments(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> tuple[Any, ...]:
        # An arrival counter that calls share, as layers do.
        shared = case.field("tickets") is not False
        return (torch.zeros(1, dtype=torch.int32, device=tensors[0].device) if shared else None, *tensors)

    def results(
        self,
        case: Case,
        team: Team | None,
        tickets: torch.Tensor | None,
        x: torch.Tensor,
        router: torch.Tensor,
        *bias: Any,
    ) -> tuple[torch.Tensor, ...]:
        """(ids, weights, pairs, counts, tiles, tile_count), and the gate where there is one."""
        _, _, E, k = case.sizes
        experts = experts_of(case, E, 0 if team is None else team.rank)
        *bias, added = bias if case.field("added") else (*bias, None)
        gating, shift = gating_of(case, k), bias[0] if bias else None
        if isinstance(case.design, str):
            named = {"bias": shift, "block": case.field("block"), "tickets": tickets, "algorithm": case.design}
            named["logit_bias"] = added
            routed = matmul_route_schedule(x, router, experts, **gating._asdict(), **named)
            return (*routed.routing, *routed.schedule[:4], *([] if routed.gate is None else [routed.gate]))
        given = RouterArguments(
            x, router, E, experts.first, experts.count, shift, gating, self._block(case), tickets, AUTO, added
        )
        ids, weights, gate, *lists = self.run(case.design, None, given)
        return (ids, weights, *lists, *([gate] if len(router) > E else []))

    def _block(self, case: Case) -> int:
        """Pairs of a tile in ``case``."""
        T, _, E, k = case.sizes
        return case.field("block") or block_for(T * k, E)

    def defined(
        self, case: Case, team: Team | None, out: tuple[torch.Tensor, ...], x: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Results in the form of ``reference``."""
        experts = experts_of(case, case.sizes[2], 0 if team is None else team.rank)
        ids, weights, *lists = out[:6]
        computed = MOE_SCHEDULE.defined(case, team, tuple(lists), ids)
        expected = schedule_by_torch(ids, experts, self._block(case), len(lists[2]))
        wrong = torch.stack([(one != other).sum() for one, other in zip(computed, expected, strict=True)]).to(x.dtype)
        by_expert = ROUTE.defined(case, team, Routing(ids, weights), x.new_empty((len(x), experts.total)))
        return (by_expert, wrong, *(gate.contiguous() for gate in out[6:]))

    def flops(self, sizes: Sequence[int]) -> int:
        shape = MoeShape(*sizes)
        return 2 * shape.tokens * shape.hidden * shape.experts

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        shape = MoeShape(*sizes)
        rows = (shape.tokens + shape.experts) * shape.hidden * dtype.itemsize
        return int(rows + shape.tokens * shape.k * (4 + dtype.itemsize) + 4 * shape.pairs)

    def cases(self) -> Iterator[Case]:
        case = functools.partial(self.case, 1)
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 136, 60, 8), (5, 40, 17, 4), (16, 24, 8, 2)):
                yield case(dtype, *sizes)
        for design in ("fused", "split", "sequential"):
            yield case(BF16, 9, 72, 20, 3, design=design, gated=True, local=(4, 9), block=16)
            yield case(FP32, 7, 64, 64, 6, design=design, scoring="sigmoid", biased=True, groups=(8, 3), scale=2.5)
            yield case(BF16, 9, 272, 20, 3, design=design, gated=True, added=True, local=(4, 9), block=16)
        yield case(FP32, 7, 64, 64, 6, design="split", scoring="sigmoid", biased=True, added=True, groups=(8, 3))
        yield case(BF16, 33, 16, 8, 2, design="fused", renormalize=False, tickets=False)
        for dtype in (FP16, BF16, FP32):
            yield case(dtype, 19, 136, 60, 8, design="split")
        yield case(BF16, 1, 40, 17, 4, design="split", tickets=False)
        yield case(BF16, 70, 32, 8, 2, design=RouteOfParts(parts=1, rows_of=32, step=32, num_warps=8, num_stages=2))
        yield case(BF16, 1, 31, 5, 5, gated=True)  # rows that begin anywhere
        yield case(BF16, 0, 16, 8, 2, gated=True)
        yield case(BF16, 40, 32, 8, 2, design=OneLaunch(parts=1, rows_of=32, step=32, num_warps=8, num_stages=2))
        yield case(BF16, 6, 16, 8, 2, design=ThreeLaunches(), gated=True)

    def large_cases(self) -> Iterator[Case]:
        for E, H, k in ((128, 2048, 8), (256, 7168, 8), (8, 4096, 2)):
            for T in (1, 2, 8, 32, 128, 4096):
                yield self.case(1, BF16, T, H, E, k, held=E // 2, gated=T == 8)


MATMUL_ROUTE_SCHEDULE = register(MatmulRouteSchedule())

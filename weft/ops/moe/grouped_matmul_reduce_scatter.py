"""grouped_matmul_reduce_scatter: second GEMM of a mixture of experts, summed at the tokens' ranks.

Design "slabs" multiplies a slab of columns while the sums of the slab before travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int
from weft.costs import fitted, grouped
from weft.costs.choice import least
from weft.costs.gpu import gpu_of
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import E4M3, Fp8
from weft.ops.case import BF16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.collectives.reduce_scatter import REDUCE_SCATTER, reduce_scatter
from weft.ops.knobs import around, counts, design_type, halved, knob
from weft.ops.local import check_shape
from weft.ops.moe.by_nodes import ByNodes, scatter_by_nodes
from weft.ops.moe.check import check_dispatched, needs_gradients
from weft.ops.moe.exchange.exchange_op import CombineArguments, channel_bytes, channel_of, choices_of_all
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.cases import exact_operands, fp8_forms, quantized_rows_of, with_matrix, with_scales
from weft.ops.moe.grouped.check import check_grouped
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedCall, GroupedTiles
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL, OWN_FEATURES, OWN_SCHEDULE, grouped_matmul
from weft.ops.moe.moe_combine import MOE_COMBINE, CombineCall
from weft.ops.moe.moe_schedule import block_for
from weft.ops.moe.moe_sum import Shared, add_up, check_shared, drawn_beside, exact_beside, moe_sum
from weft.ops.moe.overlapped import OverlappedOp, ScatterArguments, case_experts, case_start, schedule_of
from weft.ops.moe.routing import Dispatched, Experts, Routing, Schedule
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_team, check_tensor
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.team.team import find_team
from weft.transport.copy_channel import MAX_CHUNKS

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Columns of a slab at least: of 512 on they cost a grouped GEMM up to 3 % on an H200, of 256 up to 11 %.
LEAST_COLUMNS, MOST_SLABS = 512, 4
# Elements that a program of sum_slabs_kernel adds up at a time, in rows of at most BLOCK columns; its warps.
ROWS, BLOCK, WARPS = 4, 512, 4


@design_type
class Slabs:
    """GEMM by slabs of columns; copy engines carry the sums of one while the next is multiplied.

    slabs  at most this many, of whole tiles, and at most MAX_CHUNKS
    """

    tiles: GroupedTiles = knob(near=around)
    slabs: int = knob(MOST_SLABS, counts(MAX_CHUNKS), halved())

    def width(self, H: int, scaled_rows: int = 1) -> int:
        """Columns of a slab of [T, H], but of the last one, which may have fewer.

        scaled_rows  of the weight, which have a scale together
        """
        grain = max(self.tiles.block_n, scaled_rows)
        return min(cdiv(H, self.slabs * grain) * grain, H)


@triton.jit(do_not_specialize=["T", "tokens"])
def sum_slabs_kernel(out, own, received, landed, T, tokens, H, width, team, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over ranks, ascending, of what each has for token t    grid: (cdiv(T, ROWS), slabs)

    own       what this rank has for the ``tokens`` tokens of each rank: slab by slab, [W * tokens, columns of the slab]
    received  [W, tokens * H], symmetric: [s] what rank s has for this rank's tokens: slab by slab, [tokens, columns]
    landed    channel: signals the arrival of slab i of rank s; begin_kernel has begun the call
    width     columns of a slab but the last; out [T, H]

    signals   copy engine of rank s, after each slab i
    waits     before a program's first load of ``received``: slab i of all other ranks. ``own`` is of this stream
    order     ranks ascending, in fp32, rounded once
    reuse     of a half of ``received``: CopyChannel
    progress  programs wait for copy engines only, so they need not all be resident
    """
    world: tl.constexpr = wl.num_ranks(team)
    me, slab = wl.rank(team), tl.program_id(1)
    wl.follow_previous_kernel()
    call = wl.current_call(landed)
    first = slab * width
    columns = tl.minimum(width, H - first)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    own += world * tokens.to(tl.int64) * first
    received += tokens.to(tl.int64) * first
    for step in range(1, world):
        wl.chunk_wait(call, (me + step) % world, slab, team)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        there = (token < T) & (column < columns)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for source in range(world):
            if source == me:
                row = tl.load(own + (me * tokens + token).to(tl.int64) * columns + column, mask=there, other=0.0)
            else:
                of_rank = received + source * tokens.to(tl.int64) * H
                row = tl.load(of_rank + token.to(tl.int64) * columns + column, mask=there, other=0.0)
            total += row.to(tl.float32)
        tl.store(out + token.to(tl.int64) * H + first + column, total.to(out.dtype.element_ty), mask=there)


def run_slabs(design: Slabs, team: Team, given: ScatterArguments) -> torch.Tensor:
    """The GEMM slab by slab, the sums of each sent to their tokens' ranks, and the ranks' sums added up.

    y holds one slab of the GEMM's result at a time: the stream's order keeps the slabs apart. The sums of all slabs stay until
    the copy engine has been joined.

    signals  copy engine of rank r, after each slab: flags[r, slab] = epoch at the tokens' rank
    waits    the copy engine, before a slab's first copy: fork, so all work before it, the slab's moe_sum the last, has ended
             sum_slabs_kernel, before it loads a slab of a rank: that flag
    reuse    of a half of the received sums: CopyChannel

    kernels  | begin | GEMM 0 | sum 0 | GEMM 1 | sum 1 | GEMM 2 | sum 2 |          | sum of ranks |
    copy                              | slab 0 |       | slab 1 |       | slab 2 |                       three slabs
    """
    tokens, shared, dtype = given.tokens, Shared.of(given.shared, given.gate), given.gemm.dtype
    (rows, k), (held, H, _), world, me = given.routing.ids.shape, given.gemm.weight.shape, team.size, team.rank
    most, width, gemm = rows // world, design.width(H, given.gemm.scaled_rows), given.gemm.with_fp8_rows()
    channel = channel_of(team, "grouped_matmul_reduce_scatter", dtype, rows * H)
    received = channel.begin(team)[: rows * H].view(world, most * H)
    out, own, y = (gemm.x.new_empty(shape, dtype=dtype) for shape in ((tokens, H), (rows * H,), (rows * k * width,)))
    for number, first in enumerate(range(0, H, width)):
        columns = min(width, H - first)
        of_slab = y[: rows * k * columns].view(rows * k, columns)
        gemms.run(design.tiles, gemm.of_columns(first, columns), out=of_slab)
        sums = own[rows * first : rows * (first + columns)]
        beside = shared
        if shared.rows is not None:
            beside = shared._replace(rows=shared.rows[:, first : first + columns])
        add_up(of_slab, given.routing, (given.first, held), beside, sums.view(rows, columns))
        team.copy_engine.fork()
        part = most * columns
        for step in range(1, world):
            owner = (me + step) % world
            target = received[me, most * first : most * first + part]
            channel.send(team, target, sums[owner * part : (owner + 1) * part], me, number, owner)
    if tokens > 0:
        block = min(BLOCK, next_power_of_2(width))
        launch = launch_of(
            team,
            sum_slabs_kernel,
            block,
            lambda: {"ROWS": ROWS, "BLOCK": block, "num_warps": WARPS, **launch_options(team.caps)},
        )
        grid = cdiv(tokens, ROWS), cdiv(H, width)
        launch(grid, out, own, received, channel.landed.view, tokens, most, H, width, team.view)
    team.copy_engine.join()
    return out


@design_type
class Sequential:
    """grouped_matmul, then moe_combine.

    combine  None for slices of experts, or beside a shared one: moe_sum and reduce_scatter
    """

    gemm: Planned
    combine: Planned | None


class GroupedScatterCall(NamedTuple):
    """Sizes that the plan depends on.

    tokens  most of a rank; held: experts of a rank, of ``experts``
    block   pairs of a tile
    H, N    elements of a token's row, features of an expert here
    shared  True: there is a summand of all tokens beside their choices
    block_fp8, channel_fp8  of ``GroupedCall``
    """

    tokens: int
    choices: int
    experts: int
    held: int
    block: int
    H: int
    N: int
    dtype: torch.dtype
    design: str = AUTO
    shared: bool = False
    block_fp8: bool = False
    channel_fp8: bool = False

    def gemm(self, machine: Machine) -> GroupedCall:
        """Call of the grouped GEMM of all ranks' tokens."""
        pairs = machine.world_size * self.tokens * self.choices
        forms = self.block_fp8, self.channel_fp8
        return GroupedCall(self.block, pairs, self.H, self.N, self.dtype, False, AUTO, *forms)

    def is_whole(self, machine: Machine) -> bool:
        """True if moe_combine can take the results: of whole experts, without a summand beside them."""
        return self.held * machine.world_size == self.experts and not self.shared


def grouped_matmul_reduce_scatter(
    h: torch.Tensor | Fp8,
    down: torch.Tensor | Fp8,
    schedule: Schedule,
    dispatched: Dispatched,
    tokens: int,
    team: Team,
    *,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """out[t] = sum over t's choices of weight * (h[i] @ down[e].T + bias[e]) -> [T, H]. Collective.

    i is the choice's row in h, e its expert.

    h           [W * max_tokens * k, N], fp16, bf16 or fp32, rows in the order of ``schedule``; a row a multiple of 16 bytes
    down        [experts, H, N] of h's dtype, of this rank's experts. Or ``Fp8``, as of ``grouped_matmul``: sums travel in the
                result's dtype
    schedule, dispatched
                as ``all_gather_grouped_matmul_silu_mul`` gives them, or ``moe_schedule`` and ``moe_dispatch``: of all ranks'
                tokens and this rank's experts, whole ones or slices
    tokens      T of this rank, as it was gathered
    shared      [W * max_tokens, H] of h's dtype: this rank's summand for all ranks' tokens, as of an expert of all tokens whose
                features the ranks share; added after the choices
    gate        [W * max_tokens] of h's dtype, strided or not: shared[t] is multiplied by sigmoid(gate[t])
    bias        [experts, H] of the result's dtype, of this rank's experts: of slices one rank has it, and 0 the rest. None:
                there is none. Without gradients
    algorithm   "auto", "slabs" (copy engines carry the sums of a slab of columns while the next is multiplied) or "sequential"
                (``grouped_matmul``, ``moe_combine``; for slices, or with ``shared``, ``moe_sum`` and ``reduce_scatter``). Over
                several nodes "auto" sends other nodes' sums while this node's are computed, and "slabs" is refused

    Each rank adds up its choices in their order, and the token's rank adds up the ranks in theirs, both in fp32 and rounded
    once: the same bits from run to run. "sequential" gives the same if its last step adds up the ranks in their order, as all
    of ``moe_combine``'s algorithms do for two ranks, and all but "sum_then_scatter" for more. Over several nodes a node's sum,
    from the token's local rank on, is rounded before it crosses. The host reads nothing; captured in a CUDA graph it replays
    correctly, after one call outside with these sizes. Gradients of h, down, shared, gate and the weights of the routing: by
    ``grouped_matmul``, ``moe_sum`` and ``reduce_scatter``, without overlap. ValueError for arguments that do not fit.
    """
    op = "grouped_matmul_reduce_scatter"
    check_team(op, team, over_nodes=True)
    if isinstance(down, FourBit):
        raise ValueError(f"{op}: down is in 4 bits, of which no slab is cut; pass down.dequantized(h.dtype)")
    gemm = GroupedArguments.of(h, down, schedule, False, bias=bias)
    check_tensor(op, "h", gemm.x, team, (*FLOATS, E4M3), over_nodes=True)
    if gemm.weight_scales is None:
        check_tensor(op, "down", down, team, (h.dtype,), over_nodes=True)
    check_grouped(op, gemm, gated=False)
    check_dispatched(op, dispatched, team)
    (ids, weights), experts = dispatched.routing, dispatched.experts
    rows = schedule.pairs.shape[1]
    check_shape(op, "ids", ids, (rows, schedule.choices))
    if len(gemm.weight) != experts.count:
        raise ValueError(
            f"{op}: schedule of {len(gemm.weight)} experts; it must be of the {experts.count} experts of dispatched"
        )
    check_int(f"{op}: tokens", tokens, 0, rows // team.size)
    check_shared(op, gemm.x.new_empty(0, dtype=gemm.dtype), (rows, gemm.weight.shape[1]), shared, gate)
    check_choice(op, "algorithm", algorithm, MOE_RS.algorithms)
    if needs_gradients(gemm.x, gemm.weight, weights, shared, gate):
        y = grouped_matmul(h, down, schedule, bias=bias)
        return reduce_scatter(moe_sum(y, dispatched.routing, experts, shared=shared, gate=gate), team)[:tokens]
    return MOE_RS.dispatch(
        ScatterArguments(gemm, dispatched.routing, *experts, tokens, team.name, algorithm, shared, gate)
    )


class GroupedMatmulReduceScatter(OverlappedOp):
    name, alias = "grouped_matmul_reduce_scatter", "moe-rs"
    bits = "depend on T, k, the experts, W and the design"
    designs = {"slabs": Slabs, "sequential": Sequential, "over_nodes": ByNodes}
    sizes = ("max_tokens", "k", "experts", "H", "N")
    variants = ("block_fp8", "channel_fp8")
    # The rank's experts, its share of their features, its tokens.
    differs = {**OWN_SCHEDULE, **OWN_FEATURES, "count": (), "tokens": (), "gate": ()}
    gemm, overlapped, alone = GROUPED_MATMUL, "slabs", "nothing to send"
    h_in_fp8 = "fp8"

    # --- choosing ----------------------------------------------------------------------------------------------------

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, **forms: bool
    ) -> GroupedScatterCall:
        """Call for whole experts. forms: block_fp8 or channel_fp8."""
        tokens, k, experts, H, N = self.checked_sizes(sizes)
        held = Experts.whole(experts, 0, machine.world_size).count
        block = block_for(machine.world_size * tokens * k, experts)
        return GroupedScatterCall(tokens, k, experts, held, block, H, N, dtype, design, **forms)

    def call_of_case(self, case: Case, machine: Machine) -> GroupedScatterCall:
        most, k, experts, H, N = case.sizes
        block = block_for(case.world_size * most * k, experts)
        held = case_experts(case, 0).count
        shared = case.field("shared") is not None
        sizes = most, k, experts, held, block, H, N
        return GroupedScatterCall(*sizes, case.dtype, case.design, shared, **fp8_forms(case))

    def rule(self, call: GroupedScatterCall, machine: Machine) -> tuple[str, str]:
        """The least predicted time of whole experts; of slices by bytes, of which nothing was measured.

        Qwen3-30B-A3B on two H200s, 512 / 2048 / 4096 tokens: slabs 120 / 213 / 347 us, the GEMM and moe_combine 82 / 177 / 284.
        """
        sums, item = machine.world_size * call.tokens * call.H, call.dtype.itemsize
        has_room = channel_bytes(sums, item) <= machine.heap_bytes // 2
        if machine.world_size > 1 and call.is_whole(machine):
            times = self.costs(call, machine)
            return least(times if has_room else {"sequential": times["sequential"]}, machine.caps)
        if sums * item <= 2 << 20:
            return "sequential", f"{sums * item:,} bytes of sums in all go home in one hop"
        if not has_room:
            return (
                "sequential",
                f"{sums * item:,} bytes of sums in all, whose receive buffers leave no room in the heap",
            )
        return "slabs", "copy engines carry a slab's sums while the next one is multiplied"

    def costs(self, call: GroupedScatterCall, machine: Machine) -> dict[str, float]:
        """Predicted µs of each design, of whole experts."""
        item, fp8 = call.dtype.itemsize, call.block_fp8 or call.channel_fp8
        weight = 1.0 if fp8 else float(item)
        tokens = machine.world_size * call.tokens
        sizes = tokens, call.choices, call.experts, call.held, call.H, call.N
        experts = grouped.Experts(*sizes, item, weight, fp8=fp8)
        return grouped.moe_rs(gpu_of(machine.caps), fitted.read(), experts, machine.world_size)

    def default(self, name: str, call: GroupedScatterCall, machine: Machine) -> Any:
        gemm = GROUPED_MATMUL.plan(call.gemm(machine), machine)
        if name == "slabs":
            return Slabs(tiles=gemm.design, slabs=max(1, min(MOST_SLABS, call.H // LEAST_COLUMNS)))
        if name == "over_nodes":
            sums = machine.node.world_size * call.tokens * call.H * call.dtype.itemsize
            scatter = CollectiveCall(sums, call.dtype, "copy_engine")
            return ByNodes(tiles=gemm.design, node=REDUCE_SCATTER.plan(scatter, machine.node))
        combine = CombineCall(call.tokens, call.choices, call.H, call.dtype)
        return Sequential(gemm=gemm, combine=MOE_COMBINE.plan(combine, machine) if call.is_whole(machine) else None)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, design: Any, team: Team, given: ScatterArguments) -> torch.Tensor:
        """The op of checked arguments."""
        self.check_design(design)
        if isinstance(design, Slabs):
            return run_slabs(design, team, given)
        if isinstance(design, ByNodes):
            return scatter_by_nodes(design, team, given)
        routing, experts, tokens = given.routing, given.experts, given.tokens
        y = GROUPED_MATMUL.run(design.gemm.design, None, given.gemm)
        if design.combine is None:
            summand = moe_sum(y, routing, experts, shared=given.shared, gate=given.gate)
            return reduce_scatter(summand, team)[:tokens].contiguous()
        return MOE_COMBINE.run(
            design.combine.design, team, CombineArguments(y, *routing, experts.total, tokens, team.name, AUTO)
        )

    def forward(self, given: ScatterArguments) -> torch.Tensor:
        team, gemm = find_team(given.team), given.gemm.call(False)
        sizes = len(given.routing.ids) // team.size, given.gemm.schedule.choices, given.total, given.count
        of_gemm = gemm.block, gemm.N, gemm.K, gemm.dtype
        forms = given.shared is not None, gemm.block_fp8, gemm.channel_fp8
        call = GroupedScatterCall(*sizes, *of_gemm, given.algorithm, *forms)
        return self.run(self.plan(call, machine_of(team)).design, team, given)

    def fake(self, given: ScatterArguments) -> torch.Tensor:
        return given.gemm.x.new_empty((given.tokens, given.gemm.weight.shape[1]), dtype=given.gemm.dtype)

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """h and down of this rank, ids and weights of all ranks' tokens; then shared and its gate, if any."""
        *_, H, N = case.sizes
        ids, weights = choices_of_all(case, draw)
        down = draw.own("down", (case_experts(case, rank).count, H, N), N**-0.5)
        inputs = draw.own("h", (ids.numel(), N)), down, ids, weights, *drawn_beside(draw, (len(ids), H))
        if case.field("bias"):
            inputs += (draw.own("bias", down.shape[:2]),)
        return with_scales(case, inputs, 1)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        most, _, _, H, _ = case.sizes
        _, _, ids, weights, *_ = by_rank[rank]
        total = torch.zeros((len(ids), H), dtype=torch.float64, device=ids.device)
        for source, tensors in enumerate(by_rank):
            h, down, _, _, *shared = with_matrix(case, tensors, 1)
            bias = shared.pop().double() if case.field("bias") else None
            h, down = exact_operands(case, h, down)
            total += exact_beside(shared)
            order, place = (torch.arange(len(ids), device=ids.device) + case_start(case, source)) % len(ids), 0
            experts = case_experts(case, source)
            for local in range(experts.count):
                chosen = ids[order] == experts.first + local
                token = order[chosen.any(-1)]
                rows = h[place : place + len(token)] @ down[local].T
                rows = rows if bias is None else rows + bias[local]
                total[token] += rows * weights[order][chosen].double()[:, None]
                place += len(token)
        return total[rank * most :][: case.field("tokens")[rank]]

    def accuracy(self, case: Case) -> Accuracy:
        # Each row of the GEMM is rounded, and so are the ranks' sums and, over nodes, theirs. Exact arithmetic with these
        # roundings errs by up to 3.5 of the roundings that are allowed in 61 million elements, in one node by 2.2.
        # Tokens have weights of different sizes.
        levels = 4 if (case.field("nodes") or 1) > 1 else 3
        return Accuracy(terms=case.sizes[4] * case.sizes[1], partials=case.world_size, levels=levels, by_row=True)

    def arguments(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """h, down, this rank's schedule, routing and experts; then shared and its gate, biases, if any."""
        h, down, ids, weights, *shared = with_matrix(case, tensors, 1)
        h = quantized_rows_of(case, h) if case.field("fp8") else h
        experts = case_experts(case, team.rank)
        block = self.call_of_case(case, machine_of(team)).block
        return h, down, schedule_of(team, ids, experts, case.sizes[0], block), Routing(ids, weights), experts, *shared

    def results(
        self,
        case: Case,
        team: Team,
        h: torch.Tensor | Fp8,
        down: torch.Tensor | Fp8,
        schedule: Schedule,
        routing: Routing,
        experts: Experts,
        *shared: torch.Tensor,
    ) -> torch.Tensor:
        tokens = case.field("tokens")[team.rank]
        *shared, bias = shared if case.field("bias") else (*shared, None)
        if not isinstance(case.design, str):
            gemm = GroupedArguments.of(h, down, schedule, False, bias=bias)
            given = ScatterArguments(gemm, routing, *experts, tokens, team.name, AUTO)
            return self.run(case.design, team, given)
        dispatched = Dispatched(routing.weights.new_empty((0, down.shape[1])), routing, experts)
        beside = dict(zip(("shared", "gate"), shared, strict=False))
        return grouped_matmul_reduce_scatter(
            h, down, schedule, dispatched, tokens, team, **beside, bias=bias, algorithm=case.design
        )

    def cases_of_tiles(self, small: GroupedTiles) -> Iterator[Case]:
        yield self.case_with(2, BF16, (5, 2, 4, 72, 40), Slabs(tiles=small, slabs=3), (5, 3))
        design = Slabs(tiles=replace(small, transposed=True), slabs=2)
        yield self.case_with(3, BF16, (3, 2, 6, 40, 40), design, (3, 0, 2))
        yield self.case_with(2, FP32, (5, 2, 4, 72, 16), "slabs", (5, 3), shared="gated")
        yield self.case_with(2, BF16, (4, 2, 4, 24, 16), "sequential", (0, 4), shared="gated")
        narrow = Slabs(tiles=small, slabs=3)
        for w, fields, design in (
            (2, {"block_fp8": True, "fp8": True}, narrow), (2, {"block_fp8": True}, "sequential"),
            (3, {"channel_fp8": True}, "slabs"), (2, {"block_fp8": True, "fp8": True, "layout": "slices"}, "slabs"),
        ):  # fmt: skip
            yield self.case_with(w, BF16, (5, 2, 6, 328, 272), design, (5, 3, 0)[:w], **fields)
        for w, fields, design in (
            (2, {}, narrow), (2, {"layout": "slices", "shared": "gated"}, "slabs"), (3, {}, "sequential"),
            (2, {"block_fp8": True, "fp8": True}, "slabs"),
        ):  # fmt: skip
            yield self.case_with(w, BF16, (5, 2, 6, 328, 272), design, (5, 3, 0)[:w], bias=True, **fields)


MOE_RS = register(GroupedMatmulReduceScatter())

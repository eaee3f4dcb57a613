"""all_gather_grouped_matmul_silu_mul: first GEMM of a mixture of experts, on tokens as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.arguments import check_int
from weft.costs.grouped import SEQUENTIAL_BYTES
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, by_torch, check_e4m3, empty_rows, fp8_of, read_back
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, gated_terms
from weft.ops.collectives.all_gather import ALL_GATHER, all_gather
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.knobs import around, check_knobs, counts, design_type, halved, knob
from weft.ops.local import check_shape
from weft.ops.moe.by_nodes import ByNodes, gather_by_nodes
from weft.ops.moe.check import check_routing, check_sent, check_share, needs_gradients
from weft.ops.moe.choices import draw_ids
from weft.ops.moe.exchange.exchange_op import DispatchArguments, channel_bytes, padded, rows_sent
from weft.ops.moe.exchange.lamport import GatherWords, Tokens, gather_words
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.cases import (
    exact_activation,
    exact_operands,
    fp8_accuracy,
    fp8_forms,
    swiglu_of,
    with_matrix,
    with_scales,
)
from weft.ops.moe.grouped.check import (
    NO_BACKWARD,
    NO_BACKWARD_OF_FP8,
    check_bias,
    check_gate_up,
    check_swiglu,
    check_written,
)  # fmt: skip
from weft.ops.moe.grouped.gemms import Coming, GroupedCall, GroupedTiles
from weft.ops.moe.grouped.kernel import Arriving
from weft.ops.moe.grouped.rule import holds_scales
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL_SILU_MUL, grouped_matmul_silu_mul
from weft.ops.moe.moe_dispatch import MOE_DISPATCH, DispatchCall, row_bytes
from weft.ops.moe.moe_schedule import MOE_SCHEDULE, block_for, moe_schedule
from weft.ops.moe.overlapped import (
    MAX_HEAD,
    GatherArguments,
    OverlappedOp,
    case_experts,
    case_start,
    dtype_of_h,
    first_rank,
    gather_rows,
    head_for,
    order_tiles,
    schedule_of,
)  # fmt: skip
from weft.ops.moe.routing import ClampedSwiGLU, Dispatched, Experts, Routing, Schedule, check_distinct
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_team, check_tensor
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import find_team
from weft.transport.copy_channel import MAX_CHUNKS

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class Fused:
    """One grouped GEMM; its tiles wait for the ranks that their rows span, copy engines bring them.

    words     the kernel that gathers the choices
    chunks    signals for a rank's rows, at most MAX_CHUNKS
    in_place  this rank's rows are read where they are, else copied to the gathered rows; False for fp8 rows
    head      of this many tiles of pairs, a power of two, tiles of this rank's rows alone come first; 0: all in their order
    """

    tiles: GroupedTiles = knob(near=around)
    words: GatherWords = GatherWords()
    chunks: int = knob(1, counts(MAX_CHUNKS), halved())
    in_place: bool = True
    head: int = knob(0, near=lambda head: (*halved(1, MAX_HEAD)(head), 0))

    def __post_init__(self) -> None:
        check_knobs(self)
        if check_int("head", self.head, 0, MAX_HEAD) & (self.head - 1):
            raise ValueError(f"head={self.head} is neither 0 nor a power of two")


@design_type
class Sequential:
    """moe_dispatch, then moe_schedule and grouped_matmul_silu_mul."""

    dispatch: Planned
    gemm: Planned


class GatherGroupedCall(NamedTuple):
    """Sizes that the plan depends on.

    tokens  most of a rank; held: experts of a rank, of ``experts``
    N, K    features of an expert here, elements of a row
    fp8     rows are sent in fp8; block_fp8, channel_fp8, written: of ``GroupedCall``
    """

    tokens: int
    choices: int
    experts: int
    held: int
    N: int
    K: int
    dtype: torch.dtype
    design: str = AUTO
    fp8: bool = False
    block_fp8: bool = False
    channel_fp8: bool = False
    written: bool = False

    def dispatch(self, machine: Machine) -> DispatchCall:
        """Call of moe_dispatch of the same rows."""
        tp = machine.world_size * self.held // self.experts
        return DispatchCall(self.tokens, self.choices, self.K, self.dtype, fp8=self.fp8, tp=tp)

    def gemm(self, machine: Machine) -> GroupedCall:
        """Call of the grouped GEMM of all ranks' tokens."""
        tokens = machine.world_size * self.tokens
        block = block_for(tokens * self.choices, self.experts)
        forms = {name: getattr(self, name) for name in ("block_fp8", "channel_fp8", "written")}
        return GroupedCall(block, tokens * self.choices, self.N, self.K, self.dtype, True, **forms)

    @property
    def rounds_later(self) -> bool:
        """True for experts in fp8 whose rows are quantized where they have arrived."""
        return (self.block_fp8 or self.channel_fp8) and not self.fp8


def all_gather_grouped_matmul_silu_mul(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor | Fp8,
    experts: Experts,
    team: Team,
    *,
    max_tokens: int,
    dtype: torch.dtype | None = None,
    fp8: RowFormat | None = None,
    bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor | Fp8, Schedule, Dispatched]:
    """h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T) -> [pairs, N], of all ranks' tokens. Collective.

    i is the i-th pair of a token t and an expert of this rank.

    x           [T, K], fp16, bf16 or fp32, this rank's tokens, a row a multiple of 16 bytes; T may differ by rank and be 0
    routing     ids int32 [T, k] and weights [T, k] of x's dtype, as of ``route``
    gate_up     [experts.count, 2 N, K] of x's dtype: of each expert gate's N rows, then up's. Or ``Fp8``, as of
                ``grouped_matmul_silu_mul``: with scales of blocks, in one node, rows are sent in fp8 with theirs
    experts     this rank's, whole ones or slices of all; of all ranks together each expert, or each slice, once
    max_tokens  of any rank; the same on all ranks, as K, k, dtypes, ``experts.total`` and ``algorithm`` must be
    dtype       of the rows as they are sent: None, x's; torch.float8_e4m3fn, with a scale for each 128 columns, in one node and
                without gradients. h is that of the rounded rows, as of ``moe_dispatch`` and ``grouped_matmul_silu_mul``
    fp8, bias, swiglu
                of h, as of ``grouped_matmul_silu_mul``: bias [experts.count, 2 N] of this rank's experts or slices
    algorithm   "auto", "fused" (tiles of rows that are here go first, while copy engines bring the other rows) or "sequential"
                (``moe_dispatch``, ``moe_schedule``, ``grouped_matmul_silu_mul``). Over several nodes "auto" computes this
                node's rows while other rows cross, and "fused" is refused

    Returns (h, schedule, dispatched). h [W * max_tokens * k, N]: row i is of the schedule's i-th pair, rows after the last one
    are not written; ``grouped_matmul`` and ``grouped_matmul_reduce_scatter`` take it so. schedule: each expert's pairs begin
    with this rank's tokens, over several nodes with its node's; the next ranks' follow. dispatched: all ranks'
    choices, for ``moe_combine`` and ``grouped_matmul_reduce_scatter``; it may be the team's receive buffers, as of
    ``moe_dispatch``, and has no rows.

    The same bits from every algorithm and run. The host reads nothing; captured in a CUDA graph, with T as it is then, it
    replays correctly, after one call outside with these sizes. Gradients of x, the weights of ``routing`` and gate_up: by
    ``all_gather`` and ``grouped_matmul_silu_mul``, without overlap. ValueError for arguments that do not fit.
    """
    op = "all_gather_grouped_matmul_silu_mul"
    check_team(op, team, over_nodes=True)
    check_tensor(op, "x", x, team, FLOATS, over_nodes=True)
    ids, weights = check_routing(op, routing, x.device, (x.dtype,))
    check_shape(op, "x", x, (len(ids), "K"))
    check_share(op, experts, team)
    check_gate_up(op, gate_up, x, experts, team)
    sends_fp8 = check_rows(op, x, gate_up, dtype, team)
    if fp8 is not None:
        check_written(op, x, gate_up, fp8)
    check_swiglu(op, swiglu)
    data, *of_weight = gate_up if isinstance(gate_up, Fp8) else (gate_up, None, None)
    check_bias(op, bias, data, dtype_of_h(x.dtype, sends_fp8, isinstance(gate_up, Fp8)))
    check_int(f"{op}: max_tokens", max_tokens, max(1, len(x)))
    check_choice(op, "algorithm", algorithm, AG_MOE.algorithms)
    if needs_gradients(x, weights, data, bias):
        if bias is not None or swiglu is not None:
            raise RuntimeError(f"{op}: {NO_BACKWARD}")
        if isinstance(gate_up, Fp8):
            raise RuntimeError(f"{op}: {NO_BACKWARD_OF_FP8}")
        if sends_fp8:
            raise ValueError(f"{op}: dtype={E4M3} has no gradients; leave it out, or call it under torch.no_grad()")
        return differentiable(x, routing, data, experts, team, max_tokens)
    of_h = *of_weight, *(fp8[:2] if fp8 else ("", None)), bias, *(swiglu or (0.0, 0.0))
    # Not of a plan: torch.compile, which traces this function, cannot trace how full the heap is.
    block = block_for(team.size * max_tokens * ids.shape[1], experts.total)
    given = GatherArguments(x, routing, data, *experts, max_tokens, block, sends_fp8, team.name, algorithm, *of_h)
    h, h_scales, *lists, ids, weights = AG_MOE.dispatch(given)
    if fp8 is not None:
        h = fp8_of(h, h_scales, fp8)
    schedule = Schedule(*lists, choices=ids.shape[1], block=given.block)
    return h, schedule, Dispatched(x.new_empty((0, x.shape[1])), Routing(ids, weights), experts)


def check_rows(op: str, x: torch.Tensor, gate_up: torch.Tensor | Fp8, dtype: torch.dtype | None, team: Team) -> bool:
    """True if rows of x are sent in fp8. ValueError unless they can be sent, and multiplied, in that form."""
    fp8 = check_sent(op, dtype, team)
    if isinstance(gate_up, Fp8):
        if fp8 and not gate_up.is_grouped:
            raise ValueError(
                f"{op}: dtype={dtype} has scales of 128 columns, and gate_up asks for other ones; leave it out"
            )
        fp8 = gate_up.is_grouped and team.rail is None
    sent = E4M3 if fp8 else x.dtype
    if (nbytes := x.shape[1] * sent.itemsize) % 16:
        raise ValueError(f"{op}: K={x.shape[1]} of {sent} is {nbytes} bytes, no multiple of 16; pad x and gate_up")
    return fp8


def call_with(given: GatherArguments) -> GatherGroupedCall:
    """Sizes of the call that has these arguments."""
    scales, k, N = given.weight_scales, given.routing.ids.shape[1], given.gate_up.shape[1] // 2
    forms = (False, False) if scales is None else (scales.shape[2] > 1, scales.shape[2] == 1)
    sizes = given.max_tokens, k, given.total, given.count, N, given.x.shape[1]
    return GatherGroupedCall(*sizes, given.x.dtype, given.algorithm, given.fp8, *forms, given.format is not None)


def differentiable(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, experts: Experts, team: Team, most: int
) -> tuple[torch.Tensor, Schedule, Dispatched]:
    """The op of checked arguments by ops that have gradients."""
    rows, weights = (all_gather(padded(tensor, most, 0), team) for tensor in (x, routing.weights))
    ids = all_gather(padded(routing.ids, most, -1), team)
    schedule = moe_schedule(ids, experts, start=first_rank(team.rank, team.shape) * most)
    h = grouped_matmul_silu_mul(rows, gate_up, schedule)
    return h, schedule, Dispatched(x.new_empty((0, x.shape[1])), Routing(ids, weights), experts)


class AllGatherGroupedMatmulSiluMul(OverlappedOp):
    name, alias = "all_gather_grouped_matmul_silu_mul", "ag-moe"
    bits = "depend on T, k, the experts, W and the design"
    designs = {"fused": Fused, "sequential": Sequential, "over_nodes": ByNodes}
    sizes = ("max_tokens", "k", "experts", "N", "K")
    variants = ("fp8", "block_fp8", "channel_fp8")
    # Tokens of the rank, its experts and its share of their features.
    differs = {
        **dict.fromkeys(("x", "ids", "weights"), (0,)),
        **dict.fromkeys(("gate_up", "weight_scales"), (0, 1)),
        **dict.fromkeys(("first", "count", "block"), ()),
    }
    gemm, overlapped, alone = GROUPED_MATMUL_SILU_MUL, "fused", "nothing to gather"
    h_in_fp8 = "written"

    # --- choosing ----------------------------------------------------------------------------------------------------

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, **forms: bool
    ) -> GatherGroupedCall:
        """Call for whole experts. forms: fp8, block_fp8, channel_fp8."""
        tokens, k, experts, N, K = self.checked_sizes(sizes)
        held = Experts.whole(experts, 0, machine.world_size).count
        forms["fp8"] = forms.get("fp8", False) or (forms.get("block_fp8", False) and machine.nodes == 1)
        return GatherGroupedCall(tokens, k, experts, held, N, K, dtype, design, **forms)

    def call_of_case(self, case: Case, machine: Machine) -> GatherGroupedCall:
        most, k, experts, N, K = case.sizes
        held = case_experts(case, 0).count
        forms, sizes = fp8_forms(case), (most, k, experts, held, N, K)
        fp8 = case.field("fp8") is True or ("block_fp8" in forms and machine.nodes == 1)
        return GatherGroupedCall(*sizes, case.dtype, case.design, fp8, **forms)

    def choose(self, call: GatherGroupedCall, machine: Machine) -> Planned:
        if not call.rounds_later:
            return super().choose(call, machine)
        if call.design == "fused":
            raise ValueError(
                f"{self.name}: algorithm='fused' sends fp8 rows with scales of 128 columns, within one node; pass 'auto'"
            )
        reason = "rows travel in 16 bits, and are quantized as the experts' scales ask for"
        return Planned("sequential", self.default("sequential", call, machine), reason)

    def tuned(self, call: GatherGroupedCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        refuses = (
            planned is not None and call.written and planned.name == "fused" and not holds_scales(planned.design.tiles)
        )
        return None if refuses else planned

    def rule(self, call: GatherGroupedCall, machine: Machine) -> tuple[str, str]:
        """By bytes in all: up to 4 MiB moe_dispatch sends all in one hop.

        Two H200s, µs: 512 tokens of 2048 136 instead of 141, 2048 tokens 290 and 288, 4096 tokens 484 and 456. Four: 128 tokens
        of gpt-oss-120b (3 MB) 276 instead of 297 (lab/h200-regret/regret-all-w4.json). There 512 tokens of 2048 (8 MB) take 148
        fused, their GEMM alone 100 and moe_dispatch some 24: the sequence was not measured.
        """
        whole = machine.world_size * call.tokens * row_bytes(call.dispatch(machine))
        if whole <= SEQUENTIAL_BYTES:
            return "sequential", f"{whole:,} bytes of rows in all arrive in one hop"
        if channel_bytes(whole) > machine.heap_bytes // 2:
            return "sequential", f"{whole:,} bytes of rows in all, whose receive buffers leave no room in the heap"
        return "fused", "copy engines bring the other ranks' rows while tiles of this rank's are computed"

    def default(self, name: str, call: GatherGroupedCall, machine: Machine) -> Any:
        gemm = GROUPED_MATMUL_SILU_MUL.plan(call.gemm(machine), machine)
        if name == "fused":
            head = head_for(call.gemm(machine), call.tokens, gemm.design, machine)
            # gfx942's compiler cannot choose between two pointers.
            in_place = not (call.fp8 or machine.caps.arch.startswith("gfx"))
            return Fused(tiles=gemm.design, in_place=in_place, head=head)
        if name == "over_nodes":
            routing = machine.nodes * call.tokens * call.choices * (4 + call.dtype.itemsize)
            words = CollectiveCall(routing, torch.uint8, "copy_engine")
            return ByNodes(tiles=gemm.design, node=ALL_GATHER.plan(words, machine.node))
        return Sequential(dispatch=MOE_DISPATCH.plan(call.dispatch(machine), machine), gemm=gemm)

    def traffic_of(self, case: Case) -> int:
        """Rows, with their scales in fp8."""
        tokens, k, experts, _, K = case.sizes
        fp8 = case.field("fp8") is True or case.field("block_fp8") is True
        row = row_bytes(DispatchCall(tokens, k, K, case.dtype, fp8=fp8))
        return int(rows_sent((tokens, k, experts, K), case.world_size) * row)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, design: Any, team: Team, given: GatherArguments) -> tuple[torch.Tensor, ...]:
        """(h, its scales, pairs, counts, tiles, tile_count, ids, weights) of checked arguments.

        Without ``given.kind`` h has no scales [0].
        """
        self.check_design(design)
        if isinstance(design, ByNodes):
            h, *rest = gather_by_nodes(design, team, given)
            return h, h.new_empty(0, dtype=torch.float32), *rest
        (x, routing), (most, block, fp8) = given[:2], (given.max_tokens, given.block, given.fp8)
        if given.weight_scales is not None:
            check_e4m3(self.name, team.caps)
        if isinstance(design, Sequential):
            tp = team.size * given.count // given.total
            sent = DispatchArguments(
                x, routing, given.total, most, fp8, kept=False, team=team.name, algorithm=AUTO, tp=tp
            )
            rows, ids, weights, scales = MOE_DISPATCH.run(design.dispatch.design, team, sent)
            schedule = schedule_of(team, ids, given.experts, most, block)
            gemm = given.gemm(rows, schedule, scales if fp8 else None)
            return *gemms.run_gated(design.gemm.design, gemm, given.format), *schedule[:4], ids, weights
        if fp8 and design.in_place:
            raise ValueError(f"{self.name}: in_place=True is for rows of x's dtype; pass False for {E4M3}")
        x, chunk = x.contiguous(), cdiv(most, design.chunks)
        gathered, scales, own, landed = gather_rows(team, self.name, x, most, chunk, fp8)
        _, ids, weights, _ = gather_words(design.words, team, Tokens(x[:, :0], *routing, None), most)
        schedule = schedule_of(team, ids, given.experts, most, block)
        if not (design.in_place or fp8):
            gathered[team.rank * most :][: len(x)].copy_(x)
        ordered = order_tiles(team, schedule, most, design.head) if design.head else schedule
        coming = Coming(Arriving(own, most, chunk), landed, team.view, design.in_place)
        h, h_scales = gemms.run_gated(design.tiles, given.gemm(gathered, ordered, scales), given.format, coming)
        team.copy_engine.join()
        return h, h_scales, *schedule[:4], ids, weights

    def forward(
        self, given: GatherArguments
    ) -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
    ]:
        team = find_team(given.team)
        return self.run(self.plan(call_with(given), machine_of(team)).design, team, given)

    def examine(self, given: Mapping[str, Any]) -> None:
        check_distinct(self.name, given["ids"])

    def fake(self, given: GatherArguments) -> tuple[torch.Tensor, ...]:
        (ids, weights), gate_up = given.routing, given.gate_up
        rows, k = find_team(given.team).size * given.max_tokens, ids.shape[1]
        of_all = ids.new_empty((rows, k))
        schedule = MOE_SCHEDULE.fake(of_all, given.first, given.count, given.block, 0, None)
        pairs, N = rows * k, gate_up.shape[1] // 2
        if given.format is not None:
            h, scales = empty_rows(gate_up, pairs, N, given.format)
        else:
            h, scales = given.x.new_empty((pairs, N), dtype=given.dtype), given.x.new_empty(0, dtype=torch.float32)
        return h, scales, *schedule, of_all, weights.new_empty((rows, k))

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """x, ids and weights of this rank's tokens, and its experts' weights."""
        _, k, experts, N, K = case.sizes
        T = case.field("tokens")[rank]
        gate_up = draw.own("gate_up", (case_experts(case, rank).count, 2 * N, K), K**-0.5)
        tensors = draw.own("x", (T, K)), draw_ids(draw, T, k, experts), draw.own("weights", (T, k)), gate_up
        if case.field("bias"):
            tensors = *tensors, draw.own("bias", gate_up.shape[:2])
        return with_scales(case, tensors, 3)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, number of each expert's pairs): an expert's from this rank's tokens on, 0 after the last."""
        (most, k, _, N, _), experts = case.sizes, case_experts(case, rank)
        rows = torch.cat([padded(one[0], most, 0) for one in by_rank])
        if case.field("fp8"):
            rows = read_back(*by_torch(rows), case.dtype)
        _, _, _, matrix, *bias = with_matrix(case, by_rank[rank], 3)
        rows, matrix = exact_operands(case, rows, matrix)
        ids = torch.cat([padded(one[1], most, -1) for one in by_rank])
        order = (torch.arange(len(ids), device=ids.device) + case_start(case, rank)) % len(ids)
        h, counts, place = rows.new_zeros((len(ids) * k, N)), [], 0
        for local in range(experts.count):
            chosen = order[(ids[order] == experts.first + local).any(-1)]
            gate_up = rows[chosen] @ matrix[local].T
            gate_up = gate_up + bias[0][local].double() if bias else gate_up
            h[place : place + len(chosen)] = exact_activation(case, gate_up)
            place += len(chosen)
            counts.append(len(chosen))
        return h, torch.tensor(counts, dtype=torch.float64, device=ids.device)

    def accuracy(self, case: Case) -> Accuracy:
        return fp8_accuracy(case, gated_terms(case.sizes[4]))

    def results(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h, and the number of each expert's pairs."""
        x, ids, weights, gate_up, *bias = with_matrix(case, tensors, 3)
        of_gemm = *(bias or (None,)), swiglu_of(case)
        most, experts, fp8 = case.sizes[0], case_experts(case, team.rank), case.field("fp8") is True
        if isinstance(case.design, str):
            named = {"max_tokens": most, "dtype": E4M3 if fp8 else None, "algorithm": case.design}
            named |= dict(zip(("bias", "swiglu"), of_gemm, strict=True))
            h, schedule, _ = all_gather_grouped_matmul_silu_mul(
                x, Routing(ids, weights), gate_up, experts, team, **named
            )
            if case.field("written"):
                named |= {"fp8": RowFormat("group")}
                rows, *_ = all_gather_grouped_matmul_silu_mul(x, Routing(ids, weights), gate_up, experts, team, **named)
                h = agreed(h, rows, named["fp8"])
            return h, schedule.counts
        here = machine_of(team)
        call = self.call_of_case(replace(case, design=AUTO), here)
        gate_up, *of_weight = gate_up if isinstance(gate_up, Fp8) else (gate_up, None, None)
        of_call = most, call.gemm(here).block, call.fp8, team.name, AUTO
        of_rows = *of_weight, "", None, of_gemm[0], *(of_gemm[1] or (0.0, 0.0))
        given = GatherArguments(x, Routing(ids, weights), gate_up, *experts, *of_call, *of_rows)
        h, _, _, counts, *_ = self.run(case.design, team, given)
        return h, counts

    def defined(
        self, case: Case, team: Team, out: tuple[torch.Tensor, torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h with 0 after the computed rows, and the number of each expert's pairs in its dtype."""
        h, counts = out
        computed = torch.arange(len(h), device=h.device) < counts.sum()
        return torch.where(computed[:, None], h, 0), counts.to(h.dtype)

    def cases_of_tiles(self, small: GroupedTiles) -> Iterator[Case]:
        yield self.case_with(2, BF16, (9, 1, 4, 24, 16), "fused", (9, 9), skew="one expert")
        yield self.case_with(2, BF16, (9, 2, 8, 24, 16), "fused", (9, 7), skew="recorded")
        design = Fused(tiles=small, chunks=3, head=4)
        yield self.case_with(2, BF16, (18, 1, 2, 40, 24), design, (18, 17))
        words = GatherWords(row_bytes=256, num_warps=2)
        design = Fused(tiles=replace(small, transposed=True), words=words, in_place=False)
        yield self.case_with(2, BF16, (9, 1, 4, 40, 24), design, (6, 9))
        for w, dtype, design in (
            (2, BF16, "fused"), (3, FP16, "fused"), (2, FP32, "sequential"), (2, BF16, "sequential"),
            (2, BF16, Fused(tiles=small, chunks=2, head=4, in_place=False)),
        ):  # fmt: skip
            yield self.case_with(w, dtype, (9, 2, 6, 272, 16), design, (9, 4, 0)[:w], fp8=True)
        yield self.case_with(2, BF16, (5, 2, 4, 144, 16), "fused", (0, 5), fp8=True, layout="slices")
        for w, fields, design in (
            (2, {"block_fp8": True, "written": True}, "fused"), (2, {"block_fp8": True, "layout": "slices"}, "fused"),
            (3, {"block_fp8": True, "written": True}, "sequential"), (2, {"channel_fp8": True}, "sequential"),
            (2, {"block_fp8": True}, Fused(tiles=small, chunks=2, head=4, in_place=False)),
        ):  # fmt: skip
            yield self.case_with(w, BF16, (9, 2, 6, 272, 144), design, (9, 4, 0)[:w], **fields)
        for w, fields, design in (
            (2, {"bias": True, "clamped": True}, "fused"), (2, {"clamped": True, "layout": "slices"}, "fused"),
            (3, {"bias": True, "layout": "slices"}, "sequential"), (2, {"bias": True, "block_fp8": True}, "fused"),
            (2, {"bias": True, "clamped": True}, Fused(tiles=replace(small, transposed=True), head=4)),
        ):  # fmt: skip
            yield self.case_with(w, BF16, (9, 2, 6, 272, 144), design, (9, 4, 0)[:w], **fields)


AG_MOE = register(AllGatherGroupedMatmulSiluMul())

"""moe_dispatch: a token's row goes to the ranks that hold an expert it chose.

Slots are not negotiated: row t of rank s lies at s * max_tokens + t on every rank that gets it. All ranks learn all choices, so
each computes by itself which rows it has and in which order (``moe_schedule``): no counts are exchanged, the host waits for
nothing, and no token is dropped.

Where tp ranks hold slices of the same experts, each gets a row from the token's rank. Sending it to one rank, which forwards
it, would move as many bytes over the links of a node, since each rank needs each of its rows once, and add a hop. The same
holds for the sums on the way back.

Over nodes a token's row and choices cross to each other node once, to the rank of equal local rank there, which dispatches them
within its node. Sizes of transfers are known to the host, so every node gets all max_tokens rows of its rail's ranks: also of
tokens that chose none of its experts.

rail     | packed rows, ids, weights to k+1, from k-1 | to k+2, from k-2 |                                 node k
node                                                  | dispatch own | rows of k-1  | rows of k-2  |       into one tensor

Backward: moe_combine without weights adds up the gradients that the ranks have for a row, at the token's rank in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.arguments import check_int
from weft.costs import exchanges, fitted
from weft.costs.gpu import gpu_of
from weft.kernels.fp8 import COLUMNS, E4M3, by_torch, check_e4m3, quantize_rows, scales_of
from weft.ops.case import BF16, FP16, FP32, Case, Draw, Inputs
from weft.ops.collectives.over_nodes import OverNodes, packed, swapped, unpacked
from weft.ops.layout import Given
from weft.ops.local import check_shape
from weft.ops.moe.check import check_routing, check_sent, check_share
from weft.ops.moe.choices import draw_ids
from weft.ops.moe.exchange.exchange_op import DispatchArguments, ExchangeOp, PushRows, padded, rows_sent, shared_experts
from weft.ops.moe.exchange.lamport import DispatchWords, Tokens, gather_fp8_words, gather_words
from weft.ops.moe.exchange.pipelined import DispatchPieces, dispatch_pieces
from weft.ops.moe.exchange.push import dispatch_rows
from weft.ops.moe.routing import Dispatched, Experts, Routing, check_distinct
from weft.ops.op import INVARIANT, find_op, register
from weft.ops.registration import FLOATS, check_choice, check_team, check_tensor
from weft.plan.planned import AUTO, Machine, machine_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Tokens of a rank from which "push" has larger chunks in narrower blocks. Four H200s, 6,400 of 2,880: 259 us, by default 281
# (benchmarks/lab/h200-regret/regret-dispatch-w4.json).
MANY_TOKENS = 1600


class DispatchCall(NamedTuple):
    """Sizes that the plan depends on."""

    tokens: int
    choices: int
    width: int
    dtype: torch.dtype
    design: str = AUTO
    fp8: bool = False
    tp: int = 1


def moe_dispatch(
    x: torch.Tensor,
    routing: Routing,
    team: Team,
    *,
    experts: int | Experts,
    max_tokens: int,
    dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> Dispatched:
    """Send each row of ``x`` to the ranks that hold an expert it chose. Collective.

    x           [T, H], fp16, bf16 or fp32, this rank's tokens; T may differ by rank and be 0
    routing     ids int32 [T, k] and weights [T, k] of x's dtype, as of ``route``
    experts     of all ranks together, divided by W: rank r holds experts r * experts / W and on. Or this rank's ``Experts``:
                whole ones, slices of all, or its group's of tp ranks, which each get a row. Groups lie in one node
    max_tokens  of any rank; the same on all ranks, as H, k, dtypes, the layout of experts and ``algorithm`` must be
    dtype       of the rows as they are sent: None, x's; torch.float8_e4m3fn, with a scale for each 128 columns, as
                ``grouped_matmul_silu_mul`` takes them (weft/kernels/fp8.py says how they are rounded), in one node
    algorithm   "auto", "push" (rows to the ranks that need them), "pipelined" (all rows to all ranks by copy engines, for many
                tokens) or "lamport" (all rows to all ranks in one kernel and one hop)

    The tensors of the result may be the team's receive buffers: they hold until this rank's next call with these sizes. So
    ranks compute and combine one layer's rows before they dispatch the next one's. Bits arrive as they were sent, or rounded to
    fp8, and are the same in every algorithm. The host reads nothing; captured in a CUDA graph, with T as it is then, it replays
    correctly, after one call outside with these sizes. ValueError for arguments that do not fit.

    Gradients of x and of the weights, not in fp8. The backward is collective too: all ranks ask for the same gradients, ranks
    without tokens too. Where gradients are asked of x or the weights, the tensors are new ones; else a backward of what read
    the receive buffers is refused once they have been written again.
    """
    op = "moe_dispatch"
    check_team(op, team, over_nodes=True)
    check_tensor(op, "x", x, team, FLOATS, over_nodes=True)
    ids, _ = check_routing(op, routing, x.device, (x.dtype,))
    check_shape(op, "x", x, (len(ids), "H"))
    check_int(f"{op}: max_tokens", max_tokens, max(1, len(x)))
    if isinstance(experts, Experts):
        held, tp = experts, check_share(op, experts, team, in_node=True)
    else:
        held, tp = Experts.whole(check_int(f"{op}: experts", experts, 1), team.rank, team.size), 1
    check_choice(op, "algorithm", algorithm, MOE_DISPATCH.algorithms)
    fp8 = check_sent(op, dtype, team)
    if x.shape[1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; rows have at least one element")
    kept = not fp8 and torch.is_grad_enabled() and (x.requires_grad or routing.weights.requires_grad)
    given = DispatchArguments(x, routing, held.total, max_tokens, fp8, kept, team.name, algorithm, tp)
    rows, ids, weights, scales = MOE_DISPATCH.dispatch(given)
    return Dispatched(rows, Routing(ids, weights), held, scales if fp8 else None)


def row_bytes(call: DispatchCall) -> int:
    """Bytes of a row as it is sent, with its scales."""
    return call.width + 4 * scales_of(call.width) if call.fp8 else call.width * call.dtype.itemsize


def rounds_rows(call: DispatchCall) -> bool:
    """``DispatchWords.rounds``: True for fp8 rows of whole blocks of columns."""
    return call.fp8 and call.width % COLUMNS.value == 0


class MoeDispatch(ExchangeOp):
    """sizes of a case: max_tokens, k, experts, H. Its field ``tokens`` has each rank's tokens."""

    name, alias = "moe_dispatch", "moe-dispatch"
    bits = f"{INVARIANT}: rows are moved, or put in fp8 each by itself"
    # Tokens of the rank; and only this rank's receive buffers.
    differs = {**dict.fromkeys(("x", "ids", "weights"), (0,)), "kept": ()}
    designs = {"push": PushRows, "pipelined": DispatchPieces, "lamport": DispatchWords, "over_nodes": OverNodes}
    calls = DispatchCall
    flag = "fp8"
    variants = ("fp8",)

    def call_of_case(self, case: Case, machine: Machine) -> DispatchCall:
        return super().call_of_case(case, machine)._replace(fp8=case.field("fp8") is True)

    def costs(self, call: DispatchCall, machine: Machine) -> dict[str, float]:
        rows = exchanges.Rows(
            call.tokens, call.choices, call.width, call.dtype.itemsize, machine.world_size, call.tp, call.fp8
        )
        of = fitted.read()
        times = exchanges.dispatch(gpu_of(machine.caps), of.exchanges, of.pushes, rows)
        return times if row_bytes(call) % 4 == 0 else {name: us for name, us in times.items() if name != "lamport"}

    def whole_bytes(self, call: DispatchCall, machine: Machine) -> int:
        """Bytes of all ranks' rows, ids and weights."""
        return machine.world_size * call.tokens * (row_bytes(call) + 8 * call.choices)

    def default(self, name: str, call: DispatchCall, machine: Machine) -> Any:
        whole = self.whole_bytes(call, machine)
        if name == "lamport" and (call.fp8 or whole > 2 << 20):
            # In fp8 one block of words of a tile has its scales: of 1024 bytes one of eight, of 4096 one of 32.
            few = whole <= (4 if call.fp8 else 20) << 20
            size, warps = (1024, 2) if few else (4096, 8)
            return DispatchWords(row_bytes=size, num_warps=warps, rounds=rounds_rows(call))
        if name == "push" and call.fp8:
            # With 1024 columns a thread that converts them has a stack on sm_90.
            return PushRows(block=512)
        if name == "push" and call.tokens >= MANY_TOKENS:
            return PushRows(chunk=16, block=512)
        if name == "pipelined" and not call.fp8:
            # Only choices pass the kernel.
            return DispatchPieces(chunk=32)
        return super().default(name, call, machine)

    def token_bytes(self, call: DispatchCall) -> int:
        return row_bytes(call) + call.choices * (4 + call.dtype.itemsize)

    def space(self, call: DispatchCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from super().space(call, machine, quick)
        if row_bytes(call) % 4 == 0:
            sizes = ((512, 1), (4096, 8)) if quick else ((512, 1), (1024, 2), (2048, 4), (4096, 8))
            rounds = rounds_rows(call)
            yield from (DispatchWords(row_bytes=size, num_warps=warps, rounds=rounds) for size, warps in sizes)

    def traffic_of(self, case: Case) -> int:
        """Rows, with their scales in fp8, for ranks that need them; all ids and weights for all."""
        tokens, k, _, H = case.sizes
        row = H + 4 * scales_of(H) if case.field("fp8") else H * case.dtype.itemsize
        routing = (case.world_size - 1) * tokens * k * (4 + case.dtype.itemsize)
        return int(rows_sent(case.sizes, case.world_size) * row) + routing

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, design: Any, team: Team, given: DispatchArguments) -> tuple[torch.Tensor, ...]:
        """(rows, ids, weights, scales) of all ranks; no scales [0] unless ``fp8``."""
        self.check_design(design)
        x, fp8 = given.x, given.fp8
        if fp8:
            check_e4m3(self.name, team.caps)
        no_scales = [] if fp8 else [x.new_empty(0, dtype=torch.float32)]
        if isinstance(design, OverNodes):
            return *self._run_over_nodes(design, team, given), *no_scales
        if isinstance(design, DispatchPieces):
            return *dispatch_pieces(design, team, given), *no_scales
        if isinstance(design, PushRows):
            return *dispatch_rows(design, team, given), *no_scales
        if design.rounds:
            return gather_fp8_words(design, team, given)
        rows, scales = quantize_rows(x, len(x), team.caps) if fp8 else (x, None)
        *arrived, scales = gather_words(design, team, Tokens(rows, *given.routing, scales), given.max_tokens)
        return *arrived, *(no_scales or [scales])

    def _run_over_nodes(self, design: OverNodes, team: Team, given: DispatchArguments) -> tuple[torch.Tensor, ...]:
        """(rows, ids, weights) of all ranks, new tensors.

        Within a node its experts count from 0; ids of other nodes' experts are outside and chosen by none of its ranks.
        """
        (ids, weights), most, (nodes, size) = given.routing, given.max_tokens, team.shape
        tp = min(given.tp, size)
        of_node = given.experts * given.tp // (nodes * tp)
        first = team.rail.index * of_node % given.experts
        own = padded(given.x.detach(), most, 0), padded(ids, most, -1), padded(weights.detach(), most, 0)
        whole = [tensor.new_empty((team.size * most, tensor.shape[1])) for tensor in own]
        for node, piece in swapped(team, [packed(own)] * nodes, design.node):
            rows, choices, factors = unpacked(piece, own)
            routing = Routing(choices - first, factors)
            # Rows that no rank has sent are not to be read, so the received ones are copied.
            received = given._replace(x=rows, routing=routing, experts=of_node, kept=True, tp=tp)
            arrived = self.run(design.node.design, team.node, received)
            for out, part in zip(whole, arrived, strict=False):
                out.chunk(nodes)[node].copy_(part)
        whole[1] += first
        return tuple(whole)

    def forward(self, given: DispatchArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        team, sizes = find_team(given.team), (given.max_tokens, given.routing.ids.shape[1], given.x.shape[1])
        call = DispatchCall(*sizes, given.x.dtype, given.algorithm, given.fp8, given.tp)
        return self.run(self.plan(call, machine_of(team)).design, team, given)

    def examine(self, given: Mapping[str, Any]) -> None:
        check_distinct(self.name, given["ids"])

    def fake(self, given: DispatchArguments) -> tuple[torch.Tensor, ...]:
        x, (ids, weights), rows = given.x, given.routing, find_team(given.team).size * given.max_tokens
        k, H = ids.shape[1], x.shape[1]
        scales = x.new_empty((rows, scales_of(H)) if given.fp8 else 0, dtype=torch.float32)
        received = x.new_empty((rows, H), dtype=E4M3 if given.fp8 else x.dtype)
        return received, ids.new_empty((rows, k)), weights.new_empty((rows, k)), scales

    def keeps(self, ctx: Any, given: Given, output: Sequence[torch.Tensor]) -> dict[str, Any]:
        _, ids, _, scales = output
        ctx.mark_non_differentiable(ids, scales)
        return {"ids": ids, "tokens": len(given.x)}

    def backward(self, given: Given, of_rows: torch.Tensor, _ids: None, of_weights: torch.Tensor, _scales: None) -> Any:
        if given.fp8:
            raise RuntimeError(f"weft.ops.{self.name} has no backward for fp8 rows; send rows of x's dtype")
        gradients = {}
        if "x" in given.wanted:
            gradients["x"] = find_op("moe_combine").sum_of_rows(of_rows, given)
        if "weights" in given.wanted:
            # moe_combine gives a choice's gradient at the ranks with its expert, a part of it at each, and zeros elsewhere.
            gradients["weights"] = torch.ops.weft.reduce_scatter.default(of_weights, given.team)[: given.tokens]
        return gradients

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """x, ids and weights of this rank's tokens."""
        _, k, experts, H = case.sizes
        T = case.field("tokens")[rank]
        return draw.own("x", (T, H)), draw_ids(draw, T, k, experts), draw.own("weights", (T, k))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(rows, ids, weights), and (scales) of fp8 rows, which are bytes.

        Rows and scales are 0 where this rank does not need them.
        """
        most = case.sizes[0]
        rows, ids, weights = (
            torch.cat([padded(tensors[at], most, fill) for tensors in by_rank])
            for at, fill in ((0, 0), (1, -1), (2, 0))
        )
        needed = shared_experts(case, rank).chosen(ids).any(-1, keepdim=True)
        if not case.field("fp8"):
            return torch.where(needed, rows, 0), ids, weights
        rows, scales = by_torch(rows)
        return torch.where(needed, rows.view(torch.uint8), 0), ids, weights, torch.where(needed, scales, 0)

    def results(
        self, case: Case, team: Team, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        (most, _, experts, _), fp8 = case.sizes, case.field("fp8") is True
        if isinstance(case.design, str):
            held = shared_experts(case, team.rank) if case.field("tp") else experts
            named = {"experts": held, "max_tokens": most, "dtype": E4M3 if fp8 else None}
            dispatched = moe_dispatch(x, Routing(ids, weights), team, **named, algorithm=case.design)
            rows, (ids, weights), scales = dispatched.rows, dispatched.routing, dispatched.scales
        else:
            given = DispatchArguments(
                x, Routing(ids, weights), experts, most, fp8, kept=False, team=team.name, algorithm=AUTO
            )
            rows, ids, weights, scales = self.run(case.design, team, given)
        return (rows.view(torch.uint8), ids, weights, scales) if fp8 else (rows, ids, weights)

    def defined(
        self, case: Case, team: Team, out: tuple[torch.Tensor, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tensors that arrived, as ``reference`` has them, but no receive buffers."""
        rows, ids, weights, *scales = out
        needed = shared_experts(case, team.rank).chosen(ids).any(-1, keepdim=True)
        wanted = (torch.where(needed, x, 0) for x in scales)
        return torch.where(needed, rows, 0), ids.clone(), weights.clone(), *wanted

    def cases(self) -> Iterator[Case]:
        yield from self.exchange_cases()
        pieces = DispatchPieces(chunk=4, block=32, num_warps=2)
        for w in (2, 3):
            for design in (
                PushRows(chunk=4, block=32, num_warps=4),
                DispatchWords(row_bytes=1024, num_warps=2),
                pieces,
            ):
                yield self.case(w, BF16, 30, 2, 12, 72, design=design, tokens=(30, 7, 30)[:w])
        yield replace(self.case(2, BF16, 5, 3, 4, 24, design="lamport", tokens=(5, 4)), layout="offset")
        for design in ("push", "pipelined", "lamport"):
            for dtype in (BF16, FP16, FP32):
                for data in ("random", "special", "subnormal"):
                    yield self._fp8_case(2, dtype, (9, 2, 8, 200), (9, 4), design, data)
            for w in (1, 3, 4):
                yield self._fp8_case(w, BF16, (5, 3, 12, 16), (5, 0, 3, 5)[:w], design)
            yield self._fp8_case(2, BF16, (3, 1, 6, 2200), (3, 2), design)
            yield self._fp8_case(2, FP16, (7, 3, 6, 384), (7, 0), design, "special")
        yield self._fp8_case(2, BF16, (11, 3, 12, 256), (11, 3), DispatchWords(row_bytes=4096, num_warps=2))
        for w, row_bytes in ((1, 1024), (2, 256), (2, 4096), (3, 512), (4, 1024)):
            design = DispatchWords(row_bytes=row_bytes, num_warps=max(1, row_bytes // 512), rounds=True)
            yield self._fp8_case(w, BF16, (11, 3, 12, 256), (11, 0, 5, 1)[:w], design)
        yield self._fp8_case(2, FP32, (9, 2, 8, 128), (9, 4), "lamport", "subnormal")
        pieces = DispatchPieces(pieces=(1, 2, 1), chunk=4, block=128, num_warps=2)
        for design in (PushRows(chunk=4, block=128, num_warps=4), pieces):
            yield self._fp8_case(2, BF16, (30, 2, 12, 300), (30, 7), design)
        for w, tokens in ((2, (33, 16)), (3, (0, 33, 1)), (4, (32, 8, 0, 33))):
            yield self._fp8_case(w, BF16, (33, 2, 12, 200), tokens, "pipelined")

    def _fp8_case(
        self, w: int, dtype: torch.dtype, sizes: tuple, tokens: tuple[int, ...], design: Any, data: str = "random"
    ) -> Case:
        return replace(self.case(w, dtype, *sizes, design=design, tokens=tokens, fp8=True), data=data)


MOE_DISPATCH = register(MoeDispatch())

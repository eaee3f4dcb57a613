"""moe_combine: results of each token's experts come back to its rank, weighted and added up.

    partial[r][s, t] = sum over the choices j of token t of rank s whose expert rank r holds of weight[j] * y[j]     j ascending
    out[t]           = sum over the ranks r of partial[r]

Each sum is in fp32, rounded once. Ranks without an expert that the token chose send nothing and are left out.

Over nodes each node adds up its ranks' partials of a token, rounds the sum to y's dtype, and sends it to the token's rank over
the rail of that rank: once a node. There the nodes' sums are added in fp32, own node first.

Backward: dout goes to the ranks that the token's row went to, by moe_dispatch; they compute dy[pair] = weight * dout[token] and
dweight[token, j] = dout[token] . y[pair]. That of moe_dispatch is this op without weights: a row of each rank for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.arguments import check_int
from weft.costs import exchanges, fitted
from weft.costs.gpu import gpu_of
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.collectives.over_nodes import OverNodes, added_over_nodes
from weft.ops.collectives.reduce_scatter import reduce_scatter
from weft.ops.knobs import design_type
from weft.ops.layout import Given
from weft.ops.local import check_shape
from weft.ops.moe.check import check_dispatched
from weft.ops.moe.exchange.exchange_op import (
    CombineArguments,
    DispatchArguments,
    ExchangeOp,
    PushRows,
    choices_of_all,
    shared_experts,
)
from weft.ops.moe.exchange.lamport import CombineWords, combine_words
from weft.ops.moe.exchange.pipelined import CombinePieces, combine_pieces
from weft.ops.moe.exchange.push import combine_rows
from weft.ops.moe.moe_dispatch import MOE_DISPATCH
from weft.ops.moe.moe_sum import moe_sum
from weft.ops.moe.routing import Dispatched, Experts, Routing
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_team, check_tensor
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Results of all ranks up to which "lamport" is a choice of three and four ranks, and of more: a program then holds the loads of
# several owners' tokens, and beyond nothing was measured. The first is of four ranks (results/h200-x4-moe).
MEASURED_BYTES, BEYOND_FOUR = 256 << 20, 2 << 20


@design_type
class SumThenScatter:
    """moe_sum of all tokens, then reduce_scatter: where nearly all ranks have a row of each token."""


class CombineCall(NamedTuple):
    """Sizes that the plan depends on. weighted=False: a row for each token, summed in rank order."""

    tokens: int
    choices: int
    width: int
    dtype: torch.dtype
    design: str = AUTO
    tp: int = 1
    weighted: bool = True


def moe_combine(
    y: torch.Tensor, dispatched: Dispatched, tokens: int, team: Team, *, algorithm: str = "auto"
) -> torch.Tensor:
    """out[t] = sum over the choices j of weight[t, j] * result[t, j] -> [tokens, H]. Collective.

    y           [W * max_tokens * k, H], fp16, bf16 or fp32: row p the result of pair p of ``dispatched``, as ``grouped_matmul``
                gives it; rows of other ranks' experts are not read
    dispatched  of ``moe_dispatch``. Where tp ranks hold slices of its experts, each has a summand of every result
    tokens      T of this rank, as it was dispatched
    algorithm   "auto", "push" (each rank sends what it has), "sum_then_scatter" (moe_sum, then reduce_scatter), "pipelined" (as
                that, with copy engines under the sums, for many tokens) or "lamport" (as that, in one kernel and one hop, for
                few tokens and, of two to four ranks, for many)

    Each rank adds up its choices in their order, and the token's rank adds up the ranks in theirs, both in fp32, rounded once:
    the same bits from run to run. "push", "pipelined" and "lamport" add up the ranks in their order; "sum_then_scatter" has the
    order of ``reduce_scatter``, which for more than two ranks depends on the sizes. Over nodes each node does so for its ranks
    by ``algorithm``. The host reads nothing; captured in a CUDA graph it replays correctly, after one call outside with these
    sizes. Gradients of y, 0 for other ranks' experts, and of ``dispatched.routing.weights``; its backward is collective too.
    ValueError for arguments that do not fit.
    """
    op = "moe_combine"
    check_team(op, team, over_nodes=True)
    check_tensor(op, "y", y, team, FLOATS, over_nodes=True)
    tp = check_dispatched(op, dispatched, team, in_node=True)
    ids, weights = dispatched.routing
    check_shape(op, "y", y, (ids.numel(), "H"))
    if y.shape[1] == 0:
        raise ValueError(f"{op}: y has shape {tuple(y.shape)}; rows have at least one element")
    check_int(f"{op}: tokens", tokens, 0, len(ids) // team.size)
    check_choice(op, "algorithm", algorithm, MOE_COMBINE.algorithms)
    return MOE_COMBINE.dispatch(
        CombineArguments(y, ids, weights, dispatched.experts.total, tokens, team.name, algorithm, tp)
    )


class MoeCombine(ExchangeOp):
    """sizes of a case: max_tokens, k, experts, H. Its field ``tokens`` has each rank's tokens.

    A case with the field ``unweighted`` has a row of each rank for each token, as gradients of moe_dispatch's rows are.
    """

    name, alias = "moe_combine", "moe-combine"
    bits = {
        **dict.fromkeys(("push", "pipelined", "lamport"), "depend on W and the experts of each rank"),
        **dict.fromkeys(("sum_then_scatter", "over_nodes"), "depend on T, W, the experts of each rank and the design"),
    }
    differs = {"tokens": ()}
    saves = ("y", "ids", "weights")
    designs = {
        "push": PushRows, "sum_then_scatter": SumThenScatter, "pipelined": CombinePieces, "lamport": CombineWords,
        "over_nodes": OverNodes,
    }  # fmt: skip
    calls = CombineCall
    flag = "unweighted"

    def costs(self, call: CombineCall, machine: Machine) -> dict[str, float]:
        item = call.dtype.itemsize
        rows = exchanges.Rows(
            call.tokens, call.choices, call.width, item, machine.world_size, call.tp, weighted=call.weighted,
            block=self.default("lamport", call, machine).row_bytes // item,
        )  # fmt: skip
        of = fitted.read()
        times = exchanges.combine(gpu_of(machine.caps), of.exchanges, of.pushes, rows)
        if not call.weighted and self.has_room(call, machine):
            del times["sum_then_scatter"]
        most = MEASURED_BYTES if machine.world_size <= 4 else BEYOND_FOUR
        if machine.world_size > 2 and self.whole_bytes(call, machine) > most:
            del times["lamport"]
        return times

    def tuned(self, call: CombineCall, machine: Machine) -> Planned | None:
        row = super().tuned(call, machine)
        return None if row is not None and row.name == "sum_then_scatter" and not call.weighted else row

    def whole_bytes(self, call: CombineCall, machine: Machine) -> int:
        """Bytes of the results of all ranks."""
        return machine.world_size * call.tokens * call.width * call.dtype.itemsize

    def default(self, name: str, call: CombineCall, machine: Machine) -> Any:
        if machine.world_size == 2:
            if name == "lamport" and (whole := self.whole_bytes(call, machine)) > 1 << 20:
                # 16 bytes a thread, of many tokens 32; the words of four ranks do not fit the registers of a warp.
                return CombineWords(row_bytes=512 if whole <= 64 << 20 else 1024)
            if name == "pipelined":
                # For two ranks the last kernel takes 32 registers on sm_90, so 16 programs are resident; for eight 56.
                return CombinePieces(per_sm=16)
        return super().default(name, call, machine)

    def space(self, call: CombineCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield SumThenScatter()
        yield from super().space(call, machine, quick)
        sizes = ((256, 1), (4096, 8)) if quick else ((256, 1), (512, 1), (1024, 2), (4096, 8))
        yield from (CombineWords(row_bytes=size, num_warps=warps) for size, warps in sizes)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, design: Any, team: Team, given: CombineArguments) -> torch.Tensor:
        """``moe_combine`` of checked arguments."""
        self.check_design(design)
        if isinstance(design, OverNodes):
            return self._run_over_nodes(design, team, given)[: given.tokens]
        if isinstance(design, CombineWords):
            return combine_words(design, team, given)
        if isinstance(design, CombinePieces):
            return combine_pieces(design, team, given)
        if isinstance(design, PushRows):
            return combine_rows(design, team, given)
        y, ids, weights, held = given.y, given.ids, given.weights, given.held(team)
        if weights is None:
            summand = y.masked_fill(~held.chosen(ids).any(-1, keepdim=True), 0)
        else:
            summand = moe_sum(y, Routing(ids, weights), held)
        return reduce_scatter(summand, team)[: given.tokens].contiguous()

    def _run_over_nodes(self, design: OverNodes, team: Team, given: CombineArguments) -> torch.Tensor:
        """Sums of all max_tokens tokens of this rank.

        Experts of a node count from 0 within it, as in moe_dispatch.
        """
        nodes, most, of_node = team.shape.nodes, len(given.ids) // team.size, given.experts // team.shape.nodes
        weights = [None] * nodes if given.weights is None else given.weights.detach().chunk(nodes)
        rows, ids = given.y.detach().chunk(nodes), (given.ids - team.rail.index * of_node).chunk(nodes)

        def of(node: int) -> torch.Tensor:
            part = given._replace(y=rows[node], ids=ids[node], weights=weights[node], experts=of_node, tokens=most)
            return self.run(design.node.design, team.node, part)

        return added_over_nodes(team, of, design.node)

    def forward(self, given: CombineArguments) -> torch.Tensor:
        team = find_team(given.team)
        sizes = len(given.ids) // team.size, given.ids.shape[1], given.y.shape[1]
        call = CombineCall(*sizes, given.y.dtype, given.algorithm, given.tp, given.weights is not None)
        return self.run(self.plan(call, machine_of(team)).design, team, given)

    def fake(self, given: CombineArguments) -> torch.Tensor:
        return given.y.new_empty((given.tokens, given.y.shape[1]))

    def backward(self, given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        y, ids, weights, team = given.y, given.ids, given.weights, find_team(given.team)
        if weights is None:
            raise RuntimeError("weft.ops.moe_dispatch has no second derivative; ask for one gradient of it")
        most, held = len(ids) // team.size, Experts.grouped(given.experts, team.rank, team.size // given.tp, given.tp)
        own = slice(team.rank * most, team.rank * most + given.tokens)
        sent = DispatchArguments(
            x=grad.contiguous(), routing=Routing(ids[own], weights[own].to(grad.dtype)), experts=given.experts,
            max_tokens=most, fp8=False, kept=False, team=given.team, algorithm=AUTO, tp=given.tp,
        )  # fmt: skip
        arrived, *_ = MOE_DISPATCH.through_torch(sent)
        pairs = y, ids, weights, arrived, held.first, held.count
        return dict(zip(("y", "weights"), torch.ops.weft.moe_sum_grad.default(*pairs), strict=True))

    def sum_of_rows(self, rows: torch.Tensor, sent: Given) -> torch.Tensor:
        """Sums [tokens, H], in rank order, of all ranks' ``rows`` for this rank's tokens. Collective.

        rows  [W * max_tokens, H]: as ``moe_dispatch`` has sent them, such as gradients of its rows
        sent  arguments of moe_dispatch, with ids of all ranks and tokens of this one
        """
        given = CombineArguments(rows, sent.ids, None, sent.experts, sent.tokens, sent.team, AUTO, sent.tp)
        return self.through_torch(given)

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """y with NaN for pairs of other ranks' experts; ids, and weights unless ``unweighted``, of all."""
        ids, weights = choices_of_all(case, draw)
        here = shared_experts(case, rank).chosen(ids)
        here = here.any(-1) if case.field("unweighted") else here.flatten()
        y = draw.own("y", (len(here), case.sizes[3])).masked_fill(~here[:, None], torch.nan)
        return (y, ids) if case.field("unweighted") else (y, ids, weights)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        most, k, _, H = case.sizes
        _, ids, *weights = by_rank[rank]
        total = torch.zeros((len(ids), H), dtype=torch.float64, device=ids.device)
        for y, *_ in by_rank:
            factors = weights[0].double()[..., None] if weights else 1.0
            total += (y.view(len(ids), -1, H).double() * factors).nan_to_num(0.0).sum(1)
        return total[rank * most :][: case.field("tokens")[rank]]

    def accuracy(self, case: Case) -> Accuracy:
        # Tokens have weights of different sizes.
        return Accuracy(terms=case.sizes[1], partials=case.world_size, by_row=True)

    def results(
        self, case: Case, team: Team, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = case.field("tokens")[team.rank]
        given = CombineArguments(y, ids, weights, case.sizes[2], tokens, team.name, case.design, case.field("tp") or 1)
        if not isinstance(case.design, str):
            return self.run(case.design, team, given)
        if weights is None:
            return self.dispatch(given)
        dispatched = Dispatched(y, Routing(ids, weights), shared_experts(case, team.rank))
        return moe_combine(y, dispatched, tokens, team, algorithm=case.design)

    def cases(self) -> Iterator[Case]:
        designs = self.algorithms[1:]
        yield from self.exchange_cases()
        both = {}, {"unweighted": True}
        for w in (2, 3):
            pieces = CombinePieces(pieces=(1, 2, 1), chunk=4, block=32, num_warps=2, per_sm=1)
            for design in (PushRows(chunk=4, block=32, num_warps=4), CombineWords(row_bytes=1024, num_warps=2), pieces):
                yield self.case(w, BF16, 30, 2, 12, 72, design=design, tokens=(30, 7, 30)[:w])
        # Tiles that lie in one token.
        for w, dtype in ((1, BF16), (2, FP16), (2, FP32), (3, BF16), (4, BF16), (8, BF16)):
            for more in both:
                tokens = (7, 0, 6, 1, 7, 3, 0, 2)[:w]
                yield self.case(w, dtype, 7, 3, 24, 256, design="lamport", tokens=tokens, **more)
        # As two ranks have them for more than 1 MiB: some tiles in one token, some across two.
        for H in (512, 384):
            yield self.case(2, BF16, 7, 3, 24, H, design=CombineWords(row_bytes=512), tokens=(7, 6))
        for w in (1, 2, 3, 4):
            for design in designs:
                yield self.case(w, BF16, 9, 2, 12, 40, design=design, tokens=(5, 0, 9, 3)[:w], unweighted=True)
        for w, dtype, tokens in ((2, BF16, (70, 41)), (3, FP16, (0, 70, 8)), (4, FP32, (70, 9, 0, 64))):
            for more in (*both, {"skew": "some"}):
                yield self.case(w, dtype, 70, 2, 12, 25, design="pipelined", tokens=tokens, **more)


MOE_COMBINE = register(MoeCombine())

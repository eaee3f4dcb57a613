"""all_gather_matmul: GEMM of all ranks' rows of A, carried by copy engines, and this rank's B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx

from weft.costs import gemms
from weft.kernels.fp8 import E4M3, Fp8
from weft.kernels.operands import ScaledMatrix, has_dense_rows
from weft.kernels.tile_schedule import place_of
from weft.ops.case import Case, Inputs
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.collectives.over_nodes import OverNodes, swapped
from weft.ops.gemm.fp8_operands import by_design
from weft.ops.gemm.gemm_op import (
    COLUMN_PARALLEL,
    FP8,
    OVERLAPPED_BITS,
    GemmCall,
    check_operands,
    fp8_scheme,
    named,
    product,
    rotated,
)
from weft.ops.gemm.matmul import MATMUL, gradient_dtype, weight_gradient
from weft.ops.knobs import counts, design_type, flipped, halved, knob
from weft.ops.layout import Given
from weft.ops.op import Op, define, register
from weft.ops.overlap import cases
from weft.ops.overlap.eager import submit
from weft.ops.overlap.fp8_weights import Asked, OverlappedFp8
from weft.ops.overlap.gathered import begin_gather, gathered_in_sequence, with_scales
from weft.ops.overlap.operands import Operand, call_of, form_of, grain_of, multiply, quantized
from weft.ops.overlap.pipelined import CHUNKS, check_pipelined, pieces_of, runs_of
from weft.ops.overlap.sequential import Overlapped, Sequential, check_own_first
from weft.ops.overlap.space import pipelines
from weft.ops.registration import check_flag, check_list, check_team
from weft.plan import table
from weft.plan.planned import AUTO, Machine, machine_of
from weft.runtime.side_streams import side_streams
from weft.runtime.team.checks import agree
from weft.runtime.team.team import find_team
from weft.transport.copy_channel import await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class Pipelined:
    """A cuBLAS GEMM for each chunk of the peers' rows as it arrives.

    chunks       GEMMs per rank's rows, at most MAX_CHUNKS
    streams      number of streams that the GEMMs use in turn: with two a GEMM's last round of tiles overlaps with the next GEMM
    span         ranks whose rows may share one GEMM where they are adjacent in memory (chunks=1)
    begin_first  the first GEMM waits for begin_kernel, which it could otherwise keep from running
    """

    chunks: int = knob(1, CHUNKS, halved())
    streams: int = knob(2, counts(), halved())
    span: int = knob(1, counts(), halved())
    begin_first: bool = knob(False, near=flipped)
    __post_init__ = check_pipelined


def all_gather_matmul(
    a_shard: torch.Tensor | Fp8,
    b: torch.Tensor | Fp8 | Sequence[torch.Tensor] | Sequence[Fp8],
    team: Team,
    *,
    own_first: bool = False,
    return_gathered: bool = False,
) -> Any:
    """Compute all_gather(a_shard[M/W, K]) @ b[N, K].T -> [M, N] with fp32 accumulation.

    The dtype of the result is that of both operands: fp16, bf16 or fp32.

    b                one [N, K], or several, each with another N: the rows are gathered once, and a list of results returned
    own_first        rank r's result has the rows of ranks r, r + 1, … (mod W) in this order, as ``matmul_reduce_scatter`` with
                     own_first takes them. For computations that treat all rows alike, such as an MLP: rows lie in the order
                     of their arrival, so that one GEMM computes all of the peers' rows. For a team of one node
    return_gathered  return (result, all_gather(a_shard)); the gathered rows have the order of the result's rows

    Every b may have its rows or its columns contiguous ([N, K] or the transpose of a [K, N]). Every rank has its own b (its
    share of N); M, N, K, dtype, own_first, b's layout, and which operands need gradients, are the same on all ranks, which
    compare all but the last on the host at the first call with them. Over several nodes each shard crosses to a node once.
    Collective: all ranks call it, in the same order, on one stream.
    With ``Fp8`` weights (``matmul``) rows are gathered in fp8 with their scales; no gradients, no return_gathered.
    ValueError for shapes, dtypes or devices that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    device = check_team("all_gather_matmul", team, over_nodes=True)
    check_own_first("all_gather_matmul", own_first, team)
    check_flag("all_gather_matmul", "return_gathered", return_gathered)
    if isinstance(b, Fp8) or (isinstance(b, (list, tuple)) and b and all(isinstance(one, Fp8) for one in b)):
        if return_gathered:
            raise ValueError(
                "all_gather_matmul: return_gathered=True with an fp8 weight; gather the rows by all_gather"
            )
        results = _FP8.call_with(a_shard, [b] if isinstance(b, Fp8) else b, team, Asked(own_first))
        return results[0] if isinstance(b, Fp8) else results
    if isinstance(b, torch.Tensor) and not return_gathered:
        check_operands("all_gather_matmul", a_shard, b, device, "a_shard")
        return ALL_GATHER_MATMUL.dispatch(a_shard, b, team.name, own_first)
    several = [b] if isinstance(b, torch.Tensor) else check_list("all_gather_matmul", "b", b)
    for one in several:
        check_operands("all_gather_matmul", a_shard, one, device, "a_shard")
    *outs, gathered = _SEVERAL.dispatch(a_shard, several, team.name, own_first)
    out = outs[0] if isinstance(b, torch.Tensor) else outs
    return (out, gathered) if return_gathered else out


class AllGatherMatmul(Overlapped):
    name, alias = "all_gather_matmul", "ag-gemm"
    bits = OVERLAPPED_BITS
    saves = ("a_shard", "b")
    designs = {"pipelined": Pipelined, "sequential": Sequential, "over_nodes": OverNodes}
    internal = ("over_nodes",)
    rows_sharded = gathers = True
    predict, judged = staticmethod(gemms.ag_gemm), ("pipelined", "sequential")
    options = variants = ("local_first", *FP8)
    projections = COLUMN_PARALLEL

    # --- choosing ----------------------------------------------------------------------------------------------------

    def row_for(self, call: GemmCall, machine: Machine) -> table.Found | None:
        if call.local_first:
            # A row of that order has precedence, in its bucket only: another design is faster there than in rank order.
            row = table.find(self.variant(call), call[:3], call.dtype, machine.world_size, machine.caps)
            if row and row.exact:
                return row
        return super().row_for(call, machine)

    def default(self, name: str, call: GemmCall, machine: Machine) -> Any:
        world, rows = machine.world_size, call.M // machine.world_size
        if name == "pipelined":
            if call.fp8 and (world == 2 or call.block_fp8):
                # Rows of one byte arrive well before the GEMM before theirs ends. Scales of several ranks' rows are not
                # adjacent as cuBLAS reads scales of blocks.
                return Pipelined()
            if world == 2:
                return Pipelined(chunks=2 if call.N >= 8192 and rows >= 1024 else 1)
            # Two ranks' rows in one GEMM use the SMs better, if N makes it long enough to hide the next ranks' rows.
            return Pipelined(span=2 if call.N >= 8192 else 1)
        kind = torch.uint8 if call.fp8 else call.dtype
        gather = CollectiveCall(rows * call.K * kind.itemsize, kind)
        return Sequential(collective=ALL_GATHER.plan(gather, machine), gemm=MATMUL.local_plan(call, machine))

    def space(self, call: GemmCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from (self.default(name, call, machine) for name in self.algorithms[1:])
        for design in pipelines(Pipelined(), machine):
            yield from (design, replace(design, begin_first=True))

    # --- judging -----------------------------------------------------------------------------------------------------

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        result = product(torch.cat([a for a, *_ in by_rank]), named(case, by_rank[rank])[1])
        return rotated(result, rank, case.world_size) if case.field("local_first") else result

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        local_first, (a_shard, b, _) = bool(case.field("local_first")), named(case, tensors)
        if case.design == AUTO:
            return all_gather_matmul(a_shard, b, team, own_first=local_first)
        return self.run(self.design_of(case, machine_of(team)), team, a_shard, b, local_first)

    def cases(self) -> Iterator[Case]:
        return cases.all_gather_matmul_cases(self)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_all_gather_matmul_cases(self)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        M, _, K = sizes
        return M // world_size * K * dtype.itemsize * (world_size - 1)

    def traffic_of(self, case: Case) -> int:
        return super().traffic_of(replace(case, dtype=E4M3) if fp8_scheme(case) else case)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        design: Pipelined | Sequential | OverNodes,
        team: Team,
        a_shard: Operand,
        b: Operand,
        local_first: bool = False,
    ) -> torch.Tensor:
        """``all_gather_matmul`` with checked arguments by ``design``, the same on all ranks."""
        return self.run_several(design, team, a_shard, (b,), local_first)[0]

    def run_several(
        self,
        design: Pipelined | Sequential | OverNodes,
        team: Team,
        a_shard: Operand,
        bs: Sequence[Operand],
        local_first: bool = False,
        gathers: bool = False,
        into: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """Results for each b, then the gathered 16-bit rows if ``gathers``; in ``into`` if that is given."""
        self.check_design(design)
        shard = a_shard if isinstance(a_shard, Fp8) else a_shard.contiguous()
        results = list(into) or empty_results(shard, bs, team, gathers)
        if isinstance(design, Sequential):
            _run_sequential(design, team, shard, bs, results, local_first)
            return results
        if isinstance(design, OverNodes):
            # node k    | rows of k         | rows of k-1 | rows of k-2 |                each gathered in the node meanwhile
            # rail      | own shard to k+1, from k-1 | to k+2, from k-2 |
            for node, piece in swapped(team, [shard] * team.shape.nodes, design.node):
                of_node = [result.chunk(team.shape.nodes)[node] for result in results]
                self.run_several(design.node.design, team.node, piece, bs, gathers=gathers, into=of_node)
            return results
        rows = with_scales(quantized(shard, bs[0]), bs[0])
        gathered = _run_pipelined(design, team, rows, bs, results[: len(bs)], local_first)
        if gathers:
            # A copy, since later calls write over the workspace; the own shard is not in it.
            panels = list(gathered.chunk(team.size))
            panels[place_of.fn(team.rank, team.rank, team.size, local_first)] = shard.detach()
            torch.cat(panels, out=results[-1])
        return results

    def planned(
        self,
        team: Team,
        a: Operand,
        bs: Sequence[Operand],
        own_first: bool,
        gathers: bool = False,
        *,
        into: Sequence[torch.Tensor],
    ) -> None:
        rows, names = a.shape[0], ("a_shard.shape[0]", "b.shape[0]", "b.shape[1]", "dtype", "own_first")
        for b in bs if team.size > 1 else ():
            dense = isinstance(b, Fp8) or has_dense_rows(b)
            sizes = rows, *b.shape, b.dtype, own_first, dense, form_of(b)
            agree(self.name, team, (*names, "b has dense rows", "b's scales are of"), sizes)
        call = call_of(team.size * rows, a, bs[0], own_first)
        for b in bs[1:]:
            # The design of the widest b serves all, and so must read all.
            one, widest = call_of(team.size * rows, a, b, own_first), max(call.N, b.shape[0])
            call = call._replace(N=widest, dense=call.dense and one.dense, aligned=call.aligned and one.aligned)
        self.run_several(self.plan(call, machine_of(team)).design, team, a, bs, own_first, gathers, into)

    def eager(
        self, a_shard: torch.Tensor, bs: Sequence[torch.Tensor], team: str, own_first: bool, gathers: bool = False
    ) -> list[torch.Tensor]:
        """``planned``, replayed where the same tensors come again."""
        members, shard = find_team(team), a_shard.contiguous()
        results = empty_results(shard, bs, members, gathers)
        fields = own_first, len(bs)
        submit(
            self.name,
            members,
            (shard, *bs, *results),
            fields,
            lambda: self.planned(members, shard, bs, own_first, gathers, into=results),
        )
        return results

    def forward(self, a_shard: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False) -> torch.Tensor:
        return self.eager(a_shard, (b,), team, own_first)[0]

    def fake(self, a_shard: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False) -> torch.Tensor:
        return a_shard.new_empty((a_shard.shape[0] * find_team(team).size, b.shape[0]))

    def backward(self, given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        # Every rank multiplied this shard by another b: the gradient is the sum over the ranks, scattered by rows.
        a_shard, b, where = given.a_shard, given.b, (given.team, given.own_first)
        if given.wanted >= {"a_shard", "b"}:
            both = torch.ops.weft.all_gather_matmul_backward.default(grad, a_shard, b, *where, gradient_dtype(b))
            return dict(zip(("a_shard", "b"), both, strict=True))
        if "a_shard" in given.wanted:
            return {"a_shard": torch.ops.weft.matmul_reduce_scatter.default(grad, b.t(), *where)}
        return {"b": weight_gradient(grad, gathered_rows(a_shard, *where), b)}


def gathered_rows(a_shard: torch.Tensor, team: str, own_first: bool) -> torch.Tensor:
    """All ranks' rows, in the order of all_gather_matmul's result. Differentiable."""
    a = torch.ops.weft.all_gather.default(a_shard, team)
    return a.roll(-find_team(team).rank * a_shard.shape[0], 0) if own_first else a


class AllGatherMatmulSeveral(Op):
    """AllGatherMatmul for several b, with the gathered rows; its torch op takes and returns lists."""

    name = alias = "all_gather_matmul_several"

    def forward(
        self, a_shard: torch.Tensor, bs: Sequence[torch.Tensor], team: str, own_first: bool
    ) -> list[torch.Tensor]:
        return ALL_GATHER_MATMUL.eager(a_shard, bs, team, own_first, gathers=True)

    def fake(self, a_shard, bs, team, own_first):
        rows = a_shard.shape[0] * find_team(team).size
        return [*(a_shard.new_empty((rows, b.shape[0])) for b in bs), a_shard.new_empty((rows, a_shard.shape[1]))]

    def keeps(self, ctx: FunctionCtx, given: Given, output: Sequence[torch.Tensor]) -> dict[str, Any]:
        return {"gathered": output[-1], "bs": list(given.bs)}

    def backward(self, given: Given, grads: Sequence[torch.Tensor]) -> dict[str, Any]:
        gathered, bs, (*of_outs, of_gathered), team = given.gathered, given.bs, grads, find_team(given.team)
        if given.own_first:  # reduce_scatter takes rows in rank order
            of_gathered = of_gathered.roll(team.rank * (len(gathered) // team.size), 0)
        of_shard = torch.ops.weft.reduce_scatter.default(of_gathered, team.name)
        for grad, b in zip(of_outs, bs, strict=True):
            of_shard = of_shard + torch.ops.weft.matmul_reduce_scatter.default(grad, b.t(), team.name, given.own_first)
        return {
            "a_shard": of_shard,
            "bs": [weight_gradient(grad, gathered, b) for grad, b in zip(of_outs, bs, strict=True)],
        }


ALL_GATHER_MATMUL = register(AllGatherMatmul())
_SEVERAL = define(AllGatherMatmulSeveral())
_FP8 = OverlappedFp8(ALL_GATHER_MATMUL)


def empty_results(shard: Operand, bs: Sequence[Operand], team: Team, gathers: bool = False) -> list[torch.Tensor]:
    """A new result for each b, then one for the gathered rows if ``gathers``."""
    rows, columns = team.size * shard.shape[0], [b.shape[0] for b in bs]
    if gathers:
        columns.append(shard.shape[1])
    return [torch.empty((rows, width), dtype=shard.dtype, device=shard.device) for width in columns]


def _run_sequential(
    design: Sequential,
    team: Team,
    shard: Operand,
    bs: Sequence[Operand],
    results: Sequence[torch.Tensor],
    local_first: bool,
) -> None:
    """Compute the results for each b, and the gathered rows if there is one more."""
    gathered, outs, whole = shard, results[: len(bs)], results[len(bs) :]
    if design.collective is not None and isinstance(bs[0], Fp8):
        own = with_scales(quantized(shard, bs[0]), bs[0])
        rows = gathered_in_sequence(design.collective.design, team, own, local_first)
        for b, out in zip(bs, outs, strict=True):
            by_design(design.gemm.design, ScaledMatrix(rows), b, out=out)
        return
    if design.collective is not None:
        into = whole[0] if whole and not local_first else None
        gathered = ALL_GATHER.run(design.collective.design, team, shard, into)
        if local_first:
            gathered = gathered.roll(-team.rank * shard.shape[0], 0)
    for b, out in zip(bs, outs, strict=True):
        MATMUL.run(design.gemm.design, None, gathered, b, out)
    for rows in whole:
        if rows is not gathered:
            rows.copy_(gathered.detach())


def _run_pipelined(
    design: Pipelined, team: Team, shard: Operand, bs: Sequence[Operand], outs: list[torch.Tensor], local_first: bool
) -> torch.Tensor:
    """Run a GEMM for the own shard, then one for each chunk of each peer's shard as it arrives.

    One GEMM may take several peers' shards. The GEMMs use the streams in turn. Returns the gathered rows in the result's
    order; this rank's are not written.

    signals  copy engine of rank s, after each chunk and the scales of its rows: flags[place of s, c] = epoch, if local_first
             flags[W + place of s, c]: in either order a row has one writer, so its epochs grow, whatever the order of earlier
             calls
    waits    wait_kernel, in the chunk's stream: the same flag >= epoch. It occupies one warp of one SM. GEMMs end without the
             peers, so begin_kernel runs eventually even if GEMMs take all SMs first
    reuse    of a half of A_full: CopyChannel

    copy  | s1 | s2 | s3 |                          chunks that arrive
    stream 0  | s0 | s2 |                                               rank 0 of 4: shards
    stream 1      | s1 | s3 |
    """
    world, rows, streams = team.size, shard.shape[0], side_streams(team, design.streams)
    pieces = list(pieces_of(rows, design.chunks, grain_of(bs[0])))
    streams.fork()
    with streams.urgent():
        gathered, landed, own = begin_gather(team, shard, [piece for _, piece in pieces], local_first)
        begun = streams.mark()
    if design.begin_first:
        streams.after(begun)
    for b, out in zip(bs, outs, strict=True):
        multiply(shard, b, out[own * rows : (own + 1) * rows])
    turn = 1
    for places in runs_of((own + 1) % world, world, design.span):
        for number, piece in pieces:
            first, last = places.start * rows + piece.start, (places.stop - 1) * rows + piece.stop
            with streams.turn(turn):
                streams.after(begun)
                await_chunk(landed, number, places.start, len(places))
                arrived = gathered.at(places, piece)
                for b, out in zip(bs, outs, strict=True):
                    multiply(arrived, b, out[first:last])
            turn += 1
    streams.join()
    team.copy_engine.join()
    return gathered.data

"""matmul_reduce_scatter: a GEMM over each rank's share of K, summed over ranks and scattered by rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weft.costs import gemms
from weft.kernels.fp8 import Fp8
from weft.kernels.operands import has_dense_rows
from weft.kernels.tile_schedule import place_of
from weft.ops.case import Case, Inputs, part_of, sum_of
from weft.ops.collectives import fp8_wire
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.collectives.over_nodes import OverNodes, added_over_nodes
from weft.ops.collectives.reduce_scatter import REDUCE_SCATTER
from weft.ops.gemm.gemm_op import FP8, OVERLAPPED_BITS, ROW_PARALLEL, GemmCall, check_operands, named, product, rotated
from weft.ops.gemm.matmul import MATMUL, weight_gradient
from weft.ops.gemm.tile import default_tile, splits_by_default
from weft.ops.knobs import counts, design_type, flipped, halved, knob
from weft.ops.layout import Given
from weft.ops.op import register
from weft.ops.overlap import cases, fused_reduce
from weft.ops.overlap.all_gather_matmul import gathered_rows
from weft.ops.overlap.eager import submit
from weft.ops.overlap.fp8_rows import add_words_up, words_of_row
from weft.ops.overlap.fp8_weights import Asked, OverlappedFp8
from weft.ops.overlap.fused_reduce import Fused, piece_for
from weft.ops.overlap.operands import Operand, call_of, form_of, grain_of, multiply, quantized, rows_at
from weft.ops.overlap.pipelined import CHUNKS, Sending, add_up, check_pipelined, pieces_of, rows_of, send_partials
from weft.ops.overlap.sequential import Overlapped, Sequential, check_own_first, wire_of
from weft.ops.overlap.space import fused_tiles, pipelines
from weft.ops.registration import check_choice, check_divides, check_has_rows, check_team
from weft.plan.planned import AUTO, Machine, machine_of
from weft.runtime.side_streams import side_streams
from weft.runtime.team.checks import agree
from weft.runtime.team.team import find_team
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel, await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class Pipelined:
    """A cuBLAS GEMM for each piece of the peers' rows, sent by the copy engine; then one for the own rows.

    chunks        GEMMs per rank's rows, at most MAX_CHUNKS
    streams       number of streams that the GEMMs use in turn
    span          ranks whose rows may share one GEMM where they are adjacent in memory (chunks=1)
    accumulate    the GEMM of a rank's own rows adds to the only peer's partial result, in place of a sum kernel after it
                  (two ranks)
    local_pieces  GEMMs of a rank's own rows of a chunk: the sums of one run during the next GEMM (not with accumulate)
    fp8_wire      the peers' rows travel in fp8 (weft.ops.overlap.fp8_rows; not with accumulate)
    """

    chunks: int = knob(1, CHUNKS, halved())
    streams: int = knob(1, counts(), halved())
    span: int = knob(1, counts(), halved())
    accumulate: bool = knob(False, near=flipped)
    local_pieces: int = knob(1, counts(), halved())
    fp8_wire: bool = False

    def __post_init__(self) -> None:
        check_pipelined(self)
        if self.local_pieces > 1 and self.accumulate:
            raise ValueError(
                f"local_pieces={self.local_pieces} is for sums after a GEMM, and accumulate=True has none; pass 1"
            )
        if self.fp8_wire and self.accumulate:
            raise ValueError("fp8_wire=True: a GEMM adds to rows of 16 bits alone; leave accumulate out")


def matmul_reduce_scatter(
    a: torch.Tensor | Fp8, b: torch.Tensor | Fp8, team: Team, *, own_first: bool = False, wire: str = "same"
) -> torch.Tensor:
    """Sum a[M, K] @ b[N, K].T over the ranks and return rows rank * M/W .. -> [M/W, N].

    own_first  rank r's a has the rows of ranks r, r + 1, … (mod W) in this order, as ``all_gather_matmul`` with own_first
               returns them. For a team of one node
    wire       "same": partial results travel as they are; "fp8": in e4m3 with a scale for 128 columns, half of the bytes, from
               fp16 or bf16, within one node; "auto": so where it is predicted to take less time. Bound on the error:
               weft.ops.overlap.fp8_rows

    a and b hold this rank's share of K, of any size; M, N, dtype and own_first are the same on all ranks, which compare them
    on the host at the first call with them. Partial results are sent in the dtype of a and b (fp16, bf16, fp32), unless
    ``wire`` says fp8, and summed in fp32, in an order that depends on the row only. Over several nodes, the sum of each node is
    rounded to that dtype once more, and crosses once. With an ``Fp8`` weight b (``matmul``) there are no gradients.
    Collective: all ranks call it, in the same order, on one stream. ValueError
    for shapes, dtypes or devices that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    device = check_team("matmul_reduce_scatter", team, over_nodes=True)
    if isinstance(b, Fp8):
        check_has_rows("matmul_reduce_scatter", "a", a.data if isinstance(a, Fp8) else a)
    else:
        check_operands("matmul_reduce_scatter", a, b, device)
    check_own_first("matmul_reduce_scatter", own_first, team)
    if wire != "same":
        check_choice("matmul_reduce_scatter", "wire", wire, fp8_wire.WIRES)
    check_divides("matmul_reduce_scatter", "M", a.shape[0], team.size)
    if isinstance(b, Fp8):
        return _FP8.call_with(a, [b], team, Asked(own_first, wire=wire))[0]
    return MATMUL_REDUCE_SCATTER.dispatch(a, b, team.name, own_first, wire)


class MatmulReduceScatter(Overlapped):
    name, alias = "matmul_reduce_scatter", "gemm-rs"
    bits = OVERLAPPED_BITS
    saves = ("a", "b")
    designs = {"fused": Fused, "pipelined": Pipelined, "sequential": Sequential, "over_nodes": OverNodes}
    internal = ("over_nodes",)
    rows_sharded = sums = ranks_differ_in_k = True
    # "fused" is the fastest one at no committed shape of two ranks.
    predict, judged = staticmethod(gemms.gemm_rs), ("pipelined", "sequential")
    differs = {"a": (1,), "b": (1,)}  # K
    projections = ROW_PARALLEL
    options = variants = (*FP8, "fp8_wire")
    designs_in_fp8 = ("pipelined",)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def default(self, name: str, call: GemmCall, machine: Machine) -> Any:
        if call.fp8_wire and name == "pipelined":
            of_16_bits = self.default(name, call._replace(fp8_wire=False), machine)
            return replace(of_16_bits, accumulate=False, fp8_wire=True)
        world = machine.world_size
        if name == "fused":
            tile = default_tile(call.M // world, call.N, call.dtype, machine.caps, world)
            return Fused(tile=tile, split=splits_by_default(call.K), piece=piece_for(call.K, tile.block_k))
        if name == "pipelined":
            # As measured on two and four H200s; four stand for more. Short K hides little, so pieces are cut finer: four H200s,
            # 1024x5120x6400, 116 us by spans, 123 without (lab/h200-x4-segments.json@4c5a438; `weft tune gemm-rs`).
            span = 2 if call.K >= 4096 and world > 2 else 1
            if call.fp8:
                # Tiles of a GEMM on the other stream take the SMs that the last round of one leaves idle. Two H200s,
                # 4096x5120x12800: four GEMMs in sequence 586 us, two on two streams 509, the GEMM alone 432.
                return Pipelined(streams=2, span=span)
            if world == 2:
                return Pipelined(chunks=2, accumulate=True) if call.M >= 4096 else Pipelined()
            if call.M >= 8192 or (call.M >= 4096 and call.K >= 4096):
                return Pipelined(streams=2, span=span)
            return Pipelined(span=span, local_pieces=2 if call.K < 4096 else 1)
        scatter = CollectiveCall(call.M * call.N * call.dtype.itemsize, call.dtype)
        return Sequential(collective=REDUCE_SCATTER.plan(scatter, machine), gemm=MATMUL.local_plan(call, machine))

    def space(self, call: GemmCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from (self.default(name, call, machine) for name in self.offered(call))
        yield from pipelines(Pipelined(fp8_wire=call.fp8_wire), machine)
        if call.fp8_wire:
            return
        if call.fp8:  # cuBLAS adds to no previous result
            yield from (Pipelined(chunks=chunks, streams=2, local_pieces=2) for chunks in (1, 2))
            return
        if machine.world_size == 2:
            yield from (
                Pipelined(chunks=chunks, streams=streams, accumulate=True)
                for chunks, streams in ((2, 1), (2, 2), (4, 1))
            )
        base = self.default("fused", call, machine)
        for design in fused_tiles(base, call.M // machine.world_size, call.dtype, machine, quick):
            yield from (design, replace(design, split=not design.split))

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        for one in super().around(design, machine, quick):
            if machine.world_size == 2 or getattr(one, "accumulate", False) == getattr(design, "accumulate", False):
                yield one

    # --- judging -----------------------------------------------------------------------------------------------------

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        world, turns = case.world_size, bool(case.field("local_first"))
        products = [product(*named(case, tensors)[:2]) for tensors in by_rank]
        return part_of(
            sum_of([rotated(x, -turns * peer % world, world) for peer, x in enumerate(products)]), rank, world
        )

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        local_first, (a, b, _) = bool(case.field("local_first")), named(case, tensors)
        if case.design == AUTO:
            return matmul_reduce_scatter(a, b, team, own_first=local_first, wire=wire_of(case))
        return self.run(self.design_of(case, machine_of(team)), team, a, b, local_first)

    def cases(self) -> Iterator[Case]:
        return cases.matmul_reduce_scatter_cases(self)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_matmul_reduce_scatter_cases(self)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        M, N, _ = sizes
        return M // world_size * N * dtype.itemsize * (world_size - 1)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        design: Fused | Pipelined | Sequential | OverNodes,
        team: Team,
        a: Operand,
        b: Operand,
        local_first: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``matmul_reduce_scatter`` of checked arguments by ``design``, the same on all ranks.

        into: the result; None: a new tensor.
        """
        self.check_design(design)
        if isinstance(design, Sequential):
            if design.collective is None:
                return MATMUL.run(design.gemm.design, None, a, b, into)
            partial = MATMUL.run(design.gemm.design, None, a, b)
            if local_first:
                partial = partial.roll(team.rank * (a.shape[0] // team.size), 0)
            return REDUCE_SCATTER.run(design.collective.design, team, partial, into)
        M = a.shape[0]
        if isinstance(design, OverNodes):
            # Other nodes' rows first: their sums cross while the node's own rows are computed.
            def of_node(node: int) -> torch.Tensor:
                return self.run(design.node.design, team.node, rows_at(a, rows_of(node, M, team.shape.nodes)), b)

            return added_over_nodes(team, of_node, design.node, into)
        out = torch.empty((M // team.size, b.shape[0]), dtype=a.dtype, device=a.device) if into is None else into
        if isinstance(design, Fused):
            fused_reduce.run(self.name, design, team, (a, b), out, local_first=local_first)
        else:
            _run_pipelined(design, team, quantized(a, b), b, out, local_first)
        return out

    def planned(
        self,
        team: Team,
        a: Operand,
        bs: Sequence[Operand],
        own_first: bool,
        *,
        into: Sequence[torch.Tensor],
        wire: str = "same",
    ) -> None:
        (b,), (out,) = bs, into
        dense = isinstance(b, Fp8) or has_dense_rows(b)
        if team.size > 1:
            names = ("a.shape[0]", "b.shape[0]", "dtype", "own_first", "b has dense rows", "b's scales are of", "wire")
            agree(self.name, team, names, (a.shape[0], b.shape[0], a.dtype, own_first, dense, form_of(b), wire))
        here = machine_of(team)
        call = fp8_wire.asked(self, wire, call_of(a.shape[0], a, b, own_first), here)
        design = self.plan(call, here).design
        self.run(design, team, a, b, own_first, out)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False, wire: str = "same"
    ) -> torch.Tensor:
        members = find_team(team)
        out = torch.empty((a.shape[0] // members.size, b.shape[0]), dtype=a.dtype, device=a.device)
        run = functools.partial(self.planned, members, a, (b,), own_first, into=[out], wire=wire)
        submit(self.name, members, (a, b, out), (own_first, wire), run)
        return out

    def fake(
        self, a: torch.Tensor, b: torch.Tensor, team: str, own_first: bool = False, wire: str = "same"
    ) -> torch.Tensor:
        return a.new_empty((a.shape[0] // find_team(team).size, b.shape[0]))

    def backward(self, given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        # This rank's a contributes to all ranks' rows of the output, so the gradient of the output is gathered.
        a, b, where = given.a, given.b, (given.team, given.own_first)
        if "a" not in given.wanted:
            return {"b": weight_gradient(gathered_rows(grad, *where), a, b)}
        if "b" in given.wanted:
            of_a, everywhere = torch.ops.weft.all_gather_matmul_several.default(grad, [b.t()], *where)
            return {"a": of_a, "b": weight_gradient(everywhere, a, b)}
        return {"a": torch.ops.weft.all_gather_matmul.default(grad, b.t(), *where)}


MATMUL_REDUCE_SCATTER = register(MatmulReduceScatter())
_FP8 = OverlappedFp8(MATMUL_REDUCE_SCATTER)


def _run_pipelined(design: Pipelined, team: Team, a: Operand, b: Operand, out: torch.Tensor, local_first: bool) -> None:
    """Run a GEMM for each piece of each peer's rows, then for the own rows, and add up.

    One GEMM may take several peers' rows. The copy engine carries a finished piece to its owner. The GEMMs use the streams in
    turn. With design.fp8_wire a kernel after a GEMM puts the piece in fp8, and the sums read it back.

    signals  copy engine of rank s: flags[buffer of s, piece] = epoch at the owner, after the piece
    waits    wait_kernel, after the own piece's GEMM: flags[d, piece] >= epoch, all d. GEMMs end without the peers, so all
             ranks send all their pieces
    reuse    of a half of the receive buffers: CopyChannel

    stream 0  | o1 | o3 | sum |                                           rank 0 of 4: pieces by owner
    stream 1    | o2 | own |
    copy           | o1 | o2 | o3 |

    stream 0  | o1 | o2 | o3 | own 0 | own 1 | sum 1 |                    one stream, local_pieces=2
    urgent                           | sum 0 |
    copy           | o1 | o2 | o3 |
    """
    (rows, N), me = out.shape, team.rank
    if design.accumulate and team.size != 2:
        raise ValueError(
            f"matmul_reduce_scatter: accumulate=True is for two ranks, and world_size={team.size}; leave it out"
        )
    # A partial result that one stream computes and another sends lives until the streams join.
    partial = torch.empty((team.size * rows, N), dtype=out.dtype, device=out.device)
    words = None
    if design.fp8_wire:
        words = torch.empty((len(partial), words_of_row(N)), dtype=torch.int32, device=out.device)
    sent = partial if words is None else words
    channel, streams = _channel(team, sent.dtype, rows * sent.shape[1]), side_streams(team, design.streams)
    arrived: list[Any] = []
    streams.fork()
    with streams.urgent():
        received, begun = channel.begin(team), streams.mark()
        team.copy_engine.fork()
    turn, computed = 0, begun
    how = Sending(
        chunks=design.chunks,
        streams=design.streams,
        span=design.span,
        begun=begun,
        local_first=local_first,
        words=words,
    )
    for number, piece, computed in send_partials((a, b), partial, received, channel, team, streams, how):
        turn += 1
        if design.accumulate:
            # The peer is about as far, so wait for its piece during the next GEMM, not from the beginning.
            with streams.urgent():
                streams.after(computed)
                await_chunk(channel.landed, number, 0, team.size - 1)
                out[piece].copy_(received[0, piece.start * N : piece.stop * N].view(-1, N))
                arrived.append(streams.mark())
    of_own = rows_of(place_of.fn(me, me, team.size, local_first), team.size * rows, team.size)
    own, own_partial, grain = rows_at(a, of_own), partial[of_own], grain_of(b)
    for number, piece in pieces_of(rows, design.chunks, grain):
        with streams.turn(turn):
            if design.accumulate:
                streams.after(arrived[number])
                multiply(rows_at(own, piece), b, out[piece], add=True)
            else:
                for _, part in pieces_of(piece.stop - piece.start, design.local_pieces, grain):
                    part = slice(piece.start + part.start, piece.start + part.stop)
                    is_last = part.stop == piece.stop
                    multiply(rows_at(own, part), b, own_partial[part])
                    done = streams.mark()
                    # The last part's sum follows its GEMM; other sums run beside the next GEMM.
                    with nullcontext() if is_last else streams.urgent():
                        # Queue the sum after the GEMMs that peers wait for, or its programs would take the SMs first.
                        for mark in (begun, computed, done):
                            streams.after(mark)
                        await_chunk(channel.landed, number, 0, team.size - 1)
                        theirs = received[:, part.start * sent.shape[1] :]
                        add = add_up if words is None else add_words_up
                        add(own_partial[part], theirs, out[part], team, early=is_last)
        turn += 1
    streams.join()
    team.copy_engine.join()


def _channel(team: Team, dtype: torch.dtype, size: int) -> CopyChannel:
    def make(capacity: int) -> CopyChannel:
        return CopyChannel.make(team, team.empty((2, team.size - 1, capacity), dtype=dtype), team.size - 1)

    return grown_workspace(team, ("matmul_reduce_scatter pipelined", dtype), size, make)

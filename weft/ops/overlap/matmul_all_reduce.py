"""matmul_all_reduce: a GEMM over each rank's share of K, summed over the ranks, bitwise equal on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weft.costs import gemms
from weft.kernels.fp8 import Fp8
from weft.kernels.operands import ScaledMatrix, rows_contiguous
from weft.kernels.tile_schedule import buffer_of
from weft.ops.case import Case, Inputs, sum_of
from weft.ops.collectives import fp8_wire
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.collectives.over_nodes import ScatterGather
from weft.ops.gemm import sliced, small_m
from weft.ops.gemm.fp8_operands import by_design
from weft.ops.gemm.gemm_op import FP8, OVERLAPPED_BITS, ROW_PARALLEL, GemmCall, check_operands, named, product
from weft.ops.gemm.matmul import MATMUL, gradients_of_matmul
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.gemm.tile import Tile, default_tile, splits_by_default
from weft.ops.knobs import counts, design_type, halved, knob
from weft.ops.layout import Given
from weft.ops.op import INVARIANT, register
from weft.ops.overlap import cases, fused_reduce, sliced_reduce
from weft.ops.overlap.eager import submit
from weft.ops.overlap.fp8_weights import Asked, OverlappedFp8
from weft.ops.overlap.fused_reduce import Fused, piece_for
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.ops.overlap.operands import Operand, call_of, form_of, grain_of, multiply, padded_to, quantized, rows_at
from weft.ops.overlap.pipelined import (
    CHUNKS,
    SUM_WARPS,
    Sending,
    add_up,
    check_pipelined,
    pieces_of,
    rows_of,
    send_partials,
    share,
)
from weft.ops.overlap.sequential import Overlapped, Sequential, rows_overlap, wire_of
from weft.ops.overlap.sliced_reduce import SlicedReduce
from weft.ops.overlap.space import fused_tiles, pipelines
from weft.ops.registration import check_choice, check_flag, check_team
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.side_streams import side_streams
from weft.runtime.team.checks import agree
from weft.runtime.team.team import find_team
from weft.runtime.team.workspace import capacity_for, grown_workspace
from weft.transport.copy_channel import CopyChannel, await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Rows a rank from which more than two ranks use the pipelined design: copy engines deliver a block's sums during the next
# block's GEMMs. Four H200s, 16384x5120x6400: 1702 us, otherwise 1781 (lab/h200-gemm-ar-blocks.json@cd3ccc0).
ROWS_IN_BLOCKS = 2048
# Most elements of all receive buffers: the kernel's loop over them counts in 32 bits, since with 64 it spills at eight
# ranks.
MOST_ELEMENTS = 2**31
# Largest size in bytes of the pipelined design's buffers with two halves. With one, the next call waits until all peers have
# ended this one.
MOST_HALVED = 1 << 30


@design_type
class Pipelined:
    """Blocks of rows: cuBLAS GEMMs of one while copy engines all-reduce the previous one.

    chunks   blocks of rows, at most MAX_CHUNKS
    streams  number of streams that the GEMMs use in turn
    span     ranks whose rows may share one GEMM where they are adjacent in memory (chunks=1)
    """

    chunks: int = knob(2, CHUNKS, halved())
    streams: int = knob(2, counts(), halved())
    span: int = knob(1, counts(), halved())
    __post_init__ = check_pipelined


def matmul_all_reduce(
    a: torch.Tensor | Fp8, b: torch.Tensor | Fp8, team: Team, *, invariant: bool = False, wire: str = "same"
) -> torch.Tensor:
    """Sum a[M, K] @ b[N, K].T over the ranks -> [M, N], bitwise the same on all ranks.

    invariant  a row's bits depend neither on the other rows nor on W, which is 1, 2, 4 or 8: K, the sum of all ranks' equal
               shares and a multiple of 128, is cut into eight slices, whose sums are added in one tree, each rounded to the
               dtype (fp16 or bf16); for an fp8 b, with scales of 128 columns, a multiple of 1,024
    wire       "same": partial results travel as they are; "fp8", "auto": as of ``all_reduce``, after the GEMM: fp16 or bf16,
               within one node

    a and b hold this rank's share of K, of any size; M, N and dtype are the same on all ranks, which compare them on the
    host at the first call with them. Partial results are sent in the dtype of a and b (fp16, bf16, fp32), unless ``wire`` says
    fp8, and summed in fp32, in an order that depends on the tile only. Over several nodes a node's sums cross once, each part
    over one of its rails. The loss is the sum of all ranks' losses, so the backward sums the result's gradient over the ranks,
    as that of torch's functional all_reduce does. Where all ranks go on alike to one and the same loss, each rank divides it by
    W, or uses weft.integrations.torch.WeftRowwiseParallel, whose gradients are a DTensor's (docs/training.md). With an ``Fp8``
    weight b (``matmul``) there are no gradients.
    Collective: all ranks call it, in the same order, on one stream. ValueError for shapes, dtypes or devices that do not fit,
    on all ranks where theirs differ; HeapExhausted.
    """
    device = check_team("matmul_all_reduce", team, over_nodes=True)
    check_flag("matmul_all_reduce", "invariant", invariant)
    if wire != "same":
        check_choice("matmul_all_reduce", "wire", wire, fp8_wire.WIRES)
    if invariant:
        sliced.check("matmul_all_reduce", ScaledMatrix(a), b)
    if isinstance(b, Fp8):
        return _FP8.call_with(a, [b], team, Asked(invariant=invariant, wire=wire))[0]
    check_operands("matmul_all_reduce", a, b, device)
    return MATMUL_ALL_REDUCE.dispatch(a, b, team.name, invariant, wire)


def matmul_nodes(a: torch.Tensor | Fp8, b: torch.Tensor | Fp8, team: Team) -> torch.Tensor:
    """This rank's nodes of an invariant matmul_all_reduce, [count, M, N] of a's dtype.

    Not added up over the ranks, for ``all_reduce_rms_norm(invariant=True)`` and ``all_reduce_nodes``. No gradients.
    ValueError as of that op.
    """
    sliced.check("matmul_all_reduce", ScaledMatrix(a), b)
    if not isinstance(b, Fp8):
        check_operands("matmul_all_reduce", a, b, team.device)
    return MATMUL_ALL_REDUCE.nodes(team, a, b)


class MatmulAllReduce(Overlapped):
    name, alias = "matmul_all_reduce", "gemm-ar"
    saves = ("a", "b")
    designs = {
        "fused": Fused,
        "pipelined": Pipelined,
        "sequential": Sequential,
        "over_nodes": ScatterGather,
        "sliced": SlicedReduce,
    }
    bits = dict.fromkeys(designs, OVERLAPPED_BITS) | {"sliced": INVARIANT}
    internal = ("over_nodes", "sliced")
    sums = replicated = ranks_differ_in_k = True
    predict, judged = staticmethod(gemms.gemm_ar), ("sequential", "pipelined", "fused")
    differs = {"a": (1,), "b": (1,)}  # K
    projections = ROW_PARALLEL
    options = variants = (*FP8, "invariant", "fp8_wire")
    designs_in_fp8 = ("sequential",)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
        if call.invariant and call.design == AUTO and not call.fp8_wire:
            return sliced_reduce.planned(self.name, call, machine)
        if machine.nodes > 1 and not call.fp8_wire:
            return self._over_nodes(call, machine)
        planned = super().choose(call, machine)
        if planned.name == "fused" and call.design == AUTO:
            elements = buffer_elements(call.M, call.N, machine.world_size, planned.design.tile)
            if elements > MOST_ELEMENTS:
                reason = f"{elements:,} elements > {MOST_ELEMENTS:,}, the most of the fused kernel's receive buffers"
                return Planned("pipelined", self.default("pipelined", call, machine), reason)
        return planned

    def _over_nodes(self, call: GemmCall, machine: Machine) -> Planned:
        """GEMM-RS and an all-gather, both over nodes; for few rows a GEMM and an all-reduce over nodes."""
        if call.design == "sequential" or (call.design == AUTO and not rows_overlap(call.M)):
            reason = f"{machine.nodes} nodes, M={call.M}: too little to overlap"
            return Planned("sequential", self.default("sequential", call, machine), reason)
        rows = cdiv(call.M, machine.world_size)
        scatter = MATMUL_REDUCE_SCATTER.plan(call._replace(M=rows * machine.world_size), machine)
        gather = ALL_GATHER.plan(CollectiveCall(rows * call.N * call.dtype.itemsize, call.dtype), machine)
        reason = f"{machine.nodes} nodes: 1 / {machine.node.world_size} of a node's sums goes over each rail"
        return Planned("over_nodes", ScatterGather(scatter=scatter, gather=gather), reason)

    def rule(self, call: GemmCall, machine: Machine) -> tuple[str, str]:
        """The least predicted time on two ranks and in fp8; else by rows, since no design alone was measured."""
        M, world = call.M, machine.world_size
        if world == 2 or call.fp8 or call.fp8_wire:
            return super().rule(call, machine)
        if not rows_overlap(M):
            return "sequential", f"M={M} <= {gemms.SEQUENTIAL_ROWS}: too little to overlap"
        if M // world >= ROWS_IN_BLOCKS:
            return (
                "pipelined",
                f"M={M}, at least {ROWS_IN_BLOCKS} a rank: half of the sums are sent during the other half's GEMMs",
            )
        return "fused", "one kernel sends finished tiles to their owners and the sums to all ranks"

    def default(self, name: str, call: GemmCall, machine: Machine) -> Any:
        world, caps = machine.world_size, machine.caps
        if name == "fused":
            tile = default_tile(call.M, call.N, call.dtype, caps)
            if world == 3 and (tile.block_m, tile.block_n) == (128, 128):
                # With 128 accumulators a thread, two receive buffers and two peers make Triton 3.6 spill.
                tile = replace(tile, num_warps=8)
            return Fused(tile=tile, split=splits_by_default(call.K), piece=piece_for(call.K, tile.block_k))
        if name == "pipelined":
            # Ranks that differ in K must divide the rows alike, so only the number of streams depends on K.
            return Pipelined(streams=1 if call.K >= 4096 and not call.fp8 else 2)
        nbytes = call.M * call.N * call.dtype.itemsize
        reduce = ALL_REDUCE.plan(CollectiveCall(nbytes, call.dtype, fp8_wire=call.fp8_wire), machine)
        if reduce.name == "one_shot" and not call.fp8_wire:
            # The all-reduce adds split-K partials up as it reads them.
            small = MATMUL.plan(call._replace(partials=True, design=AUTO), machine)
            if isinstance(small.design, SmallM):
                return Sequential(collective=reduce, gemm=small)
        gemm = MATMUL.local_plan(call, machine)
        return Sequential(collective=reduce, gemm=gemm)

    def space(self, call: GemmCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        if call.invariant:
            return
        yield from (self.default(name, call, machine) for name in self.offered(call))
        if call.fp8_wire:
            return
        yield from pipelines(Pipelined(), machine)
        if call.fp8:
            return
        for design in fused_tiles(self.default("fused", call, machine), call.M, call.dtype, machine, quick):
            yield from (design, replace(design, split=not design.split))

    # --- judging -----------------------------------------------------------------------------------------------------

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        return sum_of([product(*named(case, tensors)[:2]) for tensors in by_rank])

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        a, b, _ = named(case, tensors)
        if case.design == AUTO:
            return matmul_all_reduce(a, b, team, invariant=bool(case.field("invariant")), wire=wire_of(case))
        return self.run(self.design_of(case, machine_of(team)), team, a, b)

    def cases(self) -> Iterator[Case]:
        return cases.matmul_all_reduce_cases(self)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_matmul_all_reduce_cases(self)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        M, N, _ = sizes
        return 2 * M * N * dtype.itemsize * (world_size - 1) // world_size

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        design: Fused | Pipelined | Sequential | ScatterGather,
        team: Team,
        a: Operand,
        b: Operand,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``matmul_all_reduce`` of checked arguments by ``design``, the same on all ranks.

        into: the result; None: a new tensor.

        ValueError for a fused design with receive buffers of more than MOST_ELEMENTS.
        """
        self.check_design(design)
        if isinstance(design, SlicedReduce):
            return sliced_reduce.run(self.name, design, team, a, b, into)
        if isinstance(design, Sequential):
            return _run_sequential(design, team, a, b, into)
        if isinstance(design, ScatterGather):
            rows = padded_to(a, team.size)
            sums = MATMUL_REDUCE_SCATTER.run(design.scatter.design, team, rows, b)
            total = ALL_GATHER.run(design.gather.design, team, sums)[: a.shape[0]]
            return total if into is None else into.copy_(total)
        out = torch.empty((a.shape[0], b.shape[0]), dtype=a.dtype, device=a.device) if into is None else into
        run = _run_fused if isinstance(design, Fused) else _run_pipelined
        run(design, team, quantized(a, b), b, out)
        return out

    def planned(
        self,
        team: Team,
        a: Operand,
        bs: Sequence[Operand],
        own_first: bool = False,
        *,
        into: Sequence[torch.Tensor],
        invariant: bool = False,
        wire: str = "same",
    ) -> None:
        (b,), (out,) = bs, into
        self.run(self._agreed(team, a, b, invariant, wire).design, team, a, b, out)

    def nodes(self, team: Team, a: Operand, b: Operand) -> torch.Tensor:
        """This rank's nodes of an invariant call, [count, M, N]."""
        return sliced_reduce.nodes(self.name, self._agreed(team, a, b, True).design, team, a, b)

    def _agreed(self, team: Team, a: Operand, b: Operand, invariant: bool, wire: str = "same") -> Planned:
        """Plan of a call. ValueError on all ranks where theirs differ."""
        M = a.shape[0]
        if team.size > 1:
            names = ("a.shape[0]", "b.shape[0]", "dtype", "b's scales are of", "K with invariant=True", "wire")
            agree(self.name, team, names, (M, b.shape[0], a.dtype, form_of(b), invariant and a.shape[1], wire))
        call = call_of(M, a, b)._replace(dense=True, invariant=invariant)
        here = machine_of(team)
        return self.plan(fp8_wire.asked(self, wire, call, here), here)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, team: str, invariant: bool = False, wire: str = "same"
    ) -> torch.Tensor:
        members = find_team(team)
        out = torch.empty((a.shape[0], b.shape[0]), dtype=a.dtype, device=a.device)
        run = partial(self.planned, members, a, (b,), into=[out], invariant=invariant, wire=wire)
        submit(self.name, members, (a, b, out), (invariant, wire), run)
        return out

    def fake(
        self, a: torch.Tensor, b: torch.Tensor, team: str, invariant: bool = False, wire: str = "same"
    ) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[0]))

    def backward(self, given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        # Every rank's output contains this rank's partial result, so its gradient is the sum of all ranks' gradients.
        return gradients_of_matmul(given, torch.ops.weft.all_reduce.default(grad, given.team, "auto"))


MATMUL_ALL_REDUCE = register(MatmulAllReduce())
_FP8 = OverlappedFp8(MATMUL_ALL_REDUCE)


def buffer_elements(M: int, N: int, world_size: int, tile: Tile) -> int:
    """Elements of all receive buffers of the fused kernel."""
    tiles = cdiv(M, tile.block_m) * cdiv(N, tile.block_n)
    return (world_size - 1) * capacity_for(cdiv(tiles, world_size) * tile.block_m * tile.block_n)


def _run_sequential(
    design: Sequential, team: Team, a: Operand, b: Operand, into: torch.Tensor | None = None
) -> torch.Tensor:
    gemm, collective = design.gemm.design, design.collective
    if isinstance(gemm, SmallM) and collective is not None and collective.name == "one_shot":
        if isinstance(b, Fp8):
            partial = by_design(gemm, ScaledMatrix(a), b, summed=False)
        else:
            partial = small_m.run(ScaledMatrix(rows_contiguous(a)), rows_contiguous(b), gemm, summed=False)
        if partial.dim() == 3:
            return ALL_REDUCE.run_of_partials(partial, a.dtype, team, into)
    elif collective is None:
        return MATMUL.run(gemm, None, a, b, into)
    else:
        partial = MATMUL.run(gemm, None, a, b)
    return ALL_REDUCE.run(collective.design, team, partial, into)


def _run_fused(design: Fused, team: Team, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    (M, N), elements = out.shape, buffer_elements(*out.shape, team.size, design.tile)
    if elements > MOST_ELEMENTS:
        raise ValueError(
            f"matmul_all_reduce: design='fused' has receive buffers of {elements} elements for M={M}, N={N}, more than "
            f"{MOST_ELEMENTS}; pass design='pipelined'"
        )
    fused_reduce.run("matmul_all_reduce", design, team, (a, b), out, replicate=True)


def _run_pipelined(design: Pipelined, team: Team, a: Operand, b: Operand, out: torch.Tensor) -> None:
    """Run a GEMM and all-reduce for each of at most ``design.chunks`` blocks of rows.

    The rows of a block are assigned to owners. A GEMM computes each peer's rows (or several peers'), and the copy engine
    carries them to their owner; then come the own rows and their sums. The copy engine sends the sums to all ranks during the
    next block's GEMMs; the last block's are sent by share_kernel.

    signals  copy engine of rank s: flags[buffer of s, block] = epoch at the owner, after a block's rows, and
             flags[W - 1 + buffer of s, block] = epoch at all ranks, after its sums
    waits    wait_kernel, after a block's own GEMM: flags[d, block] >= epoch, d = 0 .. W - 2; and for the sums, after the
             next block's GEMMs for peers, to leave them time: flags[W - 1 + d, block]. GEMMs end without the peers, and a rank
             sends all of a block's rows before its first wait for the block
    reuse    of a half of receive buffers and results: CopyChannel. In a call no two blocks share memory or flags

    stream 0  | o1 | o3 | o1' | o3' | sum', to all |                      rank 0 of 4: rows by owner, ' of the second block
    stream 1    | o2 | own  | o2' | own' |
    urgent                | sum |   | copy |
    copy           | o1 | o2 | o3 | sum to all | o1' | o2' | o3' |
    """
    world, me, (M, N) = team.size, team.rank, out.shape
    # Every rank has a row of each block but the last.
    grain = world * grain_of(b) if isinstance(b, Fp8) else 1
    blocks = list(pieces_of(M, max(1, min(design.chunks, M // world)), grain))
    most, last = cdiv(blocks[0][1].stop, world) * N, len(blocks) - 1
    channel, streams = _channel(team, out.dtype, len(blocks) * most), side_streams(team, design.streams)
    # A partial result that one stream computes and another sends lives until the streams join.
    partial = torch.empty((M, N), dtype=out.dtype, device=out.device)
    streams.fork()
    with streams.urgent():
        half, begun = channel.begin(team), streams.mark()
        team.copy_engine.fork()
    turn, earlier = 0, None
    for number, rows in blocks:
        total, part, owned = out[rows], partial[rows], rows_of(me, rows.stop - rows.start, world)
        of_block = rows_at(a, rows)
        received, results = half[:, number * most : (number + 1) * most].split((world - 1, world))
        how = Sending(
            chunks=design.chunks, streams=design.streams, span=design.span, begun=begun, block=number, turn=turn
        )
        sent = list(send_partials((of_block, b), part, received, channel, team, streams, how))
        turn += len(sent)
        if earlier is not None:
            with streams.urgent():
                for *_, computed in sent[-1:]:  # none, where no peer has a row
                    streams.after(computed)
                _collect(*earlier, channel, number - 1, team)
        with streams.turn(turn):
            multiply(rows_at(of_block, owned), b, part[owned])
            computed = streams.mark()
        turn += 1
        if number < last:
            with streams.urgent():
                streams.after(computed)
                await_chunk(channel.landed, number, 0, world - 1)
                add_up(part[owned], received, total[owned], team, early=False)
                team.copy_engine.fork()
            _give(total[owned].view(-1), results, channel, number, team)
            earlier = total, results
    streams.join()
    if owned.stop > owned.start:
        await_chunk(channel.landed, last, 0, world - 1)
    share(part[owned], received, results, channel, total, team)
    team.copy_engine.join()


def _give(sums: torch.Tensor, results: torch.Tensor, channel: CopyChannel, block: int, team: Team) -> None:
    """Have the copy engine write this rank's sums of a block to its row of ``results`` at every peer."""
    world, me = team.size, team.rank
    for step in range(1, world):
        peer = (me + step) % world
        channel.send(team, results[me, : sums.numel()], sums, world - 1 + buffer_of.fn(me, peer, world), block, peer)


def _collect(out: torch.Tensor, results: torch.Tensor, channel: CopyChannel, block: int, team: Team) -> None:
    """Copy the peers' sums of a block from ``results`` [W, …] to ``out`` [rows, N] once they have arrived.

    By memory copies, since a kernel would wait for an SM until a concurrent GEMM ends. (Not profiled.)
    """
    await_chunk(channel.rows_from(team.size - 1), block, 0, team.size - 1)
    for peer in range(team.size):
        if peer != team.rank:
            theirs = out[rows_of(peer, len(out), team.size)].view(-1)
            theirs.copy_(results[peer, : theirs.numel()])


def _channel(team: Team, dtype: torch.dtype, size: int) -> CopyChannel:
    def make(capacity: int) -> CopyChannel:
        # Receive buffers for the peers' partial results of my rows, then every rank's sums.
        # Four programs an SM store as fast as the links take it.
        programs = min(4 * team.caps.sms, team.max_programs(SUM_WARPS, registers=64))
        places = 2 * team.size - 1
        halves = 2 if 2 * places * capacity * dtype.itemsize <= MOST_HALVED else 1
        buffers = team.empty((halves, places, capacity), dtype=dtype)
        return CopyChannel.make(team, buffers, 2 * (team.size - 1), programs)

    return grown_workspace(team, ("matmul_all_reduce pipelined", dtype), size, make)

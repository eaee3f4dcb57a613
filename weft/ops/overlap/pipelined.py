"""Pipelined design of the overlapped GEMMs: GEMMs by rank, with copy engines between them.

Copy engines carry whole pieces, so no SM spends time on communication and every GEMM runs at cuBLAS's
speed. It needs large pieces: each costs a launch, a copy's start (2 µs) and a flag (2.3 µs on H200). The GEMMs use
a few streams in turn (weft.runtime.side_streams). Kernels only begin a call, wait, and add up received data. GEMMs with
fp8 weights are the plan's of ``matmul``.

Without cuBLAS, in the simulator, a piece's GEMM is host work of the rank's main stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.partial_sums import added
from weft.kernels.tile_schedule import buffer_of, place_of
from weft.ops.knobs import check_knobs, counts
from weft.ops.overlap.fp8_rows import put_in_words
from weft.ops.overlap.operands import Operand, grain_of, multiply, rows_at
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.side_streams import SideStreams
from weft.transport.copy_channel import MAX_CHUNKS, CopyChannel

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Elements that a program adds up or copies at a time; its warps.
SUM_BLOCK, SUM_WARPS = 1024, 4


@triton.jit
def sum_kernel(out, own, received, stride, n, BUFFERS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = own[n] + sum of received[BUFFERS, stride][:, :n]        grid: (blocks of n,)

    signals, waits  none: wait_kernel comes before it
    order           own + received 0, 1, … , summed in fp32, rounded once: the same every run
    """
    wl.follow_previous_kernel()
    at, first = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * BLOCK
    rest = tl.minimum(n - first, BLOCK).to(tl.int32)
    x = added(own + first, received + first, stride, at, rest, BUFFERS)
    tl.store(out + first + at, x.to(out.dtype.element_ty), mask=at < rest)


class Shares(NamedTuple):
    """Memory of share_kernel, its argument ``buffers``.

    received     [W - 1, buffer_size]  symmetric: the other ranks' partial results of my rows
    results      [W, buffer_size]      symmetric: [s] is the sum of rank s's rows
    buffer_size  elements of a row of both
    ready        [W, flags]            symmetric: ready[s, p] = epoch, once part p of rank s lies in results
    flags        elements of a row of ready
    epoch        [2]                   this rank's
    """

    received: torch.Tensor
    results: torch.Tensor
    buffer_size: int
    ready: torch.Tensor
    flags: int
    epoch: torch.Tensor


@triton.jit(do_not_specialize=["M"])
def share_kernel(out, own, buffers, M, N, team, BLOCK: tl.constexpr):
    """out[M, N] = every rank's sum of its own rows, s * M / W ..        grid: (programs,)

    Each program has one part of every rank's rows.

    own      [own rows, N]       this rank's partial result of the rows that it owns
    buffers  ``Shares``

    signals  program p: stores its part of the own sum at every peer, then ready[me, p] = epoch there
    waits    then, for each peer s: ready[s, p] >= epoch
    order    own + received 0, 1, … , summed in fp32, rounded once, by one rank: bitwise the same on all
    reuse    of results: CopyChannel
    progress all programs are resident; no program waits before all its stores are announced
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    now = tl.load(buffers.epoch)
    first, count, first_row = part_of(me, M, N, BLOCK, world)
    result, target = buffers.results + me.to(tl.int64) * buffers.buffer_size + first, out + first_row * N + first
    # Count in 32 bits: from a constant 0 LLVM counts in 64, which takes half as many instructions again per copied element.
    begin = 16 * wl.zero_here()
    for start in range(begin, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = added(own + first, buffers.received + first, buffers.buffer_size, at, count, world - 1).to(
            out.dtype.element_ty
        )
        for step in tl.static_range(1, world):
            tl.store(wl.symm_at(result, (me + step) % world, team) + at, total, mask=at < count)
        tl.store(target + at, total, mask=at < count)
    for step in tl.static_range(1, world):
        wl.notify(buffers.ready + me * buffers.flags + tl.program_id(0), (me + step) % world, now, team)
    for step in range(1, world):
        peer = (me + step) % world
        first, count, first_row = part_of(peer, M, N, BLOCK, world)
        source, target = buffers.results + peer.to(tl.int64) * buffers.buffer_size + first, out + first_row * N + first
        wl.wait(buffers.ready + peer * buffers.flags + tl.program_id(0), now, team)
        for start in range(begin, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def part_of(rank, M, N, BLOCK: tl.constexpr, world: tl.constexpr):
    """Range of this program in ``rank``'s rows of [M, N], in whole blocks: (first, count, first row).

    first (int64) is counted from the rank's first row (int64); count (int32) may be 0. A rank may have 2**31 elements, a
    program has fewer.
    """
    rank = rank.to(tl.int64)
    first_row = rank * M // world
    of_rank = ((rank + 1) * M // world - first_row) * N
    of_part = tl.cdiv(tl.cdiv(of_rank, BLOCK).to(tl.int32), tl.num_programs(0)) * BLOCK
    first = tl.program_id(0).to(tl.int64) * of_part
    return first, tl.maximum(tl.minimum(of_rank - first, of_part), 0).to(tl.int32), first_row


# Chunks of a shard.
CHUNKS = counts(MAX_CHUNKS, ", the signals that a shard has")


def check_pipelined(design: Any) -> None:
    """ValueError unless the knobs of a pipelined design are legal, and span and chunks fit together."""
    check_knobs(design)
    if design.span > 1 and design.chunks > 1:
        raise ValueError(f"span={design.span} joins what chunks={design.chunks} cuts; pass 1 for span or chunks")


def runs_of(first: int, world: int, span: int) -> Iterator[range]:
    """Yield the W - 1 ranks from ``first`` (mod W) on, in runs of at most ``span`` with adjacent rows."""
    rank, left = first, world - 1
    while left:
        count = min(left, span, world - rank)
        yield range(rank, rank + count)
        rank, left = (rank + count) % world, left - count


def pieces_of(rows: int, count: int, grain: int = 1) -> Iterator[tuple[int, slice]]:
    """Yield (number, rows) of at most ``count`` pieces, as even as possible; none is empty.

    All but the last have a multiple of ``grain`` rows.
    """
    step = max(1, cdiv(cdiv(rows, count), grain)) * grain
    for number, first in enumerate(range(0, rows, step)):
        yield number, slice(first, min(first + step, rows))


def rows_of(rank: int, M: int, world: int) -> slice:
    """Rows of [M, N] that ``rank`` owns."""
    return slice(rank * M // world, (rank + 1) * M // world)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Division of a GEMM by ``send_partials`` into pieces and streams.

    chunks, streams, span  as in the pipelined designs
    begun        mark after ``begin_kernel``. The caller has forked the copy engine after it, so no copy reaches a peer's
                 buffer too early. It only delays the GEMMs of the side streams, so that they start one after another
    local_first  the local rows are first (place_of), else rank order
    block        number of the flag for all of an owner's rows; None: one for each of ``chunks`` pieces
    turn         number of the first GEMM, which gives its stream
    words        [M, …]: the rows travel in fp8, put in these words (weft.ops.overlap.fp8_rows); None: as they are
    """

    chunks: int
    streams: int
    span: int
    begun: torch.cuda.Event | None
    local_first: bool = False
    block: int | None = None
    turn: int = 0
    words: torch.Tensor | None = None


def send_partials(
    operands: tuple[Operand, Operand],
    partial: torch.Tensor,
    received: torch.Tensor,
    channel: CopyChannel,
    team: Team,
    streams: SideStreams,
    how: Sending,
) -> Iterator[tuple[int, slice, Any]]:
    """partial = a[M, K] @ b[N, K].T in every peer's rows, by pieces, each sent to its owner.

    operands  (a, b)
    received  [W - 1, …]: the receive buffers; the owner's buffer for this rank gets the piece
    yields    after each piece: its number, its rows within one rank's, and a mark of its GEMM
    """
    (a, b), world, me, M, turn = operands, team.size, team.rank, partial.shape[0], how.turn
    for places in runs_of(place_of.fn((me + 1) % world, me, world, how.local_first), world, how.span):
        first, last = rows_of(places.start, M, world).start, rows_of(places.stop - 1, M, world).stop
        for number, piece in pieces_of(last - first, how.chunks if how.block is None else 1, grain_of(b)):
            with streams.turn(turn):
                if turn % how.streams:
                    # Start this GEMM after the first one has begun, so that two GEMMs do not share the SMs.
                    streams.after(how.begun)
                at = slice(first + piece.start, first + piece.stop)
                multiply(rows_at(a, at), b, partial[at])
                if how.words is not None:
                    put_in_words(partial[at], how.words[at], team)
                team.copy_engine.fork()
                computed = streams.mark()
            turn += 1
            flag = number if how.block is None else how.block
            for place in places:
                owner = (me + place) % world if how.local_first else place
                # One rank's rows go by pieces, several ranks' as a whole.
                rows = rows_of(place, M, world)
                source = partial if how.words is None else how.words
                sent = source[rows.start + piece.start : min(rows.start + piece.stop, rows.stop)]
                row, start = buffer_of.fn(me, owner, world), piece.start * source.shape[1]
                channel.send(team, received[row, start : start + sent.numel()], sent.view(-1), row, flag, owner)
            yield number, piece, computed


def add_up(own: torch.Tensor, received: torch.Tensor, out: torch.Tensor, team: Team, early: bool = True) -> None:
    """Compute out = own + the sum of ``received`` [W - 1, at least out.numel()].

    early: programs may occupy SMs before the previous kernel in the stream ends.
    """
    n, buffers = out.numel(), received.shape[0]

    def constants() -> dict[str, Any]:
        options = launch_options(team.caps) if early else {}
        return {"BUFFERS": buffers, "BLOCK": SUM_BLOCK, "num_warps": SUM_WARPS, **options}

    launch = launch_of(team, sum_kernel, (buffers, early), constants)
    launch(cdiv(n, SUM_BLOCK), out, own, received, received.stride(0), n)


def share(
    own: torch.Tensor,
    received: torch.Tensor,
    results: torch.Tensor,
    channel: CopyChannel,
    out: torch.Tensor,
    team: Team,
) -> None:
    """Run share_kernel: out[M, N] = every rank's own + received, by way of ``results`` [W, …]."""
    ready = channel.ready
    programs = min(ready.shape[1], cdiv(out.numel(), team.size * SUM_BLOCK))
    options = {"BLOCK": SUM_BLOCK, "num_warps": SUM_WARPS, "launch_cooperative_grid": True}
    buffers = Shares(received, results, received.stride(0), ready, ready.stride(0), channel.epoch)
    launch_of(team, share_kernel, (), lambda: options)(programs, out, own, buffers, *out.shape, team.view)

"""The second design of the overlapped matrix products: library GEMMs, a segment for each rank's rows.

Copy engines carry whole segments between them, so no SM spends time on communication and every GEMM runs at the library's
speed. It needs large segments: each costs a launch, a copy's start (2 µs) and a flag (2.3 µs on H200). The GEMMs take turns
on a few lanes (weft.runtime.side_streams). Kernels here only begin, wait, and add up what has come.

Where there is no GPU library (the simulator) a segment's GEMM is host work of the rank's main stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.partial_sums import added
from weft.kernels.tile_schedule import place_of, slot_of
from weft.ops.gemm import cublas
from weft.ops.gemm.config import GemmConfig
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.side_streams import SideStreams
from weft.transport.copy_channel import Segments

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Elements that a program adds up or copies at a time, and its warps.
SUM_BLOCK, SUM_WARPS = 1024, 4


@triton.jit
def sum_kernel(out, own, slots, slot_size, n, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = own[n] + the sum of slots[SLOTS, slot_size]'s [n]        grid: (blocks of n,)

    signals, waits  none: wait_kernel comes before it
    order           own + slots 0, 1, … , summed in fp32, rounded once: the same every run
    """
    wl.follow_previous_kernel()
    at, first = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * BLOCK
    rest = tl.minimum(n - first, BLOCK).to(tl.int32)
    x = added(own + first, slots + first, slot_size, at, rest, SLOTS)
    tl.store(out + first + at, x.to(out.dtype.element_ty), mask=at < rest)


@triton.jit(do_not_specialize=["M"])
def share_kernel(out, own, slots, slot_size, results, ready, flags, epoch, M, N, team, BLOCK: tl.constexpr):
    """out[M, N]: rows s * M / W .. of rank s's sum        grid: (programs,), each with one part of every rank's rows

    own      [own rows, N]       this rank's partial result of its own rows
    slots    [W - 1, slot_size]  symmetric: the others' of them
    results  [W, slot_size]      symmetric: the sums of rank s
    ready    [W, flags]          symmetric: ready[s, p] = epoch, once part p of rank s lies in results

    signals  program p: stores its part of the own sum at every peer, then ready[me, p] = epoch there
    waits    then, for each peer s: ready[s, p] >= epoch
    order    own + slots 0, 1, … , summed in fp32, rounded once, by one rank: bitwise the same on all
    reuse    of results: Segments
    progress all programs are resident; nobody waits before all its stores are announced
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    now = tl.load(epoch)
    first, count, first_row = part_of(me, M, N, BLOCK, world)
    result, target = results + me.to(tl.int64) * slot_size + first, out + first_row * N + first
    # In 32 bits: from a 0 that it knows, LLVM counts in 64, which takes half as many instructions again for what is copied.
    begin = 16 * wl.zero_here()
    for start in range(begin, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = added(own + first, slots + first, slot_size, at, count, world - 1).to(out.dtype.element_ty)
        for step in tl.static_range(1, world):
            tl.store(wl.symm_at(result, (me + step) % world, team) + at, total, mask=at < count)
        tl.store(target + at, total, mask=at < count)
    for step in tl.static_range(1, world):
        wl.notify(ready + me * flags + tl.program_id(0), (me + step) % world, now, team)
    for step in range(1, world):
        peer = (me + step) % world
        first, count, first_row = part_of(peer, M, N, BLOCK, world)
        source, target = results + peer.to(tl.int64) * slot_size + first, out + first_row * N + first
        wl.wait(ready + peer * flags + tl.program_id(0), now, team)
        for start in range(begin, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def part_of(rank, M, N, BLOCK: tl.constexpr, world: tl.constexpr):
    """This program's share of ``rank``'s rows of [M, N], in whole blocks: its first element (int64), counted from the rank's
    first row; how many it has (int32, perhaps 0); and that row (int64). A rank may have 2**31 elements, a program has less."""
    rank = rank.to(tl.int64)
    first_row = rank * M // world
    of_rank = ((rank + 1) * M // world - first_row) * N
    of_part = tl.cdiv(tl.cdiv(of_rank, BLOCK).to(tl.int32), tl.num_programs(0)) * BLOCK
    first = tl.program_id(0).to(tl.int64) * of_part
    return first, tl.maximum(tl.minimum(of_rank - first, of_part), 0).to(tl.int32), first_row


def runs_of(first: int, world: int, span: int) -> Iterator[range]:
    """The W - 1 ranks from ``first`` (mod W) on, in runs of at most ``span`` whose rows lie one after the other."""
    rank, left = first, world - 1
    while left:
        count = min(left, span, world - rank)
        yield range(rank, rank + count)
        rank, left = (rank + count) % world, left - count


def pieces_of(rows: int, count: int) -> Iterator[tuple[int, slice]]:
    """(number, rows) of at most ``count`` pieces as even as can be; none is empty."""
    step = max(1, cdiv(rows, count))
    for number, first in enumerate(range(0, rows, step)):
        yield number, slice(first, min(first + step, rows))


def rows_of(rank: int, M: int, world: int) -> slice:
    """The rows of [M, N] that ``rank`` owns."""
    return slice(rank * M // world, (rank + 1) * M // world)


def send_partials(
    a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor, slots: torch.Tensor, space: Segments, team: Team,
    lanes: SideStreams, config: GemmConfig, begun: Any, own_first: bool = False, block: int | None = None, turn: int = 0,
) -> Iterator[tuple[int, slice, Any]]:  # fmt: skip
    """partial = a[M, K] @ b[N, K].T in every peer's rows, by pieces, each sent to its owner's slot for this rank.

    begun      a mark behind ``begin_kernel``. The caller has forked the copy engine behind it, so no copy reaches a peer's slot
               too early. It only delays the GEMMs of the side lanes, so that they start one after another
    own_first  the order of the ranks' rows in a and partial (place_of), W times as many as one's
    block      the number of the flag that stands for all of an owner's rows. None: one for each of ``config.chunks`` pieces
    turn       of the first GEMM
    yields     after each piece: its number, its rows within one rank's, and a mark of its GEMM
    """
    world, me, (M, N) = team.size, team.rank, partial.shape
    for places in runs_of(place_of.fn((me + 1) % world, me, world, own_first), world, config.span):
        first, last = rows_of(places.start, M, world).start, rows_of(places.stop - 1, M, world).stop
        for number, piece in pieces_of(last - first, config.chunks if block is None else 1):
            with lanes.turn(turn):
                if turn % config.lanes:
                    # Start this GEMM after the first one has begun, so that two GEMMs do not share the SMs.
                    lanes.after(begun)
                cublas.matmul(a[first:last][piece], b, partial[first:last][piece])
                team.copy_engine.fork()
                computed = lanes.mark()
            turn += 1
            flag = number if block is None else block
            for place in places:
                owner = (me + place) % world if own_first else place
                # Of one rank's rows the piece, of several ranks' all.
                mine = partial[rows_of(place, M, world)][piece]
                slot, at = slot_of.fn(me, owner, world), piece.start * N
                space.send(team, slots[slot, at : at + mine.numel()], mine.view(-1), slot, flag, owner)
            yield number, piece, computed


def add_up(own: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, team: Team, early: bool = True) -> None:
    """``out`` = own + what lies in the slots [W - 1, at least out.numel()]. ``early``: programs may take SMs before what the
    stream has before them is done."""
    n = out.numel()
    options = launch_options(team.caps) if early else {}
    sum_kernel[(cdiv(n, SUM_BLOCK),)](
        out, own, slots, slots.stride(0), n, SLOTS=slots.shape[0], BLOCK=SUM_BLOCK, num_warps=SUM_WARPS, **options,
    )  # fmt: skip


def share(
    own: torch.Tensor, slots: torch.Tensor, results: torch.Tensor, ready: torch.Tensor, epoch: torch.Tensor,
    out: torch.Tensor, team: Team,
) -> None:  # fmt: skip
    """``out`` [M, N] of every rank's sums of own + slots: by way of ``results`` [W, as slots] and ``ready`` [W, programs]."""
    programs = min(ready.shape[1], cdiv(out.numel(), team.size * SUM_BLOCK))
    share_kernel[(programs,)](
        out, own, slots, slots.stride(0), results, ready, ready.stride(0), epoch, *out.shape, team.view, BLOCK=SUM_BLOCK,
        num_warps=SUM_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip

"""The second design of the collectives, for large messages: copy engines push whole parts into the peers' staging slots, and
kernels only begin, wait, copy out of the slots and add up.

A copy engine fills a link better than stores do: on H200 parts of 64 MiB go to three peers one after the other at 379 GB/s,
tiles of stores at 332. But each start and each flag costs microseconds, and what has come is copied once more, so it is for
large messages and few pieces (dispatch.COPY_ENGINE, CopyEngine). Kernels and copy engines share the memory's bandwidth: 64
programs keep up with the links, and more of them slow the engines down (all-gather of 256 MiB at W=4 573 us, with 132 programs
581, with one for each block 590); only what all wait for, the last piece, is copied by as many as there are blocks.

    slots    symmetric: one for each peer's part; all-reduce has as many again for the peers' sums
    signals  copy engine of rank s, behind each piece: flags[row, piece] = epoch at its receiver, a row for each slot
    waits    wait_kernel, before a piece is read: the flag >= epoch
    reuse    of the slots: Segments. There is one half, so every call begins with a barrier of the ranks
    progress an engine waits for begin_kernel and for add_up of its own rank, a kernel for copies that stand before all
             that wait for it in their engines

Messages of more than ROUND_BYTES take several rounds, each a call of its own: so the slots take at most ROUND_BYTES of the
heap (of an all-reduce twice that), and the slots of smaller messages before, less than as much again. "auto" uses copy engines
only where the slots are there, or twice their size is free in the heap (``copy_channel.staging_bytes_of``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.partial_sums import added
from weft.kernels.tile_schedule import buffer_of
from weft.plan.planned import STAGING
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import Launch, launch_of
from weft.runtime.workspace import grown_workspace
from weft.transport.copy_channel import Segments, await_chunk
from weft.transport.plans import LINE_BYTES

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Of all ranks' parts together.
ROUND_BYTES = 512 << 20
# What a program copies, and adds up, at a time, and its warps.
COPY_BYTES, ADD_BYTES, WARPS = 32768, 8192, 8

Parts = Sequence[torch.Tensor]


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEngine:
    """Copy engines carry whole parts.

    pieces    at most MAX_CHUNKS of weft.transport.copy_channel: the sizes, in proportion, of the pieces that parts are cut into
    programs  of a kernel that copies or adds up while copy engines are busy
    """

    pieces: tuple[int, ...]
    programs: int = 64


@triton.jit
def copy_kernel(out, source, n, BLOCK: tl.constexpr):
    """out[n] = source[n]        grid: (programs,), each over every programs-th block

    signals, waits  none: wait_kernel comes before it
    """
    wl.follow_previous_kernel()
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.jit
def add_kernel(out, own, slots, slot_size, n, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = own[n] + the sum of slots[SLOTS, slot_size]'s [n]        grid: (programs,), each over every programs-th block

    signals, waits  none: wait_kernel comes before it
    order           own + slots 0, 1, … , summed in fp32, rounded once: the same every run
    """
    wl.follow_previous_kernel()
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = added(own, slots, slot_size, at, n, SLOTS)
        tl.store(out + at, x.to(out.dtype.element_ty), mask=at < n)


def exchange(xs: Parts, outs: Parts, team: Team, plan: CopyEngine) -> None:
    """outs[s] = what rank s has for this one; xs[p] is for rank p.        W of either, all of one length

    Rank r serves r + 1, r + 2, … (mod W), so that everybody receives from one peer at a time. Only the last push is cut into
    pieces: what came before it is copied out while it is under way.

    engine r | begin | to r+1 | to r+2 | to r+3, 0 | 1 |                                    rank r of 4
    kernels          | own out |       | r-1 out | r-2 out | r-3 out, 0 | 1 |
    """
    world, me = team.size, team.rank
    for sources, targets in rounds(xs, outs):
        space, slots = _begin(team, targets[me], world - 1)
        uncut = [slice(0, targets[me].numel())]
        pieces = list(cut(targets[me], plan.pieces))
        for step in range(1, world):
            peer = (me + step) % world
            slot = buffer_of.fn(me, peer, world)
            for number, piece in enumerate(pieces if step == world - 1 else uncut):
                space.send(team, slots[slot, piece], sources[peer][piece], slot, number, peer)
        copy(targets[me], sources[me], team, plan.programs)
        for step in range(1, world):
            peer = (me - step) % world
            slot = buffer_of.fn(peer, me, world)
            for number, piece in enumerate(pieces if step == world - 1 else uncut):
                await_chunk(space.landed, number, slot)
                is_last = step == world - 1 and number == len(pieces) - 1
                copy(targets[peer][piece], slots[slot, piece], team, None if is_last else plan.programs)
        team.copy_engine.join()


def add(xs: Parts, out: torch.Tensor, team: Team, plan: CopyEngine) -> None:
    """``out`` = the sum of what the ranks have for this one; xs[p] is for rank p.        W of one length

    order  own + those of ranks me + 1, me + 2, … (mod W), in fp32, rounded once

    engine r | begin | to r+1, 0 | r+2, 0 | r+3, 0 | r+1, 1 | r+2, 1 | r+3, 1 |             rank r of 4
    kernels                                        | add up 0 |               | add up 1 |
    """
    for sources, (target,) in rounds(xs, (out,)):
        space, slots = _begin(team, target, team.size - 1)
        _push_pieces(space, slots, sources, team, plan)
        for _ in _add_pieces(space, slots, sources[team.rank], target, team, plan):
            pass
        team.copy_engine.join()


def add_and_share(xs: Parts, outs: Parts, team: Team, plan: CopyEngine) -> None:
    """outs[s] = the sum of the ranks' xs[s], which rank s adds up as of ``add``: bitwise the same on all.

    W of either; xs[s] and outs[s] of one length, no rank's longer than rank 0's.

    engine r | begin | to r+1, 0 | .. | to r+3, 1 | sum 0 to r+1 | .. | sum 1 to r+3 |      rank r of 4
    kernels                    | add up 0 |       | add up 1 | r-1 out, 0 | .. | r-3 out, 1 |
    """
    world, me = team.size, team.rank
    for sources, targets in rounds(xs, outs):
        space, slots = _begin(team, targets[0], 2 * (world - 1))
        results = slots[world - 1 :]
        _push_pieces(space, slots, sources, team, plan)
        for number, piece in _add_pieces(space, slots[: world - 1], sources[me], targets[me], team, plan):
            team.copy_engine.fork()
            for step in range(1, world):
                peer = (me + step) % world
                slot = buffer_of.fn(me, peer, world)
                space.send(team, results[slot, piece], targets[me][piece], world - 1 + slot, number, peer)
        for number, peer, piece in _in_order(targets, [(me - step) % world for step in range(1, world)], plan):
            slot = buffer_of.fn(peer, me, world)
            await_chunk(space.rows_from(world - 1), number, slot)
            is_last = piece.stop == targets[peer].numel()
            copy(targets[peer][piece], results[slot, piece], team, None if is_last else plan.programs)
        team.copy_engine.join()


def _push_pieces(space: Segments, slots: torch.Tensor, sources: Parts, team: Team, plan: CopyEngine) -> None:
    """Every peer's part goes to its slot for this rank: the first piece to all, then the second, …"""
    world, me = team.size, team.rank
    for number, peer, piece in _in_order(sources, [(me + step) % world for step in range(1, world)], plan):
        slot = buffer_of.fn(me, peer, world)
        space.send(team, slots[slot, piece], sources[peer][piece], slot, number, peer)


def _add_pieces(
    space: Segments, slots: torch.Tensor, own: torch.Tensor, out: torch.Tensor, team: Team, plan: CopyEngine
) -> Iterator[tuple[int, slice]]:
    """Add the slots to ``own`` piece by piece, as they come; yields (number, piece) after each."""
    for number, piece in enumerate(cut(out, plan.pieces)):
        await_chunk(space.landed, number, 0, team.size - 1)
        add_up(own[piece], slots[: team.size - 1, piece], out[piece], team, plan.programs)
        yield number, piece


def _in_order(parts: Parts, peers: Sequence[int], plan: CopyEngine) -> Iterator[tuple[int, int, slice]]:
    """(number, peer, piece): every peer's first piece, then every peer's second, …"""
    pieces = {peer: list(cut(parts[peer], plan.pieces)) for peer in peers}
    for number in range(len(plan.pieces)):
        for peer in peers:
            for piece in pieces[peer][number : number + 1]:
                yield number, peer, piece


def cut(x: torch.Tensor, shares: Sequence[int]) -> Iterator[slice]:
    """``x`` [n] in at most so many pieces, in proportion to ``shares``, as far as whole lines allow; none is empty."""
    n, line = x.numel(), LINE_BYTES // x.itemsize
    first = done = 0
    for share in shares:
        done += share
        last = min(n, cdiv(n * done, sum(shares) * line) * line)
        if last > first:
            yield slice(first, last)
        first = last


def rounds(sources: Parts, outs: Parts) -> Iterator[tuple[Parts, Parts]]:
    """Both in ranges of elements, as many and as even as the slots ask for."""
    n, line = sources[0].numel(), LINE_BYTES // sources[0].itemsize
    most = ROUND_BYTES // (len(sources) * LINE_BYTES) * line
    step = cdiv(n, cdiv(n, most) * line) * line
    for first in range(0, n, step):
        yield [x[first : first + step] for x in sources], [x[first : first + step] for x in outs]


def copy(out: torch.Tensor, source: torch.Tensor, team: Team, programs: int | None) -> None:
    """By a kernel of so many programs at most: the copy engines have other things to do."""
    n, block = out.numel(), COPY_BYTES // out.itemsize
    launch = _launch(team, copy_kernel, BLOCK=block)
    launch(_grid(n, block, programs), out, source, n)


def add_up(own: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, team: Team, programs: int) -> None:
    """``out`` = own + what lies in the slots [W - 1, at least out.numel()]."""
    n, block = out.numel(), ADD_BYTES // out.itemsize
    launch = _launch(team, add_kernel, SLOTS=slots.shape[0], BLOCK=block)
    launch(_grid(n, block, programs), out, own, slots, slots.stride(0), n)


def _launch(team: Team, kernel: Any, **constants: int) -> Launch:
    options = {"num_warps": WARPS, **launch_options(team.caps)}
    return launch_of(team, kernel, tuple(constants.items()), lambda: constants | options)


def _grid(n: int, block: int, programs: int | None) -> int:
    return min(cdiv(n, block), programs or cdiv(n, block))


def split(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    """``x`` [n] in W parts of whole lines, as even as can be; the last ones may be shorter, or empty."""
    line = LINE_BYTES // x.itemsize
    step = cdiv(x.numel(), world * line) * line
    return [x[rank * step : (rank + 1) * step] for rank in range(world)]


def on_lines(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n], or a copy that begins on a line."""
    return x if x.data_ptr() % LINE_BYTES == 0 else x.clone()


def _begin(team: Team, like: torch.Tensor, slots: int) -> tuple[Segments, torch.Tensor]:
    """A new call: its workspace, and slots of the length and dtype of ``like`` that are free behind this in the current
    stream and in the copy engine."""
    size = cdiv(like.nbytes, LINE_BYTES) * LINE_BYTES

    def make(capacity: int) -> Segments:
        return Segments.make(team, team.empty((1, capacity), dtype=torch.uint8), 2 * (team.size - 1))

    space = grown_workspace(team, STAGING, slots * size, make)
    buffer = space.begin(team)
    team.copy_engine.fork()
    return space, buffer[: slots * size].view(like.dtype).view(slots, -1)

"""Copy-engine design of the collectives, for large messages.

Copy engines push whole parts into receive buffers at the peers. Kernels begin a call, wait, copy out of the buffers and add up.

A copy engine fills a link better than stores do: on H200, parts of 64 MiB go to three peers in turn at 379 GB/s, tiles of
stores at 332. But each start and each flag costs microseconds, and received data are copied once more, so the design is for
large messages in few pieces (Collective.copy_engine_from, CopyEngine). Kernels and copy engines share the memory's bandwidth:
64 programs keep up with the links, and more slow the engines down (all-gather of 256 MiB at W=4: 573 us, with 132 programs
581). Only the last piece, for which all wait, is copied with a program for each block.

    received  symmetric: a receive buffer for each peer's part; an all-reduce has as many again for the peers' sums
    signals   copy engine of rank s, after each piece: flags[row, piece] = epoch at its receiver, a row for each buffer
    waits     wait_kernel, before a piece is read: the flag >= epoch
    reuse     of the receive buffers: CopyChannel. They have one half, so every call begins with a barrier of the ranks
    progress  an engine waits for begin_kernel and add_up of its own rank; a kernel waits for copies that precede, in their
              engines, all copies that wait for that kernel

Messages of more than ROUND_BYTES take several rounds, each a separate call. So the receive buffers take at most ROUND_BYTES
of the heap (twice that for an all-reduce), and buffers left from smaller messages less than as much again. "auto" uses copy
engines only if the receive buffers exist, or twice their size is free in the heap (``Machine.staging_bytes``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.partial_sums import added
from weft.kernels.tile_schedule import buffer_of
from weft.ops.knobs import design_type
from weft.plan.planned import STAGING
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import Launch, launch_of
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel, await_chunk
from weft.transport.plans import LINE_BYTES

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Most bytes of a round: of all ranks' parts together.
ROUND_BYTES = 512 << 20
# Bytes that a program copies, and adds up, at a time; its warps.
COPY_BYTES, ADD_BYTES, WARPS = 32768, 8192, 8

Parts = Sequence[torch.Tensor]


@design_type
class CopyEngine:
    """Copy engines carry whole parts.

    pieces    relative sizes of the pieces of a part, at most MAX_CHUNKS of weft.transport.copy_channel
    programs  number of programs of a kernel that copies or adds up while copy engines are busy
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
def add_kernel(out, own, received, stride, n, BUFFERS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = own[n] + sum of received[BUFFERS, stride][:, :n]

    grid            (programs,), each over every programs-th block
    signals, waits  none: wait_kernel comes before it
    order           own + received 0, 1, … , summed in fp32, rounded once: the same every run
    """
    wl.follow_previous_kernel()
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = added(own, received, stride, at, n, BUFFERS)
        tl.store(out + at, x.to(out.dtype.element_ty), mask=at < n)


def exchange(xs: Parts, outs: Parts, team: Team, plan: CopyEngine) -> None:
    """outs[s] = rank s's part for this rank, where a rank's xs[p] is its part for rank p

    W of each, all of one length. Rank r serves r + 1, r + 2, … (mod W), so that every rank receives from one peer at a time.
    Only the last push is cut into pieces: the earlier parts are copied out while it is in flight.

    engine r | begin | to r+1 | to r+2 | to r+3, 0 | 1 |                                    rank r of 4
    kernels          | own out |       | r-1 out | r-2 out | r-3 out, 0 | 1 |
    """
    world, me = team.size, team.rank
    for sources, targets in rounds(xs, outs):
        channel, received = _begin(team, targets[me], world - 1)
        uncut = [slice(0, targets[me].numel())]
        pieces = list(cut(targets[me], plan.pieces))
        for step in range(1, world):
            peer = (me + step) % world
            row = buffer_of.fn(me, peer, world)
            for number, piece in enumerate(pieces if step == world - 1 else uncut):
                channel.send(team, received[row, piece], sources[peer][piece], row, number, peer)
        copy(targets[me], sources[me], team, plan.programs)
        for step in range(1, world):
            peer = (me - step) % world
            row = buffer_of.fn(peer, me, world)
            for number, piece in enumerate(pieces if step == world - 1 else uncut):
                await_chunk(channel.landed, number, row)
                is_last = step == world - 1 and number == len(pieces) - 1
                copy(targets[peer][piece], received[row, piece], team, None if is_last else plan.programs)
        team.copy_engine.join()


def add(xs: Parts, out: torch.Tensor, team: Team, plan: CopyEngine) -> None:
    """out = sum of the ranks' parts for this rank, where a rank's xs[p] is its part for rank p

    W parts of one length.
    order  own + the parts of ranks me + 1, me + 2, … (mod W), in fp32, rounded once

    engine r | begin | to r+1, 0 | r+2, 0 | r+3, 0 | r+1, 1 | r+2, 1 | r+3, 1 |             rank r of 4
    kernels                                        | add up 0 |               | add up 1 |
    """
    for sources, (target,) in rounds(xs, (out,)):
        channel, received = _begin(team, target, team.size - 1)
        _push_pieces(channel, received, sources, team, plan)
        for _ in _add_pieces(channel, received, sources[team.rank], target, team, plan):
            pass
        team.copy_engine.join()


def add_and_share(xs: Parts, outs: Parts, team: Team, plan: CopyEngine) -> None:
    """outs[s] = sum of the ranks' xs[s], added up by rank s as in ``add``: bitwise the same on all

    W of each; xs[s] and outs[s] have one length, at most that of xs[0].

    engine r | begin | to r+1, 0 | .. | to r+3, 1 | sum 0 to r+1 | .. | sum 1 to r+3 |      rank r of 4
    kernels                    | add up 0 |       | add up 1 | r-1 out, 0 | .. | r-3 out, 1 |
    """
    world, me = team.size, team.rank
    for sources, targets in rounds(xs, outs):
        channel, received = _begin(team, targets[0], 2 * (world - 1))
        results = received[world - 1 :]
        _push_pieces(channel, received, sources, team, plan)
        for number, piece in _add_pieces(channel, received[: world - 1], sources[me], targets[me], team, plan):
            team.copy_engine.fork()
            for step in range(1, world):
                peer = (me + step) % world
                row = buffer_of.fn(me, peer, world)
                channel.send(team, results[row, piece], targets[me][piece], world - 1 + row, number, peer)
        for number, peer, piece in _in_order(targets, [(me - step) % world for step in range(1, world)], plan):
            row = buffer_of.fn(peer, me, world)
            await_chunk(channel.rows_from(world - 1), number, row)
            is_last = piece.stop == targets[peer].numel()
            copy(targets[peer][piece], results[row, piece], team, None if is_last else plan.programs)
        team.copy_engine.join()


def _push_pieces(channel: CopyChannel, received: torch.Tensor, sources: Parts, team: Team, plan: CopyEngine) -> None:
    """Push each peer's part to its receive buffer for this rank: all first pieces, all second ones, …"""
    world, me = team.size, team.rank
    for number, peer, piece in _in_order(sources, [(me + step) % world for step in range(1, world)], plan):
        row = buffer_of.fn(me, peer, world)
        channel.send(team, received[row, piece], sources[peer][piece], row, number, peer)


def _add_pieces(
    channel: CopyChannel, received: torch.Tensor, own: torch.Tensor, out: torch.Tensor, team: Team, plan: CopyEngine
) -> Iterator[tuple[int, slice]]:
    """Add the receive buffers to ``own`` by pieces as they arrive; yields (number, piece) after each."""
    for number, piece in enumerate(cut(out, plan.pieces)):
        await_chunk(channel.landed, number, 0, team.size - 1)
        add_up(own[piece], received[: team.size - 1, piece], out[piece], team, plan.programs)
        yield number, piece


def _in_order(parts: Parts, peers: Sequence[int], plan: CopyEngine) -> Iterator[tuple[int, int, slice]]:
    """Yield (number, peer, piece): every peer's first piece, then every peer's second, …"""
    pieces = {peer: list(cut(parts[peer], plan.pieces)) for peer in peers}
    for number in range(len(plan.pieces)):
        for peer in peers:
            for piece in pieces[peer][number : number + 1]:
                yield number, peer, piece


def cut(x: torch.Tensor, shares: Sequence[int]) -> Iterator[slice]:
    """Cut ``x`` [n] into pieces in proportion to ``shares``, rounded to whole lines; none is empty."""
    n, line = x.numel(), LINE_BYTES // x.itemsize
    first = done = 0
    for share in shares:
        done += share
        last = min(n, cdiv(n * done, sum(shares) * line) * line)
        if last > first:
            yield slice(first, last)
        first = last


def rounds(sources: Parts, outs: Parts) -> Iterator[tuple[Parts, Parts]]:
    """Yield the rounds of a call: the same range of every source and out, as even as whole lines allow."""
    n, line = sources[0].numel(), LINE_BYTES // sources[0].itemsize
    most = ROUND_BYTES // (len(sources) * LINE_BYTES) * line
    step = cdiv(n, cdiv(n, most) * line) * line
    for first in range(0, n, step):
        yield [x[first : first + step] for x in sources], [x[first : first + step] for x in outs]


def copy(out: torch.Tensor, source: torch.Tensor, team: Team, programs: int | None) -> None:
    """Copy ``source`` to ``out`` with at most ``programs`` programs, while the copy engines are busy."""
    n, block = out.numel(), COPY_BYTES // out.itemsize
    launch = _launch(team, copy_kernel, BLOCK=block)
    launch(_grid(n, block, programs), out, source, n)


def add_up(own: torch.Tensor, received: torch.Tensor, out: torch.Tensor, team: Team, programs: int) -> None:
    """Compute out = own + the sum of ``received`` [W - 1, at least out.numel()]."""
    n, block = out.numel(), ADD_BYTES // out.itemsize
    launch = _launch(team, add_kernel, BUFFERS=received.shape[0], BLOCK=block)
    launch(_grid(n, block, programs), out, own, received, received.stride(0), n)


def _launch(team: Team, kernel: Any, **constants: int) -> Launch:
    options = {"num_warps": WARPS, **launch_options(team.caps)}
    return launch_of(team, kernel, tuple(constants.items()), lambda: constants | options)


def _grid(n: int, block: int, programs: int | None) -> int:
    return min(cdiv(n, block), programs or cdiv(n, block))


def split(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Split ``x`` [n] into W parts of whole lines, as even as possible; the last may be short or empty."""
    line = LINE_BYTES // x.itemsize
    step = cdiv(x.numel(), world * line) * line
    return [x[rank * step : (rank + 1) * step] for rank in range(world)]


def on_lines(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n] if it begins on a line, else a copy that does."""
    return x if x.data_ptr() % LINE_BYTES == 0 else x.clone()


def _begin(team: Team, like: torch.Tensor, count: int) -> tuple[CopyChannel, torch.Tensor]:
    """Begin a call: returns its channel and ``count`` receive buffers, of the size and dtype of ``like``.

    They are free for work that follows in the current stream and in the copy engine.
    """
    size = cdiv(like.nbytes, LINE_BYTES) * LINE_BYTES

    def make(capacity: int) -> CopyChannel:
        return CopyChannel.make(team, team.empty((1, capacity), dtype=torch.uint8), 2 * (team.size - 1))

    channel = grown_workspace(team, STAGING, count * size, make)
    buffer = channel.begin(team)
    team.copy_engine.fork()
    return channel, buffer[: count * size].view(like.dtype).view(count, -1)

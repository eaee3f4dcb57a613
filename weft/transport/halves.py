"""Buffers that every call writes again at the peers, and the credit by which a rank knows that it may.

    entered   [W] symmetric: entered[s] = e, once rank s has begun call e, and so ended all that it ran before
    filled    [programs] this rank's, of one half: the last call that filled it, a copy for each program that waits; so all
              calls that share the buffers have the same number of programs
    landed    channel: chunks announced by the ranks that fill this rank's buffers; it counts the calls

    signals   a rank that begins call e, to every peer: entered[me] = e
    waits     before the first store to a peer: entered[peer] > filled. The peer has begun a later call than the one that filled
              this half last, so what read the half has ended there
    reuse     halves alternate by call. What a rank has received in a call is read before it begins its next one. A rank begins
              call e once it has received all of call e - 1, which its peers had then begun: with two halves the wait takes time
              only where one half is taken twice in a row, in replays of a CUDA graph with an odd number of calls
    progress  a program waits for the peers to begin; the kernel that begins a call does not follow one that waits for this rank

``filled`` lies in device memory, since a replayed CUDA graph takes the same half in each replay, whatever the host counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.team.channel import Channel, ChannelView
from weft.runtime.team.team import Team


class Half(NamedTuple):
    """One half of buffers, passed to kernels: the channel of all calls, and the credit of this half."""

    landed: ChannelView
    entered: torch.Tensor
    filled: torch.Tensor


@triton.jit
def enter(entered, peer, now, team):
    """Release: tell ``peer`` that this rank has begun call ``now``."""
    wl.notify(entered + wl.rank(team), peer, now, team)


@triton.jit
def await_entered(entered, peer, last, team):
    """Acquire: returns once ``peer`` has begun a later call than ``last``, and so ended call ``last``."""
    wl.wait(entered + peer, last + 1, team)


@triton.jit
def begin_half(half, team):
    """Begin the next call; returns it once this half may be written at every peer.

    All programs of the kernel call it first. Program 0 tells every peer; every program waits for every peer.
    """
    world: tl.constexpr = wl.num_ranks(team)
    program, me = tl.program_id(0), wl.rank(team)
    call = wl.next_call(half.landed)
    last = tl.load(half.filled + program)
    if program == 0:
        for step in range(1, world):
            enter(half.entered, (me + step) % world, call.now, team)
    for step in range(1, world):
        await_entered(half.entered, (me + step) % world, last, team)
    return call


@triton.jit
def await_chunk(call, chunk, team):
    """Acquire: returns once every peer has announced ``chunk`` in this call.

    What the peers stored before is visible.
    """
    world: tl.constexpr = wl.num_ranks(team)
    for step in range(1, world):
        wl.chunk_wait(call, (wl.rank(team) + step) % world, chunk, team)


@triton.jit
def end_half(half, call):
    """End this program's part of the call, which has filled this half last. All programs call it last."""
    tl.store(half.filled + tl.program_id(0), call.now)
    wl.advance_call(call)


@triton.jit
def begin_kernel(half, team):
    """Begin the next call; end once this half may be written at every peer.

    grid: (W - 1,), a program for each peer

    Signals, waits, reuse: the module's, between program p and peer me + 1 + p. Later kernels and copies of the call take it
    as the current one.
    """
    call = wl.next_call(half.landed)
    peer = (wl.rank(team) + 1 + tl.program_id(0)) % wl.num_ranks(team)
    last = tl.load(half.filled + tl.program_id(0))
    enter(half.entered, peer, call.now, team)
    await_entered(half.entered, peer, last, team)
    end_half(half, call)


@dataclass(slots=True, kw_only=True)
class Halves:
    """Symmetric buffers that calls write again, with the credit of each half.

    buffers  [halves, …] each: two halves that alternate by call, or one
    landed   its rows are for the places in ``buffers`` that a peer fills
    calls    number that the host has made; all ranks make the same ones, so they agree on the half
    """

    buffers: tuple[torch.Tensor, ...]
    landed: Channel
    halves: tuple[tuple[tuple[torch.Tensor, ...], Half], ...]
    calls: int = 0

    @classmethod
    def make(cls, team: Team, buffers: tuple[torch.Tensor, ...], rows: int, chunks: int, programs: int) -> Halves:
        """Make a channel of ``rows`` rows for ``buffers``. Collective.

        programs: most of a kernel that begins a call
        """
        landed, entered = Channel.make(team, rows, chunks, "landed"), team.signals((team.size,), name="entered")
        # Rows of a multiple of 16 bytes, so that both halves have the same alignment.
        filled = team.local((len(buffers[0]), -(-programs // 4) * 4), torch.int32).unbind()
        each = zip(zip(*(buffer.unbind() for buffer in buffers), strict=True), filled, strict=True)
        halves = tuple((parts, Half(landed.view, entered, words)) for parts, words in each)
        made = cls(buffers=buffers, landed=landed, halves=halves)
        team.workspace("halves", list).append(made)  # replayed calls count too: weft.transport.replays
        return made

    @property
    def turn(self) -> int:
        """Number of the next call's half."""
        return self.calls % len(self.halves)

    def next(self) -> tuple[tuple[torch.Tensor, ...], Half]:
        """The next call's half of each buffer, and the argument of its kernels."""
        half = self.halves[self.turn]
        self.calls += 1
        return half

    def written(self) -> None:
        """Have torch count a write, so that it refuses a backward that has saved rows of an earlier call."""
        for buffer in self.buffers:
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)

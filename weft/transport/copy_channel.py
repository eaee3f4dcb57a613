"""Calls whose data copy engines carry: alternating buffers, a channel, kernels that begin and wait."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.launching import launch_of
from weft.runtime.team.channel import Channel, ChannelView

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Signals that a rank keeps for each peer's rows.
MAX_CHUNKS = 8


@triton.jit
def begin_kernel(landed, filled, entered, team):
    """Begin the next call; end once this half of every rank's buffer may be overwritten.    grid: (W - 1,)

    landed   the channel; copy engines send the number of the call as its flags
    filled   [W - 1]  this rank's, for this half: the last call that filled it, one copy for each program
    entered  [W]      symmetric: entered[s] = e, once rank s has ended call e - 1

    signals  program p, to its peer me + 1 + p: entered[me] = this call
    waits    entered[peer] > filled: the peer has ended the call that read this half last
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    peer = (me + 1 + tl.program_id(0)) % world
    call = wl.next_call(landed)
    filled += tl.program_id(0)
    last = tl.load(filled)
    wl.notify(entered + me, peer, call.now, team)
    wl.wait(entered + peer, last + 1, team)
    tl.store(filled, call.now)
    wl.advance_call(call)


@triton.jit(do_not_specialize=["first", "chunk"])
def wait_kernel(landed, first, chunk, team):
    """End once ``chunk`` of ranks first, first + 1, … (mod W) has arrived.        grid: (ranks,)"""
    wl.follow_previous_kernel()  # a next kernel that starts early waits for this one's end
    source = (first + tl.program_id(0)) % wl.num_ranks(team)
    wl.chunk_wait(wl.current_call(landed), source, chunk, team)


def await_chunk(landed: Channel, chunk: int, first: int, count: int = 1) -> None:
    """Have the current stream wait for ``chunk`` of ``count`` rows of flags: first, first + 1, … (mod W)."""
    _wait(landed.team, count, landed.view, first, chunk)


def _wait(team: Team, programs: int, landed: ChannelView, first: int, chunk: int) -> None:
    launch = launch_of(team, wait_kernel, landed.chunks.value, lambda: {"num_warps": 1})
    launch(programs, landed, first, chunk, team.view)


@dataclass(slots=True, kw_only=True)
class CopyChannel:
    """Workspace of calls whose data copy engines carry: buffers, their channel, state of begin_kernel.

    buffers  [halves, …]  symmetric: two halves that alternate by call, or one
    landed   rows of MAX_CHUNKS flags: a row for each place in ``buffers`` that a peer fills
    ready    [W, programs]  symmetric: signals of share_kernel
    calls    number of calls that the host has made. All ranks make the same ones, so they agree on the half. The device proves
             that it is free: a half is written again only after every rank has ended the call that read it (begin_kernel).
             With alternating halves that wait is over before it begins. In a CUDA graph with an odd number of calls, whose
             replays use one half twice in a row, and with one half only, it waits for the peer to end its last call.
    """

    buffers: torch.Tensor
    landed: Channel
    entered: torch.Tensor
    filled: tuple[torch.Tensor, ...]
    ready: torch.Tensor
    calls: int = 0
    _halves: tuple[torch.Tensor, ...] = ()
    _flags: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _rows: dict[int, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._halves = self.buffers.unbind()

    @classmethod
    def make(cls, team: Team, buffers: torch.Tensor, flags: int, programs: int = 0) -> CopyChannel:
        """Make a channel. flags: number of rows; programs: most programs of share_kernel. Collective."""
        return cls(
            buffers=buffers,
            landed=Channel.make(team, flags, MAX_CHUNKS, "landed"),
            entered=team.signals((team.size,), name="entered"),
            # Rows of a multiple of 16 bytes, so that both halves have the same alignment.
            filled=team.local((len(buffers), -(-(team.size - 1) // 4) * 4), torch.int32).unbind(),
            ready=team.signals((team.size, max(programs, 1)), name="ready"),
        )

    @property
    def flags(self) -> torch.Tensor:
        return self.landed.signals

    @property
    def epoch(self) -> torch.Tensor:
        return self.landed.epoch

    def begin(self, team: Team) -> torch.Tensor:
        """Begin a call in the current stream. Returns its half of ``buffers``, which all ranks may write."""
        half = self.calls % len(self.buffers)
        self.calls += 1
        launch = launch_of(team, begin_kernel, (), lambda: {"num_warps": 1})
        launch(team.size - 1, self.landed.view, self.filled[half], self.entered, team.view)
        return self._halves[half]

    def send(self, team: Team, target: torch.Tensor, source: torch.Tensor, row: int, number: int, peer: int) -> None:
        """``Channel.send``, but ``row`` chooses the flags by place in ``buffers``, not by source.

        An empty ``source`` is announced alone.
        """
        if source.numel() > 0:
            team.copy_engine.put(target, source, peer)
        team.copy_engine.signal(self._flag(row, number), self._flag(-1, 0), peer)

    def rows_from(self, first: int) -> Channel:
        """The channel's rows of flags from ``first`` on, as a channel."""
        rows = self._rows.get(first)
        if rows is None:
            signals = self.flags[first:]
            view = self.landed.view._replace(signals=signals)
            rows = self._rows[first] = replace(self.landed, signals=signals, view=view)
        return rows

    def _flag(self, row: int, number: int) -> torch.Tensor:
        """View flags[row, number], or the epoch for row -1, cached since making it takes microseconds."""
        flag = self._flags.get((row, number))
        if flag is None:
            flag = self.epoch[:1] if row < 0 else self.flags[row, number : number + 1]
            self._flags[row, number] = flag
        return flag

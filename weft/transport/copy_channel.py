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
from weft.transport.halves import Halves, begin_kernel

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Signals that a rank keeps for each peer's rows.
MAX_CHUNKS = 8


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
    """Workspace of calls whose data copy engines carry: buffers, and their channel.

    halves   the buffers, with rows of MAX_CHUNKS flags
    ready    [W, programs]  symmetric: signals of share_kernel
    """

    halves: Halves
    ready: torch.Tensor
    _flags: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _rows: dict[int, Channel] = field(default_factory=dict)

    @classmethod
    def make(
        cls, team: Team, buffers: torch.Tensor | tuple[torch.Tensor, ...], flags: int, programs: int = 0
    ) -> CopyChannel:
        """Make a channel. flags: number of rows; programs: most programs of share_kernel. Collective."""
        return cls(
            halves=Halves.make(
                team, buffers if isinstance(buffers, tuple) else (buffers,), flags, MAX_CHUNKS, team.size - 1
            ),
            ready=team.signals((team.size, max(programs, 1)), name="ready"),
        )

    @property
    def buffers(self) -> torch.Tensor:
        return self.halves.buffers[0]

    @property
    def landed(self) -> Channel:
        return self.halves.landed

    @property
    def flags(self) -> torch.Tensor:
        return self.landed.signals

    @property
    def epoch(self) -> torch.Tensor:
        return self.landed.epoch

    def begin(self, team: Team) -> torch.Tensor:
        """Begin a call in the current stream. Returns its half of ``buffers``, which all ranks may write."""
        return self.begin_each(team)[0]

    def begin_each(self, team: Team) -> tuple[torch.Tensor, ...]:
        """``begin``, but returns the halves of all buffers."""
        buffers, half = self.halves.next()
        launch = launch_of(team, begin_kernel, (), lambda: {"num_warps": 1})
        launch(team.size - 1, half, team.view)
        return buffers

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

"""The channel that copy engines fill: buffers that alternate by call, a flag behind each copy, and the two kernels that begin a
call and wait for its flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl

if TYPE_CHECKING:
    from weft.runtime.team import Team


# Signals that a rank keeps for each peer's rows.
MAX_CHUNKS = 8


@triton.jit
def begin_kernel(epoch, filled, entered, team):
    """Starts the next epoch; ends once this half of every rank's buffer may be overwritten.        grid: (W - 1,)

    epoch    [2]      this rank's: the number of the call that runs; the copy engine sends this word as its flag
    filled   [W - 1]  this rank's, of this half: the last epoch that filled it, as each program has noted it
    entered  [W]      symmetric: entered[s] = e, once rank s has ended call e - 1

    signals  program p, to its peer me + 1 + p: entered[me] = epoch
    waits    entered[peer] > filled: the peer has ended the call that read this half last
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    peer = (me + 1 + tl.program_id(0)) % world
    now = wl.next_epoch(epoch)
    filled += tl.program_id(0)
    last = tl.load(filled)
    wl.notify(entered + me, peer, now, team)
    wl.wait(entered + peer, last + 1, team)
    tl.store(filled, now)
    wl.advance_epoch(epoch, now)


@triton.jit
def wait_kernel(flags, epoch, team, STRIDE: tl.constexpr):
    """Returns once the flags, ``STRIDE`` apart, have reached ``epoch``: what the copy engines sent before them is here.
    grid: (flags,)"""
    wl.follow_previous_kernel()  # what is set up meanwhile waits for this one's end
    wl.wait(flags + tl.program_id(0) * STRIDE, tl.load(epoch), team)


@dataclass(slots=True, kw_only=True)
class Segments:
    """The buffers of calls whose data copy engines carry: what arrives, its flags, and what begin_kernel keeps.

    buffers  [halves, …]  symmetric: two, for every other call, or one for all
    flags    [rows, MAX_CHUNKS]  symmetric: a row for each place in ``buffers`` that a peer fills, by chunk
    ready    [W, programs]  symmetric: of share_kernel
    calls    made by the host. All ranks make the same ones, so they agree on the half; that it is free, the device proves:
             a half is written again only after every rank has ended the call that read it (begin_kernel). Halves
             alternate, so that wait is over before it begins; in a CUDA graph with an odd number of calls, whose
             replays use the same half twice running, and where there is one half, it is for the peer to end its last call.
    """

    buffers: torch.Tensor
    flags: torch.Tensor
    entered: torch.Tensor
    filled: torch.Tensor
    epoch: torch.Tensor
    ready: torch.Tensor
    calls: int = 0

    @classmethod
    def make(cls, team: Team, buffers: torch.Tensor, flags: int, programs: int = 0) -> Segments:
        """``flags``: rows of them. ``programs``: at most, of share_kernel. Collective."""
        return cls(
            buffers=buffers,
            flags=team.signals((flags, MAX_CHUNKS)),
            entered=team.signals((team.size,)),
            # Rows of a multiple of 16 bytes, so that the words of either half are aligned alike.
            filled=team.local((len(buffers), -(-(team.size - 1) // 4) * 4), torch.int32),
            epoch=team.local((2,), torch.int32),
            ready=team.signals((team.size, max(programs, 1))),
        )

    def begin(self, team: Team) -> torch.Tensor:
        """The next call's half of ``buffers``, free for every rank to write behind this in the current stream."""
        half = self.calls % len(self.buffers)
        self.calls += 1
        begin_kernel[(team.size - 1,)](self.epoch, self.filled[half], self.entered, team.view, num_warps=1)
        return self.buffers[half]

    def send(self, team: Team, target: torch.Tensor, source: torch.Tensor, row: int, number: int, peer: int) -> None:
        """Have the copy engine write ``source`` into the peer's ``target``, then the epoch into flags[row, number] there."""
        team.copy_engine.put(target, source, peer)
        team.copy_engine.signal(self.flags[row, number : number + 1], self.epoch[:1], peer)


def await_flags(flags: torch.Tensor, epoch: torch.Tensor, team: Team) -> None:
    """The current stream goes on once flags[:, 0] have come."""
    wait_kernel[(flags.shape[0],)](flags, epoch, team.view, STRIDE=flags.stride(0), num_warps=1)

"""All-to-all that copy engines carry beside the kernels that follow it: sent now, received later.

engine r | begin | to r-1 | to r-2 | …
kernels  | begin | kernels between, such as attention … | await r+1, copy out | await r+2, copy out | …            rank r

    received  symmetric: a receive buffer for each peer's part, in one half
    signals   copy engine of rank s, after its part: the flag of its row = the call, at the receiver
    waits     ``receive``: a kernel for each part, before it is copied out
    reuse     of the receive buffers: CopyChannel, whose ranks begin a call once all have ended their last. A rank receives
              before it sends again, so what it begins comes after its copies out of the buffers
    progress  engines wait for begin_kernel only, kernels for engines
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.kernels.tile_schedule import buffer_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.workspace import capacity_for, grown_workspace
from weft.transport.copy_channel import CopyChannel, await_chunk
from weft.transport.plans import LINE_BYTES

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

KEY = "all_to_all ahead"
# Bytes of a part from which it travels ahead: a start and a flag of a copy engine take longer than all_to_all of less (H200,
# W=2: 1 MiB by stores 3.9 us in a row, a flag after a copy 2.3).
FEWEST_BYTES = 1 << 20


def travels_ahead(nbytes: int, team: Team) -> bool:
    """True if a part of ``nbytes`` pays, and half of the heap's free block holds its buffers.

    Equal on all ranks, whose heaps are filled alike. Never between nodes.
    """
    if team.rail is not None or nbytes < FEWEST_BYTES:
        return False
    size = _size_of(nbytes) * (team.size - 1)
    return max(team.workspace(KEY, dict), default=0) >= size or capacity_for(size) <= team.largest_free_bytes() // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """An all-to-all that ``send`` has begun; ``parts`` [W, …] stay as they are until ``receive``."""

    team: Team
    parts: torch.Tensor
    channel: CopyChannel
    received: torch.Tensor

    @classmethod
    def send(cls, parts: torch.Tensor, team: Team) -> InFlight:
        """Begin to send parts[s], contiguous, to rank s. Collective.

        Receive one before the next is sent.
        """
        W, me, size = team.size, team.rank, _size_of(parts[0].nbytes)

        def make(capacity: int) -> CopyChannel:
            return CopyChannel.make(team, team.empty((1, capacity), torch.uint8), W - 1)

        channel = grown_workspace(team, KEY, (W - 1) * size, make)
        buffers = channel.begin(team)[: (W - 1) * size].view(W - 1, size)[:, : parts[0].nbytes]
        team.copy_engine.fork()
        sources = parts.view(W, -1).view(torch.uint8)
        for step in range(1, W):
            peer = (me - step) % W  # which needs this rank's part first
            row = buffer_of.fn(me, peer, W)
            channel.send(team, buffers[row], sources[peer], row, 0, peer)
        return cls(team=team, parts=parts, channel=channel, received=buffers)

    def receive(self, out: torch.Tensor) -> None:
        """Write rank s's part for this rank to out[s], of the shape of ``parts``, any strides."""
        W, me = self.team.size, self.team.rank
        out[me].copy_(self.parts[me])
        for step in range(1, W):
            peer = (me + step) % W
            row = buffer_of.fn(peer, me, W)
            await_chunk(self.channel.landed, 0, row)
            out[peer].copy_(self.received[row].view(out.dtype).view(out.shape[1:]))
        self.team.copy_engine.join()


def _size_of(nbytes: int) -> int:
    """Bytes of a receive buffer."""
    return cdiv(nbytes, LINE_BYTES) * LINE_BYTES

"""A rail's engine on torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from weft.runtime.streams import current_stream, on_stream, own_stream
from weft.runtime.team.rail import Piece, Rail


class TorchRail:
    """Transfers on one side stream, each a batch of at most one send and one receive.

    On CPUs a transfer is complete when ``move`` returns.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._ranks = group, device, dist.get_process_group_ranks(group)
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._stream = own_stream(device, priority=-1)
            self._forked, self._ended = torch.cuda.Event(), torch.cuda.Event()
            # References until the next join: owners may drop local tensors while the rail still uses them.
            self._held: list[Piece] = []

    def fork(self) -> None:
        if self._on_gpu:
            self._forked.record(current_stream(self._device))
            self._forked.wait(self._stream)

    def move(self, piece: Piece, epoch: torch.Tensor | None, number: int) -> torch.cuda.Event | None:
        with on_stream(self._stream) if self._on_gpu else nullcontext():
            self._transfer(piece.send, piece.to, piece.receive, piece.source)
            if piece.landed is not None:
                piece.landed.copy_(epoch.view_as(piece.landed))
        if not self._on_gpu:
            return None
        self._held.append(piece)
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def after(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.wait(current_stream(self._device))

    def join(self) -> None:
        if self._on_gpu:
            self._ended.record(self._stream)
            self._ended.wait(current_stream(self._device))
            self._held.clear()

    def _transfer(
        self, send: torch.Tensor | None, to: int | None, receive: torch.Tensor | None, source: int | None
    ) -> None:
        # As bytes, since NCCL does not know all dtypes.
        wanted = []
        if send is not None and send.numel():
            wanted.append(dist.P2POp(dist.isend, send.view(-1).view(torch.uint8), self._ranks[to], self._group))
        if receive is not None and receive.numel():
            wanted.append(dist.P2POp(dist.irecv, receive.view(-1).view(torch.uint8), self._ranks[source], self._group))
        for work in dist.batch_isend_irecv(wanted) if wanted else ():
            work.wait()


def rail_of(group: dist.ProcessGroup, device: torch.device) -> Rail:
    """The rail of ``group``, whose ranks are of one local rank, in the order of the nodes."""
    return Rail(TorchRail(group, device), dist.get_rank(group), dist.get_world_size(group))


def new_group(members: list[int]) -> dist.ProcessGroup:
    """Process group of these ranks of the world. Collective on them alone."""
    return dist.new_group(members, use_local_synchronization=True)

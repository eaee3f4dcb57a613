"""Channels: signals by source rank and chunk, and the number of the call that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton.language as tl

from weft.arguments import check_int
from weft.runtime.view import TakenByView

if TYPE_CHECKING:
    from weft.runtime.team import Team


class ChannelView(NamedTuple):
    """``channel.view``, what kernels take. They ask it through primitives (``next_call``, ``chunk_wait``), never by field.

    signals  int32 [W, chunks], symmetric: signals[s, c] = e, once chunk c of rank s's call e is here
    epoch    int32 [2], this rank's: the number of the current call, and what ``advance_epoch`` counts
    chunks   compile-time constant
    """

    signals: torch.Tensor
    epoch: torch.Tensor
    chunks: tl.constexpr


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel(TakenByView):
    """Arrival of chunks from every rank, call by call: ``team.channel(chunks)`` makes one.

    All ranks make the same calls. A call begins by ``begin`` on the host, or in a kernel by ``wl.next_call`` and
    ``wl.advance_call``; later kernels of the stream, and ``send``, then belong to it. Its number is in device memory, so a
    captured CUDA graph replays correctly. When the data behind a chunk may be overwritten is for the caller to prove: a rank
    may be one call ahead of a peer that has not read them yet.

        @triton.jit
        def sum_shards(shards, out, landed, team, N: tl.constexpr):
            call, at, total = wl.current_call(landed), tl.arange(0, N), tl.zeros((N,), tl.float32)
            for step in tl.static_range(1, wl.num_ranks(team)):
                source = (wl.rank(team) + step) % wl.num_ranks(team)
                wl.chunk_wait(call, source, 0, team)
                total += tl.load(shards + source * N + at)
            tl.store(out + at, total)

        landed = team.channel(1)                              # once
        landed.begin()                                        # in every call
        team.copy_engine.fork()
        for peer in peers:
            landed.send(shards[team.rank], shard, peer, 0)
        sum_shards[(1,)](shards, out, landed.view, team.view, N)
        team.copy_engine.join()
    """

    signals: torch.Tensor
    epoch: torch.Tensor
    view: ChannelView
    team: Team

    @classmethod
    def make(cls, team: Team, rows: int, chunks: int, name: str | None = None) -> Channel:
        """A channel with ``rows`` rows of signals. Collective."""
        signals = team.signals((rows, chunks), name=name or "channel")
        epoch = team.local((2,), torch.int32)
        return cls(signals=signals, epoch=epoch, view=ChannelView(signals, epoch, tl.constexpr(chunks)), team=team)

    def begin(self) -> None:
        """Begin the next call, in the current stream. The copy engine has been joined since it sent chunks of the last one."""
        self.epoch[:1].add_(1)

    def send(self, target: torch.Tensor, source: torch.Tensor, peer: int, chunk: int) -> None:
        """Have the copy engine write ``source`` into the peer's ``target``, then announce ``chunk`` of this rank there.

        As ``copy_engine.put``. The copy engine has been forked since the call began.
        """
        chunk = check_int("chunk", chunk, 0, self.signals.shape[1] - 1)
        self.team.copy_engine.put(target, source, peer)
        self.team.copy_engine.signal(self.signals[self.team.rank, chunk : chunk + 1], self.epoch[:1], peer)

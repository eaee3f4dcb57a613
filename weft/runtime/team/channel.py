"""Channels: signals by source rank and chunk, with the number of the call that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import triton.language as tl

from weft.arguments import check_int
from weft.runtime.platforms.platform import CopyEngine
from weft.runtime.team.view import TakenByView


class Members(Protocol):
    """The part of a Team that a channel uses."""

    rank: int

    @property
    def copy_engine(self) -> CopyEngine: ...

    def signals(self, shape: tuple[int, ...], *, name: str | None = None) -> torch.Tensor: ...

    def local(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class ChannelView(NamedTuple):
    """Kernel argument for a channel, ``channel.view``; primitives read its fields.

    signals  int32 [W, chunks], symmetric: signals[s, c] = e once chunk c of rank s has arrived in call e
    epoch    int32 [2], this rank's: the number of the current call, and the counter of ``advance_epoch``
    chunks   compile-time constant
    """

    signals: torch.Tensor
    epoch: torch.Tensor
    chunks: tl.constexpr


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel(TakenByView):
    """Signals for the arrival of chunks from every rank, call by call; ``team.channel(chunks)`` makes one.

    All ranks make the same calls. ``begin`` on the host begins a call, or a kernel does by ``wl.next_call`` and
    ``wl.advance_call``; later kernels of the stream, and ``send``, belong to it. Its number lies in device memory, so a
    captured CUDA graph replays correctly. A channel does not protect the data: a rank may be one call ahead of a peer that has
    not read them, so the caller proves when they may be overwritten.

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
    team: Members

    @classmethod
    def make(cls, team: Members, rows: int, chunks: int, name: str | None = None) -> Channel:
        """A channel with ``rows`` rows of signals. Collective."""
        signals = team.signals((rows, chunks), name=name or "channel")
        epoch = team.local((2,), torch.int32)
        return cls(signals=signals, epoch=epoch, view=ChannelView(signals, epoch, tl.constexpr(chunks)), team=team)

    def begin(self) -> None:
        """Begin the next call, in the current stream.

        The copy engine must have been joined since it sent chunks of the call before.
        """
        self.epoch[:1].add_(1)

    def send(self, target: torch.Tensor, source: torch.Tensor, peer: int, chunk: int) -> None:
        """Copy ``source`` into the peer's ``target`` by copy engine, then announce ``chunk`` there.

        Arguments as in ``copy_engine.put``. Without elements it only announces the chunk. The copy engine must have been forked
        since the call began.
        """
        chunk = check_int("chunk", chunk, 0, self.signals.shape[1] - 1)
        self.team.copy_engine.put(target, source, peer)
        self.team.copy_engine.signal(self.signals[self.team.rank, chunk : chunk + 1], self.epoch[:1], peer)

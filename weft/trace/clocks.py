"""Clocks of GPUs: their offsets to rank 0's by ping-pong, and the place of CUDA events on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.language.lowering import ptx

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

ROUNDS = 500
# Tries of which the one with the shortest gap places CUDA events on the GPU's clock.
_TRIES = 20


@triton.jit(do_not_specialize=["first", "peer"])
def ping_pong_kernel(word, stamps, first, peer, team, ROUNDS: tl.constexpr):
    """Times of ROUNDS round trips between rank 0 and ``peer``.        grid: (1,), on these two ranks

    stamps  int64 [ROUNDS, 2], this rank's: rank 0's clock before and after; the peer's in between, twice

    signals  round i: word = first + 1 + i at the peer, then by the peer at rank 0
    waits    the peer for its word, then rank 0 for its word
    reuse    of word: ``first`` grows by ROUNDS from launch to launch of rank 0
    """
    for number in range(ROUNDS):
        value = first + number + 1
        if wl.rank(team) == 0:
            tl.store(stamps + 2 * number, ptx.globaltimer())
            wl.notify(word, peer, value, team)
            wl.wait(word, value, team)
            tl.store(stamps + 2 * number + 1, ptx.globaltimer())
        else:
            wl.wait(word, value, team)
            now = ptx.globaltimer()
            wl.notify(word, 0, value, team)
            tl.store(stamps + 2 * number, now)
            tl.store(stamps + 2 * number + 1, now)


@triton.jit
def stamp_kernel(stamp):
    """stamp[0] = the GPU's clock        grid: (1,)"""
    tl.store(stamp, ptx.globaltimer())


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Offset of a rank's clock to rank 0's at the rank's ``time``; ``residual``: half its spread."""

    time: int
    offset: float
    residual: float


def offset_of(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Offset:
    """Offset by the stamps of rank 0 and of its peer, in the tenth with the shortest round trips."""
    # In integers as far as they are large: a float of nanoseconds since 1970 has steps of 256.
    trips = sorted(
        (after - before, (2 * there - before - after) / 2, there)
        for (before, after), (there, _) in zip(first, second, strict=True)
    )
    best = trips[: max(1, len(trips) // 10)]
    offsets = sorted(offset for _, offset, _ in best)
    return Offset(
        time=best[0][2], offset=offsets[len(offsets) // 2], residual=(offsets[-1] - offsets[0]) / 2
    )  # fmt: skip


def aligned(time: int, before: Offset, after: Offset) -> int:
    """``time`` of this rank's clock on rank 0's, between two measurements: by linear interpolation."""
    share = (time - before.time) / max(after.time - before.time, 1)
    return time - round(before.offset + (after.offset - before.offset) * share)


def other_clocks(gpus: Sequence[str]) -> list[int]:
    """Ranks with another clock than rank 0, by each rank's GPU.

    Ranks that share a GPU read one clock. A ping-pong between them would take two time slices a round.
    """
    return [rank for rank, gpu in enumerate(gpus) if gpu != gpus[0]]


def measure(team: Team) -> Offset:
    """Offset of this rank's clock to rank 0's. Collective."""
    of_device = torch.cuda.get_device_properties(team.device)
    peers = other_clocks(team.workspace("trace GPUs", lambda: team.exchange(str(of_device.uuid))))
    word = team.workspace("trace clock", lambda: team.signals((1,), name="trace clock"))
    counts = team.workspace("trace clock rounds", lambda: {"first": 0})
    stamps = torch.zeros((team.size, ROUNDS, 2), dtype=torch.int64, device=team.device)
    for peer in peers:
        if team.rank in (0, peer):
            ping_pong_kernel[(1,)](word, stamps[peer], counts["first"], peer, team.view, ROUNDS, num_warps=1)
        counts["first"] += ROUNDS
    team.synchronize()
    by_rank = team.exchange(stamps.tolist())
    if team.rank not in peers:
        spread = [offset_of(by_rank[0][peer], by_rank[peer][peer]).residual for peer in peers]
        stamp = torch.zeros(1, dtype=torch.int64, device=team.device)
        stamp_kernel[(1,)](stamp, num_warps=1)
        return Offset(time=int(stamp), offset=0.0, residual=max(spread, default=0.0))
    return offset_of(by_rank[0][team.rank], by_rank[team.rank][team.rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """CUDA event at ``time`` of this rank's clock, known to ``residual`` nanoseconds."""

    event: torch.cuda.Event
    time: int
    residual: int

    def time_of(self, event: torch.cuda.Event) -> int:
        return self.time + round(self.event.elapsed_time(event) * 1e6)


def reference(device: torch.device) -> Reference:
    """Reference of the current stream: of several tries the one with the closest two events."""
    stamp, readings = torch.zeros(1, dtype=torch.int64, device=device), []
    for _ in range(_TRIES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        stamp_kernel[(1,)](stamp, num_warps=1)
        after.record()
        after.synchronize()
        gap = round(before.elapsed_time(after) * 1e6)
        readings.append((gap, int(stamp), before))
    gap, time, event = min(readings, key=lambda one: one[0])
    return Reference(event=event, time=time - gap // 2, residual=gap // 2)

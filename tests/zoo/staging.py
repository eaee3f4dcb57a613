"""Bugs of Lamport exchanges over rotating stages: clears that are too late or unordered."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit

EXCHANGES = 7


@triton.jit
def count_written(x):
    return tl.sum((x.to(tl.int32, bitcast=True) != -2147483648).to(tl.int32))


@triton.jit
def rotate(inbox, got, team, N: tl.constexpr, STAGES: tl.constexpr, PROOF: tl.constexpr, ROUNDS: tl.constexpr):
    """Send to stage ``round % STAGES`` of the peer, clear the previous round's stage, receive.

    PROOF  proof that the clear is in memory before the next words leave: "none", "fence", "load" (a plain load) or "volatile"
    """
    at = tl.arange(0, N)
    for round in range(ROUNDS):
        stage = inbox + (round % STAGES) * N
        old = inbox + ((round + STAGES - 1) % STAGES) * N
        if PROOF == "fence":
            wl.fence(team)
        there = wl.symm_at(stage, 1 - wl.rank(team), team)
        wl.lamport_store(there + at, tl.full((N,), 1.0, tl.float32) + round, at < N)  # here
        wl.lamport_clear(old + at, at < N)  # here
        if PROOF == "load":
            while count_written(tl.load(old + at)) > 0:
                pass
        if PROOF == "volatile":
            while count_written(tl.load(old + at, volatile=True)) > 0:
                pass
        tl.store(got + round * N + at, wl.lamport_load(stage + at, at < N, team))


def rotated(team, stages, proof):
    got = team.local((EXCHANGES, N), torch.float32)
    inbox = team.empty((stages, N), torch.float32, name="inbox").fill_(-0.0)
    team.barrier()
    rotate[(1,)](inbox, got, team.view, N, stages, proof, EXCHANGES)
    return got


@exhibit(
    "overtaken", "inbox", "a clear without a fence is overtaken by the next words, and then erases the reply to them",
    rotate,
)  # fmt: skip
def clearing_that_is_overtaken(team, bug):
    return rotated(team, 3, "none" if bug else "fence")


@exhibit(
    "overtaken", "inbox", "a clear is read back by plain loads, which a cache may answer", rotate,
)  # fmt: skip
def clearing_read_back_from_a_cache(team, bug):
    return rotated(team, 3, "load" if bug else "volatile")


@exhibit(
    "race", "inbox", "with two stages, a peer writes to one again before it is cleared", rotate,
)  # fmt: skip
def stage_used_again_too_early(team, bug):
    return rotated(team, 2 if bug else 3, "fence")

"""Bugs of acknowledgements and of Lamport words."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from tests.zoo.publishing import tensors


@triton.jit
def acknowledged(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        wl.wait(landed + 1, 1, team)
        tl.store(wl.symm_at(data, 1, team) + at, 2.0)  # here
    else:
        tl.store(got + at, tl.load(data + at))  # here
        if BUG:
            tl.atomic_add(wl.symm_at(landed + 1, 0, team), 1, sem="release", scope="sys")
        else:
            wl.notify(landed + 1, 0, 1, team)


@exhibit(
    "missing-barrier",
    "data",
    "a scalar release hands a buffer back while other threads still read it",
    acknowledged,
)
def acknowledged_without_barrier(team, bug):
    data, landed, got = tensors(team)
    acknowledged[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def carried(data, landed, got, inbox, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        if not BUG:
            wl.notify(landed, 1, 1, team)
        wl.lamport_store(wl.symm_at(inbox, 1, team) + at, tl.full((N,), 3.0, tl.float32), at < N)
    else:
        x = wl.lamport_load(inbox + at, at < N, team)
        if not BUG:
            wl.wait(landed, 1, team)
        tl.store(got + at, x + tl.load(data + at))  # here


@exhibit("race", "data", "Lamport words are used as a flag for other data", carried)
def lamport_word_as_a_flag(team, bug):
    data, landed, got = tensors(team)
    inbox = team.empty(N, torch.float32, name="inbox").fill_(-0.0)
    team.barrier()
    carried[(1,)](data, landed, got, inbox, team.view, N, bug)
    team.barrier()


@triton.jit
def cleared(inbox, got, landed, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        if not BUG:
            wl.wait(landed, 1, team)
        wl.lamport_store(wl.symm_at(inbox, 1, team) + at, tl.full((N,), 3.0, tl.float32), at < N)  # here
    else:
        wl.lamport_clear(inbox + at, at < N)  # here
        if not BUG:
            wl.notify(landed, 0, 1, team)
            tl.store(got + at, wl.lamport_load(inbox + at, at < N, team))


@exhibit("race", "inbox", "a stage of Lamport words is cleared while a peer may write to it", cleared)
def lamport_stage_cleared_late(team, bug):
    _, landed, got = tensors(team)
    inbox = team.empty(N, torch.float32, name="inbox").fill_(-0.0)
    team.barrier()
    cleared[(1,)](inbox, got, landed, team.view, N, bug)
    team.barrier()


@triton.jit
def staged(inbox, got, epoch, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    now = wl.next_epoch(epoch)
    stage, old = inbox + (now % 3) * N, inbox + ((now + 2) % 3) * N
    there = wl.symm_at(stage, 1 - wl.rank(team), team)
    wl.lamport_store(there + at, tl.full((N,), 1.0, tl.float32), at < N)  # here
    if not BUG:
        wl.lamport_clear(old + at, at < N)
    tl.store(got + at, wl.lamport_load(stage + at, at < N, team))
    wl.advance_epoch(epoch, now)


@exhibit("uncleared", "inbox", "a stage of Lamport words is reused without a clear", staged)
def lamport_stage_not_cleared(team, bug):
    epoch, got = team.local(2, torch.int32), team.local(N, torch.float32)
    inbox = team.empty((3, N), torch.float32, name="inbox").fill_(-0.0)
    team.barrier()
    for _ in range(5):
        staged[(1,)](inbox, got, epoch, team.view, N, bug)

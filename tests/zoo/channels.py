"""Channels: a chunk announced too early, a call that never began."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit


@triton.jit
def push_chunk(data, got, landed, team, N: tl.constexpr, BUG: tl.constexpr):
    call, at, peer = wl.next_call(landed), tl.arange(0, N), 1 - wl.rank(team)
    if BUG:
        wl.chunk_notify(call, peer, 1, team)
    tl.store(wl.symm_at(data, peer, team) + at, tl.full((N,), 1.0, tl.float32))  # here
    if not BUG:
        wl.chunk_notify(call, peer, 1, team)
    wl.chunk_wait(call, peer, 1, team)
    tl.store(got + at, tl.load(data + at))  # here
    wl.advance_call(call)


@exhibit("race", "data", "a chunk is announced before its data are stored", push_chunk, also=("divergence",))
def chunk_announced_before_its_data(team, bug):
    data, landed = team.zeros(N, torch.float32, name="data"), team.channel(2, name="landed")
    got = team.local(N, torch.float32)
    push_chunk[(1,)](data, got, landed.view, team.view, N, bug)
    return got


@triton.jit
def push_of_a_call(data, got, landed, team, N: tl.constexpr):
    call, at, peer = wl.current_call(landed), tl.arange(0, N), 1 - wl.rank(team)
    tl.store(wl.symm_at(data, peer, team) + at, tl.full((N,), 1.0, tl.float32))  # here
    wl.chunk_notify(call, peer, 0, team)
    wl.chunk_wait(call, peer, 0, team)
    tl.store(got + at, tl.load(data + at))  # here


@exhibit("race", "data", "a channel is reused without a new call, so that the wait ends before it begins",
         push_of_a_call, also=("divergence",))  # fmt: skip
def channel_reused_without_a_new_call(team, bug):
    data, landed = team.zeros((2, N), torch.float32, name="data"), team.channel(1, name="landed")
    got = team.local((2, N), torch.float32)
    for call in range(2):
        if call == 0 or not bug:
            landed.begin()
        push_of_a_call[(1,)](data[call], got[call], landed.view, team.view, N)
    return got


@triton.jit
def push_halves(data, got, landed, team, N: tl.constexpr, BUG: tl.constexpr):
    """Every program sends a part to the peer, in one half of the buffer by turns."""
    call, at, peer = wl.next_call(landed), tl.program_id(0) * N + tl.arange(0, N), 1 - wl.rank(team)  # here
    tl.store(wl.symm_at(data, peer, team) + at, call.now.to(tl.float32))
    wl.chunk_notify(call, peer, tl.program_id(0), team)
    wl.chunk_wait(call, peer, tl.program_id(0), team)
    tl.store(got + at, tl.load(data + at))
    wl.barrier(team)
    if (tl.program_id(0) == 0) | (not BUG):
        wl.advance_call(call)


@exhibit("unadvanced", "landed.epoch, argument of push_halves", "a program ends without the end of its channel's call",
         push_halves)  # fmt: skip
def call_that_one_program_does_not_end(team, bug):
    data, landed = team.zeros(2 * N, torch.float32, name="data"), team.channel(2, name="landed")
    got = team.local((3, 2 * N), torch.float32)
    for call in range(3):
        push_halves[(2,)](data, got[call], landed.view, team.view, N, bug)
    return got


@triton.jit
def send_in_epochs(data, landed, epoch, got, team, N: tl.constexpr, BUG: tl.constexpr):
    now, at, peer = wl.next_epoch(epoch), tl.arange(0, N), 1 - wl.rank(team)  # here
    half = data + (now & 1) * N + at
    tl.store(wl.symm_at(half, peer, team), now.to(tl.float32))
    wl.notify(landed, peer, now, team)
    wl.wait(landed, now, team)
    tl.store(got + at, tl.load(half))
    if not BUG:
        wl.advance_epoch(epoch, now)


@exhibit("unadvanced", "epoch, argument of send_in_epochs", "a kernel does not end its epoch, so that the next wait is for the "
         "same one", send_in_epochs)  # fmt: skip
def epoch_that_does_not_end(team, bug):
    data, landed = team.zeros((2, N), torch.float32, name="data"), team.signals(1, name="landed")
    epoch, got = team.local(2, torch.int32), team.local((3, N), torch.float32)
    for call in range(3):
        send_in_epochs[(1,)](data, landed, epoch, got[call], team.view, N, bug)
        team.barrier()
    return got

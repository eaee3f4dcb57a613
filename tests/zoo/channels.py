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

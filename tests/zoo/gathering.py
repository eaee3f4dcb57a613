"""Bugs of attention over tokens of all ranks: keys that copy engines bring by chunks, and heads exchanged for tokens."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit

CHUNKS = 2
HEADS = 2


@triton.jit
def add_keys(keys, landed, got, call, team, CHUNKS: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """got = sum over the keys of the peer, chunk by chunk."""
    at, total = tl.arange(0, N), tl.zeros((N,), tl.float32)
    for chunk in range(CHUNKS):
        # The flag of the chunk before is there earlier.
        wl.wait(landed + (tl.maximum(chunk - 1, 0) if BUG else chunk), call, team)
        total += tl.load(keys + chunk * N + at)  # here
    tl.store(got + at, total)


def push_chunks(team, keys, mine, landed, epoch):
    for chunk in range(CHUNKS):
        team.copy_engine.put(keys[chunk], mine[chunk], 1 - team.rank)  # here
        team.copy_engine.signal(landed[chunk : chunk + 1], epoch, 1 - team.rank)


def buffers(team):
    keys, landed = team.zeros((CHUNKS, N), torch.float32, name="keys"), team.signals(CHUNKS, name="landed")
    return keys, landed, team.local((CHUNKS, N), torch.float32).fill_(1.0), team.local(N, torch.float32)


@exhibit("race", "keys", "attention waits for the chunk before the one that it reads", add_keys, push_chunks)
def keys_of_another_chunk(team, bug):
    keys, landed, mine, got = buffers(team)
    team.copy_engine.fork()
    push_chunks(team, keys, mine, landed, team.local(1, torch.int32).fill_(1))
    add_keys[(1,)](keys, landed, got, 1, team.view, CHUNKS, N, bug)
    team.copy_engine.join()
    team.barrier()


@triton.jit
def begin(entered, call, team):
    """End once the peer has ended what it ran before its call."""
    peer = 1 - wl.rank(team)
    wl.notify(entered, peer, call, team)
    wl.wait(entered, call, team)


@exhibit(
    "race", "keys", "the next call's keys are copied over keys that a slow rank still reads", add_keys, push_chunks
)
def keys_of_the_next_call(team, bug):
    keys, landed, mine, got = buffers(team)
    epoch, entered = team.local(1, torch.int32), team.signals(1, name="entered")
    for call in (1, 2):
        epoch.add_(1)
        if not bug:
            begin[(1,)](entered, call, team.view)
        team.copy_engine.fork()
        push_chunks(team, keys, mine, landed, epoch)
        add_keys[(1,)](keys, landed, got, call, team.view, CHUNKS, N, False)
        team.copy_engine.join()
    team.barrier()


@triton.jit
def give_heads(x, out, arrived, team, HEADS: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """out[s, h, :] = x[my rank, h, :] of rank s    grid: (HEADS,), x [W, HEADS, N] by receiver"""
    me, head, at = wl.rank(team), tl.program_id(0), tl.arange(0, N)
    world: tl.constexpr = wl.num_ranks(team)
    place = tl.minimum(head + 1, HEADS - 1) if BUG else head
    for peer in range(world):
        row = tl.load(x + (peer * HEADS + head) * N + at)
        tl.store(wl.symm_at(out, peer, team) + (me * HEADS + place) * N + at, row)  # here
        wl.notify(arrived + me * HEADS + head, peer, 1, team)
    for source in range(world):
        wl.wait(arrived + source * HEADS + head, 1, team)


@exhibit("race", "heads", "a transposed store goes to the place of the neighbouring head", give_heads)
def head_of_the_neighbour(team, bug):
    out, arrived = team.zeros((team.size, HEADS, N), torch.float32, name="heads"), team.signals((team.size, HEADS))
    x = team.local((team.size, HEADS, N), torch.float32).fill_(1.0)
    give_heads[(HEADS,)](x, out, arrived, team.view, HEADS, N, bug)
    team.barrier()

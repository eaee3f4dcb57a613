"""Bugs of experts' GEMMs that run while copy engines bring their rows, or carry their sums away."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit

PAIRS = 4


@triton.jit
def multiply_tile(rows, source, h, landed, team, PAIRS: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """h[i] = 2 * rows[source[i]]: a tile of one expert's pairs, ordered by the ranks of their rows."""
    call, at = wl.current_call(landed), tl.arange(0, N)[None, :]
    first, last = tl.load(source), tl.load(source + PAIRS - 1)
    if BUG:
        wl.chunk_wait(call, first, 0, team)
    else:
        for rank in range(first, last + 1):
            wl.chunk_wait(call, rank, 0, team)
    pair = tl.arange(0, PAIRS)[:, None]
    row = tl.load(rows + tl.load(source + pair) * N + at)  # here
    tl.store(h + pair * N + at, 2 * row)


@exhibit("race", "rows", "a tile of an expert's rows waits for the rank of its first row alone", multiply_tile)
def tile_of_several_ranks(team, bug):
    rows, landed = team.zeros((team.size, N), torch.float32, name="rows"), team.channel(1, name="landed")
    source, mine = torch.tensor([0, 0, 1, 1], dtype=torch.int32), team.local(N, torch.float32)
    landed.begin()
    team.copy_engine.fork()
    for step in range(team.size):
        landed.send(rows[team.rank], mine, (team.rank + step) % team.size, 0)  # here
    multiply_tile[(1,)](rows, source, team.local((PAIRS, N), torch.float32), landed.view, team.view, PAIRS, N, bug)
    team.barrier()


@triton.jit
def multiply_rounded(rows, scales, h, landed, team, N: tl.constexpr):
    """h = rows[s] * scales[s]: the row of the other rank s, with its scale"""
    other, at = 1 - wl.rank(team), tl.arange(0, N)
    wl.chunk_wait(wl.current_call(landed), other, 0, team)
    tl.store(h + at, tl.load(rows + other * N + at) * tl.load(scales + other))  # here


@exhibit("race", "scales", "the scales of fp8 rows are sent after the flag of their rows", multiply_rounded)
def scales_behind_the_flag(team, bug):
    rows, landed = team.zeros((team.size, N), torch.float32, name="rows"), team.channel(1, name="landed")
    scales = team.zeros((team.size, 1), torch.float32, name="scales")
    row, scale, other = team.local(N, torch.float32), team.local(1, torch.float32), 1 - team.rank
    landed.begin()
    team.copy_engine.fork()
    if not bug:
        team.copy_engine.put(scales[team.rank], scale, other)
    landed.send(rows[team.rank], row, other, 0)
    if bug:
        team.copy_engine.put(scales[team.rank], scale, other)  # here
    multiply_rounded[(1,)](rows, scales, team.local(N, torch.float32), landed.view, team.view, N)
    team.copy_engine.join()
    team.barrier()


@triton.jit
def sum_pairs(y, sums, K: tl.constexpr, N: tl.constexpr):
    """sums[t] = sum of the K rows of token t in a slab of columns"""
    at, total = tl.arange(0, N), tl.zeros((N,), tl.float32)
    for j in tl.static_range(K):
        total += tl.load(y + (tl.program_id(0) * K + j) * N + at)
    tl.store(sums + tl.program_id(0) * N + at, total)  # here


@exhibit("race", "sums, argument of sum_pairs", "a slab of columns is sent to the tokens' rank before its pairs are summed",
         sum_pairs)  # fmt: skip
def slab_sent_before_its_sums(team, bug):
    tokens, slabs, k = 2, 2, 2
    received, landed = team.zeros((slabs, tokens, N), torch.float32, name="received"), team.channel(slabs)
    y, sums = team.local((tokens * k, N), torch.float32), team.local((slabs, tokens, N), torch.float32)
    landed.begin()
    team.copy_engine.fork()
    for slab in range(slabs):
        sum_pairs[(tokens,)](y, sums[slab], k, N)
        if not bug:
            team.copy_engine.fork()
        landed.send(received[slab], sums[slab], 1 - team.rank, slab)  # here
    team.barrier()

"""Bugs of sums that leave by copy engine piece by piece, and of rows that arrive beside a kernel's stores."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit

PIECES, TOKENS = 2, 4


@triton.jit
def sum_piece(y, sums, TOKENS: tl.constexpr, N: tl.constexpr):
    """sums[TOKENS, N] = 2 * y"""
    at = tl.arange(0, TOKENS)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(sums + at, 2 * tl.load(y + at))  # written


@triton.jit
def add_tile(received, out, landed, team, first, TOKENS: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """out[t] = received[t] of TOKENS tokens from ``first`` on, which may lie in two pieces of TOKENS"""
    last = first if BUG else first + TOKENS - 1
    wl.chunk_wait(wl.current_call(landed), 1 - wl.rank(team), last // TOKENS, team)
    at = (first + tl.arange(0, TOKENS)[:, None]) * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.load(received + at))  # here


def buffers(team):
    """(received, its channel, y, sums, out) of two pieces of tokens."""
    received = team.zeros((PIECES * TOKENS, N), torch.float32, name="received")
    y, sums, out = (team.local((PIECES * TOKENS, N), torch.float32) for _ in range(3))
    return received, team.channel(PIECES, name="landed"), y, sums, out


@exhibit("race", "received", "a tile of tokens of two pieces waits for the piece of its first token", add_tile)
def tile_of_two_pieces(team, bug):
    received, landed, y, sums, out = buffers(team)
    landed.begin()
    for number in range(PIECES):
        piece = slice(number * TOKENS, (number + 1) * TOKENS)
        sum_piece[(1,)](y[piece], sums[piece], TOKENS, N)
        team.copy_engine.fork()
        landed.send(received[piece], sums[piece], 1 - team.rank, number)  # here
    add_tile[(1,)](received, out, landed.view, team.view, TOKENS // 2, TOKENS, N, bug)
    team.copy_engine.join()
    team.barrier()


@exhibit("race", "received", "the flag of a piece is sent before its sums", add_tile)
def piece_behind_its_flag(team, bug):
    received, landed, y, sums, out = buffers(team)
    piece, other = slice(0, TOKENS), 1 - team.rank
    landed.begin()
    sum_piece[(1,)](y[piece], sums[piece], TOKENS, N)
    team.copy_engine.fork()
    if bug:
        team.copy_engine.signal(landed.signals[team.rank, :1], landed.epoch[:1], other)
        team.copy_engine.put(received[piece], sums[piece], other)  # here
    else:
        landed.send(received[piece], sums[piece], other, 0)
    add_tile[(1,)](received, out, landed.view, team.view, 0, TOKENS, N, False)
    team.copy_engine.join()
    team.barrier()


@exhibit("race", "sums, argument of sum_piece", "a piece's sums are written over sums that the copy engine still sends",
         sum_piece, mark="written")  # fmt: skip
def sums_of_the_next_piece(team, bug):
    received, landed, y, sums, out = buffers(team)
    landed.begin()
    for number in range(PIECES):
        piece = slice(number * TOKENS, (number + 1) * TOKENS)
        mine = sums[:TOKENS] if bug else sums[piece]
        sum_piece[(1,)](y[piece], mine, TOKENS, N)
        team.copy_engine.fork()
        landed.send(received[piece], mine, 1 - team.rank, number)  # written
    add_tile[(1,)](received, out, landed.view, team.view, TOKENS // 2, TOKENS, N, False)
    team.copy_engine.join()
    team.barrier()


@triton.jit
def store_scale(scales, team):
    """scales[me] = 1 at the other rank"""
    tl.store(wl.symm_at(scales, 1 - wl.rank(team), team) + wl.rank(team), 1.0)  # scale


@triton.jit
def read_row(rows, scales, out, landed, team, N: tl.constexpr):
    """out = row of the other rank, times its scale"""
    other, at = 1 - wl.rank(team), tl.arange(0, N)
    wl.chunk_wait(wl.current_call(landed), other, 0, team)
    tl.store(out + at, tl.load(rows + other * N + at) * tl.load(scales + other))  # scale


@exhibit("race", "scales", "a kernel stores scales at a peer, and the copy engine whose flag covers them was forked before it",
         store_scale, read_row, mark="scale")  # fmt: skip
def scales_behind_the_fork(team, bug):
    rows, landed = team.zeros((team.size, N), torch.float32, name="rows"), team.channel(1, name="landed")
    scales = team.zeros(team.size, torch.float32, name="scales")
    row, out = team.local(N, torch.float32), team.local(N, torch.float32)
    landed.begin()
    if bug:
        team.copy_engine.fork()
    store_scale[(1,)](scales, team.view)
    if not bug:
        team.copy_engine.fork()
    landed.send(rows[team.rank], row, 1 - team.rank, 0)
    read_row[(1,)](rows, scales, out, landed.view, team.view, N)
    team.copy_engine.join()
    team.barrier()

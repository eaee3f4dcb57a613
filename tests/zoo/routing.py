"""Bugs of a mixture of experts: rows that go to the ranks of their experts, and partial sums that come back.

Rank r holds expert r, and a token chooses one expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit

TOKENS = 4


class Mail(NamedTuple):
    """Receive buffers [W, TOKENS, N] and [W, TOKENS], and their flags."""

    rows: torch.Tensor
    ids: torch.Tensor
    arrived: torch.Tensor
    entered: torch.Tensor
    epoch: torch.Tensor


@triton.jit
def send_rows(x, ids, T, mail, team, TOKENS: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Send row t of this rank's T tokens to the rank of its expert, and all choices to every rank."""
    me, now = wl.rank(team), wl.next_epoch(mail.epoch)
    world: tl.constexpr = wl.num_ranks(team)
    token, at = tl.arange(0, TOKENS), tl.arange(0, N)[None, :]
    if BUG != "too soon":
        for step in range(1, world):
            wl.notify(mail.entered + me, (me + step) % world, now, team)
        for step in range(1, world):
            wl.wait(mail.entered + (me + step) % world, now, team)
    chosen = tl.load(ids + token, mask=token < T, other=-1)
    row = tl.load(x + token[:, None] * N + at, mask=(token < T)[:, None], other=0.0)
    slot = me * TOKENS + token
    for step in range(1, world + 1):
        peer = (me + step) % world
        tl.store(wl.symm_at(mail.ids, peer, team) + slot, chosen)
        if BUG == "flag first":
            wl.notify(mail.arrived + me, peer, now, team)
        place = wl.symm_at(mail.rows, peer, team) + slot[:, None] * N + at
        tl.store(place, row, mask=(chosen == peer)[:, None])  # here
        if BUG == "only with tokens":
            if T > 0:
                wl.notify(mail.arrived + me, peer, now, team)
        elif BUG != "flag first":
            wl.notify(mail.arrived + me, peer, now, team)
    for step in range(1, world):
        wl.wait(mail.arrived + (me + step) % world, now, team)  # arrival
    wl.advance_epoch(mail.epoch, now)


@triton.jit
def multiply(rows, h, team, TOKENS: tl.constexpr, N: tl.constexpr):
    """h = 2 * rows, for a GEMM of all rows that may have arrived."""
    at = tl.arange(0, wl.num_ranks(team) * TOKENS)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(h + at, 2 * tl.load(rows + at))  # here


def layers(team, bug, count=1, tokens=TOKENS):
    """Dispatch and GEMM of each of ``count`` layers, with one receive buffer."""
    rows = team.zeros((team.size, TOKENS, N), torch.float32, name="rows")
    arrived, entered = (team.signals(team.size, name=name) for name in ("arrived", "entered"))
    mail = Mail(rows, team.zeros((team.size, TOKENS), torch.int32), arrived, entered, team.local(2, torch.int32))
    x, ids = team.local((TOKENS, N), torch.float32), torch.arange(TOKENS, dtype=torch.int32) % team.size
    h = team.local(rows.shape, torch.float32)
    for layer in range(count):
        x.fill_(layer + 1)
        send_rows[(1,)](x, ids, tokens, mail, team.view, TOKENS, N, bug)
        multiply[(1,)](rows, h, team.view, TOKENS, N)
    team.barrier()


@exhibit("race", "rows", "a token's choices are sent, then the flag, then its row", send_rows, multiply)
def flag_before_rows(team, bug):
    layers(team, "flag first" if bug else "")


@exhibit("deadlock", "arrived", "a rank without tokens sends no flags", send_rows, mark="arrival")
def no_tokens_no_flag(team, bug):
    layers(team, "only with tokens" if bug else "", tokens=TOKENS if team.rank == 0 else 0)


@exhibit(
    "race", "rows", "the next layer's dispatch writes over rows that a peer's GEMM still reads", send_rows, multiply
)
def rows_written_over(team, bug):
    layers(team, "too soon" if bug else "", count=2)


@triton.jit
def send_choices(ids, asked, arrived, team, TOKENS: tl.constexpr):
    me, token = wl.rank(team), tl.arange(0, TOKENS)
    for peer in range(wl.num_ranks(team)):
        tl.store(wl.symm_at(asked, peer, team) + me * TOKENS + token, tl.load(ids + token))  # here
        wl.notify(arrived + me, peer, 1, team)


@triton.jit
def count_pairs(asked, arrived, counts, team, TOKENS: tl.constexpr, BUG: tl.constexpr):
    """Number of tokens of each rank that chose this rank's expert."""
    for source in range(wl.num_ranks(team)):
        if not BUG:
            wl.wait(arrived + source, 1, team)
        chosen = tl.load(asked + source * TOKENS + tl.arange(0, TOKENS)) == wl.rank(team)  # here
        tl.store(counts + source, tl.sum(chosen.to(tl.int32), axis=0))


@exhibit("race", "asked", "a schedule is made of choices that may not have arrived", send_choices, count_pairs)
def schedule_before_the_choices(team, bug):
    asked, arrived = team.zeros((team.size, TOKENS), torch.int32, name="asked"), team.signals(team.size, name="arrived")
    send_choices[(1,)](torch.arange(TOKENS, dtype=torch.int32) % team.size, asked, arrived, team.view, TOKENS)
    count_pairs[(1,)](asked, arrived, team.local(team.size, torch.int32), team.view, TOKENS, bug)
    team.barrier()


@triton.jit
def combine(y, partials, arrived, out, team, N: tl.constexpr, BUG: tl.constexpr):
    """out = sum over the ranks of what each has for this rank's token    y [W, N], row r for rank r"""
    me, at = wl.rank(team), tl.arange(0, N)
    world: tl.constexpr = wl.num_ranks(team)
    for owner in range(world):
        tl.store(wl.symm_at(partials, owner, team) + me * N + at, tl.load(y + owner * N + at))  # here
        wl.notify(arrived + me, owner, 1, team)
    total = tl.zeros((N,), tl.float32)
    for source in range(world):
        if BUG:
            wl.wait(arrived, 1, team)
        else:
            wl.wait(arrived + source, 1, team)
        total += tl.load(partials + source * N + at)  # here
    tl.store(out + at, total)


@exhibit(
    "race", "partials", "a token's partial sums are added up after the first rank's have arrived", combine, world_size=3
)
def combined_before_the_last(team, bug):
    partials, arrived = team.zeros((team.size, N), torch.float32, name="partials"), team.signals(team.size)
    y, out = team.local((team.size, N), torch.float32), team.local(N, torch.float32)
    combine[(1,)](y.fill_(1.0), partials, arrived, out, team.view, N, bug)
    team.barrier()

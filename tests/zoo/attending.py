"""Bugs of an attention over ranks: parts that go to the owners of heads, and pages of a cache that is spread over ranks.

Rank r owns head r and holds every W-th page of the sequence. Values stand for keys too: a part is (sum, log of its weights).
"""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit


@triton.jit
def part_of(pages, table, tokens, part, N: tl.constexpr):
    """part = sum of this rank's ``tokens`` pages of N elements; not written if there are none."""
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for page in range(tokens):
        total += tl.load(pages + tl.load(table + page) * N + at)  # page
    if tokens > 0:
        tl.store(part + at, total)


@triton.jit
def push_by_flag(sums, logs, arrived, out, team, N: tl.constexpr, BUG: tl.constexpr):
    """Sums [W, N] and logs [W] of all ranks' parts of own head, under one flag."""
    me, at = wl.rank(team), tl.arange(0, N)
    world: tl.constexpr = wl.num_ranks(team)
    for owner in range(world):
        tl.store(wl.symm_at(sums, owner, team) + me * N + at, tl.full((N,), 1.0, tl.float32))
        if BUG:
            wl.notify(arrived + me, owner, 1, team)
        tl.store(wl.symm_at(logs, owner, team) + me, 0.5)  # here
        if not BUG:
            wl.notify(arrived + me, owner, 1, team)
    total = tl.zeros((N,), tl.float32)
    for source in range(world):
        wl.wait(arrived + source, 1, team)
        total += tl.load(sums + source * N + at) * tl.exp(tl.load(logs + source))  # here
    tl.store(out + at, total)


@exhibit("race", "log sums", "a part's flag is set before the log of its sum is stored", push_by_flag)
def flag_before_log_sum(team, bug):
    sums, logs = (
        team.zeros(shape, torch.float32, name=name)
        for shape, name in (((team.size, N), "sums"), (team.size, "log sums"))
    )
    push_by_flag[(1,)](sums, logs, team.signals(team.size), team.local(N, torch.float32), team.view, N, bug)
    team.barrier()


@triton.jit
def push_words(part, words, out, team, N: tl.constexpr, WRONG_OWNER: tl.constexpr, UNMASKED: tl.constexpr, tokens):
    """out = sum over ranks of their parts of own head. words [heads, W, N], unwritten at first"""
    me, at = wl.rank(team), tl.arange(0, N)
    world: tl.constexpr = wl.num_ranks(team)
    if UNMASKED:
        mine = tl.load(part + at)  # load
    else:
        mine = tl.load(part + at, mask=(at < N) & (tokens > 0), other=0.0)
    for head in range(world):
        owner = head
        if WRONG_OWNER:
            owner = (head + 1) % world
        wl.lamport_store(wl.symm_at(words, owner, team) + (head * world + me) * N + at, mine, at < N)
    total = tl.zeros((N,), tl.float32)
    for source in range(world):
        total += wl.lamport_load(words + (me * world + source) * N + at, at < N, team)  # words
    tl.store(out + at, total)


def attend(team, tokens, *, wrong_owner=False, unmasked=False, permuted=False):
    """Parts of ``tokens`` pages, pushed to the owners of heads."""
    pages = team.empty((4, N), torch.float32, name="pages")
    table = torch.tensor([1, 3], dtype=torch.int32)
    for page in table[:tokens].tolist():
        pages[page] = 1.0
    part, out = team.empty(N, torch.float32, name="part"), team.local(N, torch.float32)
    words = team.empty((team.size, team.size, N), torch.float32, name="words").fill_(-0.0)
    team.barrier()
    part_of[(1,)](pages, table.flip(0) if permuted else table, tokens, part, N)
    push_words[(1,)](part, words, out, team.view, N, wrong_owner, unmasked, tokens)
    team.barrier()


@exhibit("deadlock", "words", "a head's part is pushed to the rank after its owner", push_words, mark="words")
def part_to_the_wrong_owner(team, bug):
    attend(team, 1, wrong_owner=bug)


@exhibit(
    "uninitialised", "part", "a rank without tokens pushes a part that it did not compute", push_words, mark="load"
)
def part_of_no_tokens(team, bug):
    attend(team, team.rank, unmasked=bug)


@exhibit(
    "uninitialised", "pages", "tokens are read by another order of pages than they were written", part_of, mark="page"
)
def pages_permuted(team, bug):
    attend(team, 1, permuted=bug)

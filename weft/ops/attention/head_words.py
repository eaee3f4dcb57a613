"""Ranks' parts of an attention as Lamport words: pushed to each head's owner, merged there.

One hop, and the order of the ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.merged_parts import EMPTY, fold, merged, no_parts
from weft.runtime.arithmetic import next_power_of_2
from weft.transport.push import UNWRITTEN

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Elements of the words that a warp holds at a time: 32 registers a thread. Not measured.
HELD: tl.constexpr = tl.constexpr(1024)
# Heads, and warps, of a program that only merges.
MERGED_HEADS: tl.constexpr = tl.constexpr(4)
MERGE_WARPS: tl.constexpr = tl.constexpr(4)
LN_2: tl.constexpr = tl.constexpr(math.log(2))


class HeadWords(NamedTuple):
    """Receive buffers of calls with the same heads.

    Place b * held + j: head j of sequence b that comes here.

    means     fp32 [2, W, places, D], symmetric: [half, s] written by rank s; unwritten at first
    log_sums  fp32 [2, W, places], symmetric, in the same places
    halves    int32 [pairs], this rank's: half of the next call, for each sequence and KV head
    """

    means: torch.Tensor
    log_sums: torch.Tensor
    halves: torch.Tensor


class HeadSizes(NamedTuple):
    """Sizes of ``HeadWords``, a compile-time constant.

    group     query heads of a KV head; kv_heads: of all
    own       heads of a rank
    places    sequences of the buffers times ``held``
    nodes     of the team; node: this one. The kernels run within it: heads of rank (k, l) come to rank (node, l)
    """

    group: int
    kv_heads: int
    own: int
    places: int
    nodes: int = 1
    node: int = 0

    @property
    def held(self) -> int:
        """Heads that come to a rank: the ones it owns, and the ones of equal local rank in other nodes."""
        return self.nodes * self.own

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, batch: int, world_size: int, nodes: int = 1, node: int = 0) -> HeadSizes:
        own = q_heads // world_size
        places = next_power_of_2(batch) * nodes * own
        return cls(q_heads // kv_heads, kv_heads, own, places, nodes, node)


@triton.constexpr_function
def at_once(elements, world_size, warps):
    """Number of ranks whose words, ``elements`` of each, a program holds at a time; a power of two."""
    return max(1, min(triton.next_power_of_2(world_size), warps * HELD.value // elements))


@triton.jit
def places_of_words(half, words, team, ROWS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TO_SELF: tl.constexpr):
    """Places of the words of pair program_id(0) at its heads' owners.

    Returns (pointers to the means [ROWS], pointers to the log sums [ROWS], mask [ROWS]). The first HEADS.group rows exist.
    TO_SELF: also the heads that this rank owns
    """
    world: tl.constexpr = wl.num_ranks(team)
    row = tl.arange(0, ROWS)
    owner, place = owner_of(row, world, HEADS)
    there = row < HEADS.group
    if not TO_SELF:
        there &= owner != wl.rank(team)
    at = ((half * world + wl.rank(team)) * HEADS.places + place).to(tl.int64)
    return wl.symm_at(words.means, owner, team) + at * D, wl.symm_at(words.log_sums, owner, team) + at, there


@triton.jit
def send_heads(mean, log_sum, places):
    """Push mean [ROWS, D] and log_sum [ROWS] to ``places_of_words``.

    log_sum  to the base 2; -inf: this rank has no token
    """
    means, log_sums, there = places
    columns = tl.arange(0, mean.shape[1])[None, :]
    wl.lamport_store(means[:, None] + columns, mean, there[:, None] & (columns >= 0))
    wl.lamport_store(log_sums, tl.where(log_sum == float("-inf"), EMPTY, log_sum), there)


@triton.jit
def exchange_of(pair, half, words, team, HEADS: tl.constexpr):
    """Pointer that names the exchange of a pair's words in a timeline, the same element at all ranks."""
    return words.log_sums + half * wl.num_ranks(team) * HEADS.places + pair


@triton.jit
def end_put_heads(began, D: tl.constexpr, half, words, team, HEADS: tl.constexpr):
    """Mark the end of ``send_heads`` for pair program_id(0), unless this rank owns all its heads."""
    world: tl.constexpr = wl.num_ranks(team)
    first, _ = owner_of(0, world, HEADS)
    last, _ = owner_of(HEADS.group - 1, world, HEADS)
    me = wl.rank(team)
    if (first != me) | (last != me):
        exchange = exchange_of(tl.program_id(0), half, words, team, HEADS)
        wl.end_put(began, exchange, 4 * HEADS.group * (D + 1), tl.where(first == last, first, me), team)


@triton.jit
def owner_of(row, world, HEADS: tl.constexpr):
    """(owner, place at the owner) of the query heads ``row`` of pair program_id(0)."""
    pair = tl.program_id(0)
    head = pair % HEADS.kv_heads * HEADS.group + row
    # Rows that fill up a tile may lie beyond the last head.
    if HEADS.nodes > 1:
        owner, sequence = tl.minimum(head // HEADS.own, HEADS.nodes * world - 1), pair // HEADS.kv_heads
        return owner % world, (sequence * HEADS.nodes + owner // world) * HEADS.own + head % HEADS.own
    else:
        return tl.minimum(head // HEADS.own, world - 1), pair // HEADS.kv_heads * HEADS.own + head % HEADS.own


@triton.jit
def receive_heads(
    mean, log_sum, place, wanted, half, pair, words, team, HEADS: tl.constexpr, LOCAL: tl.constexpr, WARPS: tl.constexpr
):
    """State (``merged_parts.fold``) of the parts of all ranks, in rank order, of the rows ``wanted``.

    Words are cleared after the read.

    place      [ROWS], of the rows; wanted: mask [ROWS]; pair: that of the first row
    LOCAL      this rank's part is (mean, log_sum), and no words; else all parts are words, and these two are not used
    """
    ROWS: tl.constexpr = mean.shape[0]
    D: tl.constexpr = mean.shape[1]
    world: tl.constexpr = wl.num_ranks(team)
    HELD_RANKS: tl.constexpr = at_once(ROWS * D, world, WARPS)
    me, index = wl.rank(team), tl.arange(0, HELD_RANKS)
    state = no_parts(ROWS, D)
    for first in tl.static_range(0, world, HELD_RANKS):
        source = first + index
        sent = source < world
        if LOCAL:
            sent &= source != me
        there = sent[:, None] & wanted[None, :]
        at = ((half * world + source)[:, None] * HEADS.places + place[None, :]).to(tl.int64)
        columns = tl.arange(0, D)[None, None, :]
        cells, of_cells = words.means + (at * D)[:, :, None] + columns, there[:, :, None] & (columns >= 0)
        sums = words.log_sums + at
        exchange = exchange_of(pair, half, words, team, HEADS)
        means, log_sums = wl.lamport_load_keyed(cells, of_cells, sums, there, team, exchange)
        # All threads have loaded them: the load ends with a CTA barrier.
        wl.lamport_clear(cells, of_cells)
        wl.lamport_clear(sums, there)
        for i in tl.static_range(HELD_RANKS):
            if first + i < world:
                # Each rank's part alone: a sum over all parts would have an order of the compiler's choice.
                part = tl.sum(tl.where((index == i)[:, None, None], means, 0.0), axis=0)
                of_part = tl.sum(tl.where((index == i)[:, None], log_sums, 0.0), axis=0)
                if LOCAL:
                    part = tl.where(me == first + i, mean, part)
                    of_part = tl.where(me == first + i, log_sum, of_part)
                state = fold(state, part, of_part, 1.0)
    return state


@triton.jit
def merge_heads_kernel(out, lse, words, team, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """out[b, j, :] = parts of all ranks for head j of sequence b that comes here, merged in rank order

    grid: (B, cdiv(held, ROWS))

    out [B, held, D]; lse [B, held] fp32: natural log of the sum of weights, or None; words, HEADS: ``HeadWords``, ``HeadSizes``

    waits     words of every rank, this one included, which the attention kernels of this call push. Those wait for no program,
              so no program here has to be resident together with another
    reuse     words are cleared as they are read (``sharded_attention_kernel``)
    """
    sequence, first = tl.program_id(0), tl.program_id(1) * ROWS
    head, columns = first + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    wl.follow_previous_kernel()
    # The attention kernel before this one has moved on to the next call's half.
    half = 1 - tl.load(words.halves + sequence * HEADS.kv_heads)
    held = HEADS.nodes * HEADS.own
    place, wanted = sequence * held + head, head < held
    none, nothing = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
    if HEADS.nodes > 1:
        of_all = (first // HEADS.own * wl.num_ranks(team) + wl.rank(team)) * HEADS.own + first % HEADS.own
    else:
        of_all = wl.rank(team) * HEADS.own + first
    pair = sequence * HEADS.kv_heads + of_all // HEADS.group
    state = receive_heads(none, nothing, place, wanted, half, pair, words, team, HEADS, False, MERGE_WARPS)
    target = out + (place.to(tl.int64) * D)[:, None] + columns
    tl.store(target, merged(state).to(out.dtype.element_ty), mask=wanted[:, None])
    if lse is not None:
        largest, total, _ = state
        log_sum = tl.where(total == 0, float("-inf"), largest + tl.log2(total))
        tl.store(lse + place.to(tl.int64), log_sum * LN_2, mask=wanted)


def words_of(team: Team, sizes: HeadSizes, D: int, *, fused: bool) -> tuple[HeadWords, torch.Tensor]:
    """The team's ``HeadWords`` and arrival counters (``Partials``) for these sizes.

    Collective at the first call, which makes them.

    fused  of the design of one kernel; the designs count their calls apart
    """

    def make() -> tuple[HeadWords, torch.Tensor]:
        shape = 2, team.size, sizes.places
        means = team.empty((*shape, D), torch.float32, name="means of ranks")
        log_sums = team.empty(shape, torch.float32, name="log sums of ranks")
        word, bits = UNWRITTEN[4]
        for x in (means, log_sums):
            x.view(word).fill_(bits)
        halves, arrivals = team.local((2, sizes.places // sizes.held * sizes.kv_heads), torch.int32)
        team.barrier()  # no rank writes into a peer's buffer before the peer has cleared it
        return HeadWords(means, log_sums, halves), arrivals

    return team.workspace(("head words", sizes, D, fused), make)

"""Kernel of the exchange of attention heads for tokens."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.transport.exchange import exchange_tiles
from weft.transport.push import (
    clears_in_order,
    count_tiles,
    is_rank,
    is_sent,
    keep_epoch,
    my_slot,
    send_order,
    tile_rest,
)


class Part(NamedTuple):
    """One tensor of an exchange, in words.

    x, out   by token [T, W * width], part p in columns p * width .., and by head [all tokens, width], part s in the rows of
             rank s's tokens; which is which: TO_HEADS
    strides  from one row to the next
    """

    x: torch.Tensor
    out: torch.Tensor
    x_stride: int
    out_stride: int


@triton.jit
def tokens_of(rank, n, ranges, EVEN: tl.constexpr):
    """(first token, tokens) of ``rank``, int64. With EVEN every rank has n, else ranges[rank]."""
    if EVEN:
        count = tl.cast(n, tl.int64) + tl.zeros_like(rank)
        return rank * count, count
    else:
        return tl.load(ranges + 2 * rank).to(tl.int64), tl.load(ranges + 2 * rank + 1).to(tl.int64)


@triton.jit
def place_of_part(rank, stride, n, ranges, team, WIDTH: tl.constexpr, BY_HEAD: tl.constexpr, EVEN: tl.constexpr):
    """(offset, words) of the part of ``rank``, int64: a scalar or a block."""
    if BY_HEAD:
        first, count = tokens_of(rank, n, ranges, EVEN)
        return first * stride, count * WIDTH
    else:
        _, count = tokens_of(wl.rank(team), n, ranges, EVEN)
        return rank.to(tl.int64) * WIDTH, count * WIDTH + tl.zeros_like(rank)


@triton.constexpr_function
def common_factor(width, block):
    return math.gcd(width, block)


@triton.jit
def word_at(start, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets [1, BLOCK] of words ``start`` (int64) and on of a part whose rows are ``stride`` apart."""
    # The compiler does not see that a tile begins at a multiple of both, which lets a thread move 16 bytes at once.
    first = tl.multiple_of((start % WIDTH).to(tl.int32), common_factor(WIDTH, BLOCK))
    at = first + tl.arange(0, BLOCK)[None, :]
    return (start // WIDTH + at // WIDTH) * stride + at % WIDTH


class Message(NamedTuple):
    """Message of ``exchange_tiles``: one part, with rows of WIDTH words.

    own       (offset, words) in ``x`` of what this rank keeps
    arriving  (offset, words) in ``out`` of what comes from each rank, [ROWS, 1]
    """

    part: Part
    own: tl.tensor
    arriving: tl.tensor
    n: tl.tensor
    ranges: tl.tensor
    WIDTH: tl.constexpr
    TO_HEADS: tl.constexpr
    EVEN: tl.constexpr


@triton.jit
def part_for_each(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, BLOCK] words of a tile of each peer's part of ``x``, zeros beyond its end."""
    x_stride = message.part.x_stride
    WIDTH: tl.constexpr = message.WIDTH
    peers, start = send_order(team, ROWS)[:, None], tl.cast(tile, tl.int64) * BLOCK
    offset, length = place_of_part(
        peers, x_stride, message.n, message.ranges, team, WIDTH, not message.TO_HEADS, message.EVEN
    )
    inside = tl.arange(0, BLOCK)[None, :] < tile_rest(length, start, BLOCK)
    rows = message.part.x + offset + word_at(start, x_stride, BLOCK, WIDTH)
    return tl.load(rows, mask=is_sent(team, ROWS) & inside, other=0)


@triton.jit
def own_part(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] words of a tile of this rank's part of ``x``."""
    start = tl.cast(tile, tl.int64) * BLOCK
    own = message.part.x + message.own[0] + word_at(start, message.part.x_stride, BLOCK, message.WIDTH)
    inside = tl.arange(0, BLOCK)[None, :] < tile_rest(message.own[1], start, BLOCK)
    return tl.reshape(tl.load(own, mask=inside, other=0), (BLOCK,))


@triton.jit
def store_part(received, message, tile, team):
    """Store a tile of each rank's part to ``out``."""
    ROWS: tl.constexpr = received.shape[0]
    BLOCK: tl.constexpr = received.shape[1]
    start = tl.cast(tile, tl.int64) * BLOCK
    place = message.part.out + message.arriving[0] + word_at(start, message.part.out_stride, BLOCK, message.WIDTH)
    inside = tl.arange(0, BLOCK)[None, :] < tile_rest(message.arriving[1], start, BLOCK)
    tl.store(place, received.to(message.part.out.dtype.element_ty), mask=is_rank(team, ROWS) & inside)


@triton.jit(do_not_specialize=["n"])
def exchange_heads_kernel(
    parts,  # of Part
    like,  # a tensor of parts, which gives the dtype
    n,
    buffer,  # Slots, in the dtype of the words
    epochs,
    team,
    ranges,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    WIDTHS: tl.constexpr,
    TO_HEADS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """out[first token of s + t, :] = x[t, my columns] of rank s, or the way back, for each of ``parts``

    grid     (programs,), each over every programs-th tile of BLOCK words of a part, the parts' tiles one after the other

    n        most tokens of a rank; parts of fewer have as many tiles, which are zeros at the end
    ranges   int32 [W, 2]: (first token, tokens) of each rank; unused if EVEN
    WIDTHS   words of a token's row in a part, for each of ``parts``
    TO_HEADS ``x`` is by token and ``out`` by head, else the other way (Part)

    One send and receive a tile; signals, waits, order, progress: weft.transport.exchange. n and WIDTHS are equal on all ranks,
    and so are a program's tiles and their order, which is what equal epochs need.

    every rank   | push tile 0, one row to each | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    me = wl.rank(team)
    ranks = tl.minimum(tl.arange(0, ROWS), wl.num_ranks(team) - 1)[:, None]
    total = 0
    for i in tl.static_range(len(WIDTHS)):
        total += count_tiles(tl.cast(n, tl.int64) * WIDTHS[i], BLOCK)
    ordered = clears_in_order(slot, tl.cdiv(total, programs), BLOCK)
    before = 0
    for i in tl.static_range(len(WIDTHS)):
        part = parts[i]
        tiles = count_tiles(tl.cast(n, tl.int64) * WIDTHS[i], BLOCK)
        # The tile after the last one of the part before is the next program's.
        begin = (program + programs - before % programs) % programs
        own = place_of_part(me, part.x_stride, n, ranges, team, WIDTHS[i], not TO_HEADS, EVEN)
        arriving = place_of_part(ranks, part.out_stride, n, ranges, team, WIDTHS[i], TO_HEADS, EVEN)
        if begin < tiles:
            epoch = exchange_tiles(
                Message(part, own, arriving, n, ranges, WIDTHS[i], TO_HEADS, EVEN),
                begin,
                tiles,
                slot,
                epoch,
                ordered,
                team,
                part_for_each,
                own_part,
                store_part,
                BLOCK,
                ROWS,
                TRANSPORT,
            )
        before += tiles
    keep_epoch(epochs, epoch - 1)

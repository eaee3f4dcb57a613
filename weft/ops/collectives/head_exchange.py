"""Kernel of the exchange of attention heads for tokens."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.transport.push import (
    clears_in_order,
    count_tiles,
    is_rank,
    is_sent,
    keep_epoch,
    my_slot,
    receive,
    send,
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


@triton.jit
def send_part(
    part,
    n,
    ranges,
    tile,
    slot,
    epoch,
    team,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    TO_HEADS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Send ``tile`` of each peer's part of ``part.x`` to it, zeros beyond its end."""
    peers = send_order(team, ROWS)[:, None]
    start = tl.cast(tile, tl.int64) * BLOCK
    offset, length = place_of_part(peers, part.x_stride, n, ranges, team, WIDTH, not TO_HEADS, EVEN)
    inside = tl.arange(0, BLOCK)[None, :] < tile_rest(length, start, BLOCK)
    rows = part.x + offset + word_at(start, part.x_stride, BLOCK, WIDTH)
    rows = tl.load(rows, mask=is_sent(team, ROWS) & inside, other=0)
    send(rows.to(slot.dtype.element_ty), slot, epoch, team, TRANSPORT, BLOCK)


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

    One send and receive a tile; signals, order, reuse: weft.transport.push. n and WIDTHS are equal on all ranks, and so are
    a program's tiles and their order, which is what equal epochs need.

    every rank   | push tile 0, one row to each | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    me = wl.rank(team)
    ranks = tl.minimum(tl.arange(0, ROWS), wl.num_ranks(team) - 1)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
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
        if begin < tiles:
            send_part(part, n, ranges, begin, slot, epoch, team, WIDTHS[i], BLOCK, ROWS, TRANSPORT, TO_HEADS, EVEN)
        mine, my_words = place_of_part(me, part.x_stride, n, ranges, team, WIDTHS[i], not TO_HEADS, EVEN)
        offset, length = place_of_part(ranks, part.out_stride, n, ranges, team, WIDTHS[i], TO_HEADS, EVEN)
        for tile in range(begin, tiles, programs):
            if tile + programs < tiles:
                send_part(
                    part,
                    n,
                    ranges,
                    tile + programs,
                    slot,
                    epoch + 1,
                    team,
                    WIDTHS[i],
                    BLOCK,
                    ROWS,
                    TRANSPORT,
                    TO_HEADS,
                    EVEN,
                )
            start = tl.cast(tile, tl.int64) * BLOCK
            own = part.x + mine + word_at(start, part.x_stride, BLOCK, WIDTHS[i])
            own = tl.load(own, mask=columns < tile_rest(my_words, start, BLOCK), other=0)
            own = tl.reshape(own, (BLOCK,)).to(buffer.dtype.element_ty)
            received = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, BLOCK)
            place = part.out + offset + word_at(start, part.out_stride, BLOCK, WIDTHS[i])
            inside = is_rank(team, ROWS) & (columns < tile_rest(length, start, BLOCK))
            tl.store(place, received.to(part.x.dtype.element_ty), mask=inside)
            epoch += 1
        before += tiles
    keep_epoch(epochs, epoch - 1)

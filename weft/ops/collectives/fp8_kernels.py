"""Kernel of all_reduce whose rows travel in fp8, in one hop or two."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS
from weft.kernels.fp8_words import group_place, sum_in_order, values_of, words_of
from weft.transport.fp8_push import receive_groups, send_groups, send_to_all
from weft.transport.push import clears_in_order, keep_epoch, my_slot, send_order


@triton.jit
def fp8_all_reduce_kernel(
    x,  # [n], rows of ``width`` columns
    out,  # [n]
    n,
    buffer,  # Slots, int32
    epochs,
    team,
    width,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    TWO_SHOT: tl.constexpr,
):
    """out = sum over ranks of r(x_s), in fp32 from rank 0 on; TWO_SHOT: r(that sum); rounded to out

    r  put in fp8 and read back (weft.kernels.fp8_words)

    grid  (programs,), each over every programs-th tile: BLOCK / 128 groups of columns, or TWO_SHOT W times as many, part s
          added up by rank s

    A rank reads back the words that it sends, so all ranks add the same values. Signals, order, reuse: weft.transport.push, one
    ahead or in two shots. Groups beyond the last are sent as zeros, so that whole rows are sent.

    one shot   | push 0 to all | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
    TWO_SHOT   | push 0 | push 1 | receive, sum 0 | push sum 0 | receive, store 0 | push 2 | receive, sum 1 | ...
    """
    GROUPS: tl.constexpr = BLOCK // COLUMNS
    OF_TILE: tl.constexpr = GROUPS * (wl.num_ranks(team) if TWO_SHOT else 1)
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK // 4, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    end = tl.cast(n, tl.int64)
    tiles = tl.cdiv(tl.cast(end // width, tl.int32) * tl.cdiv(width, COLUMNS), OF_TILE)
    rounds = tl.cdiv(tiles, programs)
    ranks, groups = tl.arange(0, ROWS), tl.arange(0, GROUPS)
    if TWO_SHOT:
        ordered = clears_in_order(slot, 2 * rounds, BLOCK // 4)
        parts, before, following = epoch, epoch - 1, epoch + 1
        send_parts(x, end, width, program, slot, parts, team, BLOCK, ROWS)
        for tile in range(program, tiles, programs):
            next_parts = following
            if tile + programs < tiles:
                send_parts(x, end, width, tile + programs, slot, next_parts, team, BLOCK, ROWS)
                following += 1
            words, scales = packed(x, tile * OF_TILE + wl.rank(team) * GROUPS + groups, end, width)
            all_words, all_scales = receive_groups(words, scales, slot, parts, before, team, ordered, ROWS)
            words, scales = words_of(sum_in_order(all_words, all_scales, wl.num_ranks(team)))
            send_to_all(words, scales, slot, following, team, ROWS)
            all_words, all_scales = receive_groups(words, scales, slot, following, parts, team, ordered, ROWS)
            values = values_of(all_words.reshape(ROWS * BLOCK // 4), all_scales.reshape(ROWS * GROUPS))
            at, inside = group_place(of_parts(tile, ranks, GROUPS, team), end, width)
            of_rank = tl.broadcast_to((ranks < wl.num_ranks(team))[:, None], (ROWS, GROUPS)).reshape(ROWS * GROUPS, 1)
            tl.store(out + at, values.to(out.dtype.element_ty), mask=inside & of_rank)
            parts, before = next_parts, following
            following += 1
        keep_epoch(epochs, before)
    else:
        ordered = clears_in_order(slot, rounds, BLOCK // 4)
        words, scales = send_tile(x, end, width, program, slot, epoch, team, BLOCK, ROWS)
        for tile in range(program, tiles, programs):
            own_words, own_scales = words, scales
            if tile + programs < tiles:
                words, scales = send_tile(x, end, width, tile + programs, slot, epoch + 1, team, BLOCK, ROWS)
            all_words, all_scales = receive_groups(own_words, own_scales, slot, epoch, epoch - 1, team, ordered, ROWS)
            at, inside = group_place(tile * OF_TILE + groups, end, width)
            total = sum_in_order(all_words, all_scales, wl.num_ranks(team))
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
            epoch += 1
        keep_epoch(epochs, epoch - 1)


@triton.jit
def packed(x, group, end, width):
    """(words, scales) of these groups of x [end]."""
    at, inside = group_place(group, end, width)
    return words_of(tl.load(x + at, mask=inside, other=0.0))


@triton.jit
def of_parts(tile, ranks, GROUPS: tl.constexpr, team):
    """Groups [ROWS * GROUPS] of the parts of ``ranks`` [ROWS] of a tile of W * GROUPS."""
    group = (tile * wl.num_ranks(team) + ranks)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    return group.reshape(ranks.shape[0] * GROUPS)


@triton.jit
def send_parts(x, end, width, tile, slot, epoch, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Send part s of a tile of W * BLOCK columns to rank s."""
    GROUPS: tl.constexpr = BLOCK // COLUMNS
    words, scales = packed(x, of_parts(tile, send_order(team, ROWS), GROUPS, team), end, width)
    send_groups(words.reshape(ROWS, BLOCK // 4), scales.reshape(ROWS, GROUPS), slot, epoch, team)


@triton.jit
def send_tile(x, end, width, tile, slot, epoch, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Send a tile to all ranks; returns its (words, scales)."""
    GROUPS: tl.constexpr = BLOCK // COLUMNS
    words, scales = packed(x, tile * GROUPS + tl.arange(0, GROUPS), end, width)
    send_to_all(words, scales, slot, epoch, team, ROWS)
    return words, scales

"""Kernel of all_reduce_rms_norm, with its arguments and its workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, Fp8Rows, store_rows
from weft.kernels.fp8_words import sum_in_order, values_of, words_of
from weft.kernels.pair_sums import sum_of_pairs
from weft.kernels.partial_sums import rounded_sum
from weft.kernels.rms_norm import norm as rms_norm
from weft.kernels.rms_norm import squares_of, sum_of_rows
from weft.kernels.slices import node_of, node_of_ranks
from weft.runtime.team.team import Team
from weft.transport.fp8_push import receive_groups, send_groups, send_to_all
from weft.transport.plans import PushPlan
from weft.transport.push import (
    STAGES,
    UNWRITTEN,
    clears_in_order,
    is_rank,
    is_sent,
    keep_epoch,
    my_slot,
    receive,
    send,
    send_order,
    slots_of,
    sum_of_ranks,
)


class Summands(NamedTuple):
    """Summands of this rank's x, added up in order; passed to the kernel as the argument ``x``.

    A PairSum may take its place.

    first   [n, WIDTH]; fp32 if there are several, but of hidden's dtype in a TREE, where they are neighbouring nodes
    stride  elements from one summand to the next
    count   of summands, a compile-time constant
    ids     None: the choices of a PairSum
    """

    first: torch.Tensor
    stride: int
    count: tl.constexpr
    ids: None = None


class Norm(NamedTuple):
    """Tensors of the norm, passed to the kernel as the argument ``norm``.

    normed    [n, WIDTH]  output
    residual  [n, WIDTH]
    weight    [WIDTH]
    eps       added to the mean square
    squares   sums of squares: receive buffers of sum_over_parts; DEFERRED: [n, parts], output
    counts    [programs]: calls of each; DEFERRED: unused
    fp8       ``Fp8Rows`` of ``normed`` in e4m3, in parts of whole groups, which may have rows of hidden's dtype beside; None:
              ``normed`` has that dtype
    """

    normed: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    squares: torch.Tensor
    counts: torch.Tensor
    fp8: Fp8Rows | None = None


@triton.jit
def sum_over_parts(x, sums, count, PARTS: tl.constexpr, team, ROWS: tl.constexpr, TREE: tl.constexpr):
    """Sum of ``x`` [ROWS] fp32, not negative, over the PARTS programs of these rows; the same bits in all.

    Programs are numbered by row, then part.
    sums   fp32 [programs, STAGES, ROWS, PARTS], unwritten at first; [p] is the receive buffer of program p: the programs of its
           row write it, and only p clears it
    count  calls of this program, this one included
    TREE   parts are added as of ``sum_of_rows``
    reuse  the programs take turns, so three stages would suffice (weft.language.lamport): a program that sends count + 1 has
           received ``count`` from all other programs, which they sent after they had cleared count - 2
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(PARTS)
    SIZE: tl.constexpr = ROWS * PARTS
    program = tl.program_id(0)
    part = program % PARTS
    parts, rows = tl.arange(0, BLOCK), tl.arange(0, ROWS)[:, None]
    there = (parts < PARTS)[None, :] & (rows >= 0)
    now, before = count % STAGES * SIZE, (count + STAGES - 1) % STAGES * SIZE
    sent = sums + (program - part + parts)[None, :] * (STAGES * SIZE) + now + rows * PARTS + part
    wl.lamport_store(sent, tl.broadcast_to(x[:, None], (ROWS, BLOCK)), there)
    arriving = sums + program * (STAGES * SIZE) + rows * PARTS + parts[None, :]
    return sum_of_rows(wl.lamport_receive(arriving + now, arriving + before, there, team), TREE)


@triton.jit
def summed(
    x,
    place,
    row,
    column,
    there,
    exists,
    WIDTH: tl.constexpr,
    dtype: tl.constexpr,
    UNROLLED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Elements of this rank's x at ``row`` (int64) and ``column``, rounded to ``dtype``.

    x  ``Summands`` or ``PairSum``; place: row * WIDTH + column; there, exists: masks of elements, of rows
    """
    if TREE:
        return node_of(x.first + place, there, x.stride, x.count, True, dtype).to(dtype)
    elif x.ids is None:
        return rounded_sum(x.first + place, there, x.stride, x.count, dtype)
    else:
        return sum_of_pairs(x, row, column, there, exists, WIDTH, dtype, UNROLLED)


@triton.jit
def over_ranks(received, TREE: tl.constexpr):
    """Sum of the ranks' rows [ROWS, BLOCK], fp32; in a TREE the node above them."""
    if TREE:
        return node_of_ranks(received)
    else:
        return sum_of_ranks(received)


@triton.jit
def send_rows(rows, slot, epoch, team):
    """Send row i of ``rows`` [ROWS, BLOCK] in fp8 to ``send_order(team)[i]``."""
    ROWS: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = rows.shape[1] // COLUMNS
    words, scales = words_of(rows.reshape(ROWS * GROUPS, COLUMNS))
    send_groups(words.reshape(ROWS, rows.shape[1] // 4), scales.reshape(ROWS, GROUPS), slot, epoch, team)


@triton.jit
def sums_in_fp8(own, slot, epoch, team, ordered, ROWS: tl.constexpr):
    """Sums [ROWS, BLOCK] of the ranks' rows, fp32; this rank's one, of ``own`` [BLOCK], is sent too."""
    BLOCK: tl.constexpr = own.shape[0]
    GROUPS: tl.constexpr = BLOCK // COLUMNS
    words, scales = words_of(own.reshape(GROUPS, COLUMNS))
    words, scales = receive_groups(words, scales, slot, epoch, epoch - 1, team, ordered, ROWS)
    words, scales = words_of(sum_in_order(words, scales, wl.num_ranks(team)))
    send_to_all(words, scales, slot, epoch + 1, team, ROWS)
    words, scales = receive_groups(words, scales, slot, epoch + 1, epoch, team, ordered, ROWS)
    return values_of(words.reshape(ROWS * BLOCK // 4), scales.reshape(ROWS * GROUPS)).reshape(ROWS, BLOCK)


@triton.jit
def all_reduce_rms_norm_kernel(
    x,  # Summands or PairSum
    hidden,  # [n, WIDTH], output: the sum with the residual
    n,
    buffer,  # Slots, in hidden's dtype, or int32
    epochs,
    team,
    norm,  # Norm
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    DEFERRED: tl.constexpr,
    TREE: tl.constexpr = False,
):
    """hidden = sum over ranks of x + residual, normed = norm(hidden) * weight

    DEFERRED   normed = hidden * weight, and norm.squares[t, p] = sum(hidden[t, part p]^2) / WIDTH
    TREE       the bits of all_reduce(invariant=True), then add_rms_norm(invariant=True): the sum is the node above the ranks'
               nodes (weft.kernels.slices), rounded before the residual is added, and squares are added in pairs, of parts too,
               whose length is a power of two. Not DEFERRED
    grid       (groups * parts,), parts = WIDTH / PART rounded up; group g has every groups-th tile, its program p the columns
               from p * PART on
    one-shot   a tile is a row, sent and received once
    two-shot   a tile is W rows, row s summed by rank s; rows, then sums, are sent and received
    With the transport "fp8" x, and in two shots the sum of the ranks' x, travel in fp8 (weft.ops.collectives.fp8_wire); the
    residual is added where they arrive.

    signals, order, reuse: weft.transport.push (in turns); between the programs of a row sum_over_parts, if not DEFERRED. Rows
    beyond n and columns beyond WIDTH are sent as zeros.

    every rank   | load | push | receive, sum, residual | (push sum, receive) | sum of squares over the parts | store both |
    DEFERRED     | load | push | receive, sum, residual | (push sum, receive) | store all |
    """
    world: tl.constexpr = wl.num_ranks(team)
    dtype: tl.constexpr = hidden.dtype.element_ty
    parts: tl.constexpr = (WIDTH + PART - 1) // PART
    program = tl.program_id(0)
    group, groups = program // parts, tl.num_programs(0) // parts
    IN_FP8: tl.constexpr = TRANSPORT == "fp8"
    SENT: tl.constexpr = PART // 4 if IN_FP8 else PART
    slot = my_slot(buffer, SENT, TRANSPORT, team)
    begin = program % parts * PART
    end, columns = min(begin + PART, WIDTH), begin + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < PART) & (columns < WIDTH)
    wl.follow_previous_kernel()
    scale = tl.load(norm.weight + columns, mask=inside, other=0)
    epoch = wl.next_epoch(epochs + program)
    count = 0
    if not DEFERRED:
        count = wl.next_epoch(norm.counts + program)
    if TWO_SHOT:
        ranks = tl.arange(0, ROWS)[:, None]
        ordered = clears_in_order(slot, 2 * tl.cdiv(tl.cdiv(n, world), groups), SENT)
        for tile in range(group, tl.cdiv(n, world), groups):
            first = tl.cast(tile, tl.int64) * world
            rest = tl.cast(n - first, tl.int32)
            to_peer = send_order(team, ROWS)[:, None]
            asked = is_sent(team, ROWS) & (to_peer < rest)
            there = asked & inside[None, :]
            place = (first + to_peer) * WIDTH + columns[None, :]
            rows = summed(x, place, first + to_peer, columns[None, :], there, asked, WIDTH, dtype, False, TREE)
            if IN_FP8:
                send_rows(rows, slot, epoch, team)
            else:
                send(rows, slot, epoch, team, TRANSPORT, PART)
            of_rank = (first + wl.rank(team)) * WIDTH + columns
            exists = inside & (wl.rank(team) < rest)
            here = wl.rank(team) < rest
            own = summed(x, of_rank, first + wl.rank(team), columns, exists, here, WIDTH, dtype, False, TREE)
            if IN_FP8:
                sums = sums_in_fp8(own, slot, epoch, team, ordered, ROWS)
            else:
                before = tl.load(norm.residual + of_rank, mask=exists, other=0).to(tl.float32)
                received = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, PART)
                part = (over_ranks(received, TREE) + before).to(dtype)
                send(tl.broadcast_to(part[None, :], (ROWS, BLOCK)), slot, epoch + 1, team, TRANSPORT, PART)
                whole = receive(part, slot, epoch + 1, epoch, team, ordered, ROWS, TRANSPORT, PART)
            place = (first + ranks) * WIDTH + columns[None, :]
            here = is_rank(team, ROWS) & (ranks < rest)
            if IN_FP8:
                residual = tl.load(norm.residual + place, mask=here & inside[None, :], other=0).to(tl.float32)
                whole = (sums + residual).to(dtype)
            if DEFERRED:
                at = (first + ranks) * parts + program % parts
                tl.store(norm.squares + at, (squares_of(whole) / WIDTH)[:, None], mask=here)
                result = whole.to(tl.float32) * scale.to(tl.float32)[None, :]
            else:
                squares = sum_over_parts(squares_of(whole, TREE), norm.squares, count, parts, team, ROWS, TREE)
                result = rms_norm(whole, squares, scale, norm.eps, WIDTH, TREE)
            tl.store(hidden + place, whole, mask=here & inside[None, :])
            exists, token = tl.arange(0, ROWS) < min(rest, world), first + tl.arange(0, ROWS)
            stored = here & inside[None, :]
            store_rows(result.to(dtype), norm.normed, place, stored, norm.fp8, token, exists, begin, end, True)
            epoch += 2
            count += 1
    else:
        ordered = clears_in_order(slot, tl.cdiv(n, groups), SENT)
        for row in range(group, n, groups):
            place = tl.cast(row, tl.int64) * WIDTH + columns
            own = summed(x, place, tl.cast(row, tl.int64), columns, inside, row < n, WIDTH, dtype, True, TREE)
            if IN_FP8:
                words, scales = words_of(own.reshape(BLOCK // COLUMNS, COLUMNS))
                send_to_all(words, scales, slot, epoch, team, ROWS)
                before = tl.load(norm.residual + place, mask=inside, other=0).to(tl.float32)
                words, scales = receive_groups(words, scales, slot, epoch, epoch - 1, team, ordered, ROWS)
                total = (sum_in_order(words, scales, world).reshape(BLOCK) + before).to(dtype)[None, :]
            else:
                send(tl.broadcast_to(own[None, :], (ROWS, BLOCK)), slot, epoch, team, TRANSPORT, PART)
                before = tl.load(norm.residual + place, mask=inside, other=0).to(tl.float32)
                received = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, PART)
                total = (over_ranks(received, TREE) + before).to(dtype)[None, :]
            if DEFERRED:
                at = tl.cast(row, tl.int64) * parts + program % parts
                tl.store(norm.squares + at + tl.arange(0, 1), squares_of(total) / WIDTH)
                result = total.to(tl.float32) * scale.to(tl.float32)[None, :]
            else:
                squares = sum_over_parts(squares_of(total, TREE), norm.squares, count, parts, team, 1, TREE)
                result = rms_norm(total, squares, scale, norm.eps, WIDTH, TREE)
            here = place[None, :]
            tl.store(hidden + here, total, mask=inside[None, :])
            token, exists = row + tl.arange(0, 1), row + tl.arange(0, 1) < n
            store_rows(result.to(dtype), norm.normed, here, inside[None, :], norm.fp8, token, exists, begin, end, True)
            epoch += 1
            count += 1
    keep_epoch(epochs, epoch - 1)
    if not DEFERRED:
        keep_epoch(norm.counts, count - 1)


def sums_of(team: Team, plan: PushPlan, itemsize: int, rows: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Workspace for ``Norm``'s squares and counts, keyed by rows and parts.

    Receive buffers are unwritten at first. Rows and parts give the layout, and the programs of a row must have made equally
    many calls.
    """

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        programs = slots_of(team, plan, itemsize).programs
        sums = team.local((programs, STAGES.value, rows, parts), torch.float32)
        word, bits = UNWRITTEN[4]
        sums.view(word).fill_(bits)
        return sums, team.local((programs,), torch.int32)

    return team.workspace(("sums over parts", plan, itemsize, rows, parts), make)

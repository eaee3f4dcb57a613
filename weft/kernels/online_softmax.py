"""Online softmax over a paged cache: attention of a decode step and of prompts, and its step.

The method is FlashAttention's (Dao et al., 2022).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.paged_cache import cells_at, pages_at

LOG2_E = math.log2(math.e)

# Rows of the smallest tile that tensor cores multiply.
MIN_ROWS = tl.constexpr(16)


class ScoreRule(NamedTuple):
    """How x = q . key becomes a weight: 2 ** (scale * x), or 2 ** (scale * tanh(inner * x)).

    inner  of a soft cap; None: there is none
    sinks  [query heads]: e ** sink is one more weight of each row, without a value; None: there are none
    """

    scale: float
    inner: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, scale: float, softcap: float | None = None, sinks: torch.Tensor | None = None) -> ScoreRule:
        """Rule of scores softcap * tanh(scale * x / softcap)."""
        if softcap is None:
            return cls(scale * LOG2_E, None, sinks)
        return cls(softcap * LOG2_E, scale / softcap, sinks)


class DecodeTile(NamedTuple):
    """One program's part of a decoding attention, a compile-time constant.

    group    query heads of a KV head, of all the program's new tokens
    rows     rows of the tile that tensor cores multiply, at least ``group``; the rest only fills it up. With fewer than
             MIN_ROWS keys are multiplied by queries and values by weights, else queries by keys and weights by values
    kept     ``rows``, or half of it where that holds the group: rows of the result
    block_n  tokens of a step
    ways     warps, which share out the tokens of a step
    least    tokens of a split-KV partial at least
    split    True if a sequence may have more than one partial
    joined   partials that are in flight at a time when they are joined
    window   tokens that a token attends to, itself the last one; None: all
    queries  new tokens of a program at most; row r of the tile is of token r // (group // queries)
    stride   with more than one: elements of the result between two tokens
    """

    group: int
    rows: int
    kept: int
    block_n: int
    ways: int
    least: int
    split: bool
    joined: int
    window: int | None = None
    queries: int = 1
    stride: int = 0


class PrefillTile(NamedTuple):
    """One program's part of a prefill's attention, a compile-time constant.

    group    query heads of a KV head
    block_m  rows, each a query head of a token
    block_n  keys of a step
    window   tokens that a token attends to, itself the last one; None: all up to itself
    """

    group: int
    block_m: int
    block_n: int
    window: int | None = None


@triton.jit
def capped(x):
    """tanh(x)"""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def sinks_at(sinks, head, counted):
    """Exponents of the sinks of query heads ``head``; -inf where they are not ``counted``."""
    return tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * 1.4426950408889634


@triton.jit
def before_keys(sink):
    """(largest exponent, sum of weights) of rows before their first key."""
    return tl.maximum(sink, -1e30), tl.where(sink > -1e30, 1.0, 0.0)


@triton.jit
def accumulate(p, v, new, largest, total, acc):
    """(total, acc) with one more block of keys: weights ``p`` [..., ROWS, N], values ``v`` [..., N, D].

    p is relative to the exponent ``new``; total [..., ROWS] and acc [..., ROWS, D] are relative to ``largest`` before, and to
    ``new`` after.
    """
    rescale = tl.exp2(largest - new)
    total = total * rescale + tl.sum(p, axis=-1)
    return total, tl.dot(p.to(v.dtype), v, acc * tl.expand_dims(rescale, -1), input_precision="ieee")


@triton.jit
def sum_ways(x):
    """Sum along axis 0, [WAYS, ...] -> [...], by halves.

    Each split brings two ways into one thread, 16 bytes at a time; ``tl.sum`` of values that lie in different warps would move
    each element alone.
    """
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1], x.shape[2]))
    else:
        halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
        a, b = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        return sum_ways(a + b)


@triton.jit
def ways(BLOCK_N: tl.constexpr, WAYS: tl.constexpr):
    """0 .. BLOCK_N - 1 as [WAYS, BLOCK_N // WAYS]."""
    PER: tl.constexpr = BLOCK_N // WAYS
    return tl.arange(0, WAYS)[:, None] * PER + tl.arange(0, PER)[None, :]


@triton.jit
def attend(
    x,
    cache,
    table,
    page,
    head,
    first,
    length,
    stride,
    scale,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    begin=None,
    lengths=None,
    inner=None,
    sink=None,
):
    """(weighted mean of values [kept, D], log2 of the sum of weights [rows]) of rows ``x`` [rows, D].

    A token's weight is that of a ``ScoreRule`` with scale and inner. The program takes block_n tokens a step, from first,
    first + stride, ... as far as they lie before ``length``; tokens before the window are left out. Without any token the mean
    is 0 and the sum has no meaning.
    table  the sequence's pages; page: of the first block, already loaded
    SIZES  ``CacheSizes``; TILE: ``DecodeTile``
    begin  with TILE.window: first token of the window, where it is not TILE.window tokens before ``length``
    lengths  [rows] with TILE.queries > 1: a row attends to tokens before its length, in a window before that, from ``begin`` on
             and before ``length``
    sink   [rows] of ``sinks_at``: counted by one partial of a row alone; None: there are none

    Each warp takes a share of the tokens and keeps a maximum and sums of it, which are joined at the end: no step
    waits for more than its loads. Shared out by rows or columns, as a plain dot is, a step has 4 CTA barriers.
    """
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = SIZES.dim
    KEPT: tl.constexpr = TILE.kept
    WAYS: tl.constexpr = TILE.ways
    TURNED: tl.constexpr = ROWS < MIN_ROWS
    tl.static_assert(not TURNED or lengths is None, "rows of several tokens")
    # The axis of a step's tokens in the scores, with the ways before it.
    TOKENS: tl.constexpr = 1 if TURNED else 2
    column = tl.arange(0, D)[None, None, :]
    local = ways(TILE.block_n, WAYS)
    x = tl.broadcast_to(x[None, :, :], (WAYS, ROWS, D))
    # Not -inf: a way without a token has a difference of two such numbers to take.
    largest = tl.full((WAYS, ROWS), -1e30, tl.float32)
    total = tl.zeros((WAYS, ROWS), tl.float32)
    if sink is not None:
        largest_sink, counted = before_keys(sink)
        first_way = tl.arange(0, WAYS)[:, None] == 0
        largest = tl.where(first_way, largest_sink[None, :], largest)
        total = tl.where(first_way, counted[None, :], total)
    if TURNED:
        x = tl.permute(x, (0, 2, 1))
        acc = tl.zeros((WAYS, D, ROWS), tl.float32)
    else:
        acc = tl.zeros((WAYS, ROWS, D), tl.float32)
    for start in tl.range(first, length, stride):
        there = local < length - start
        if TILE.window is not None:
            if begin is None:
                there &= local >= length - TILE.window - start
            else:
                there &= local >= begin - start
        cells = cells_at(page, head, start, local, SIZES)
        at = cells[:, :, None] + column
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_at(table, start + stride, length, local, SIZES.page)
        k = tl.load(cache.key_pages + at, mask=there[:, :, None], other=0.0)
        if TURNED:
            turned = cells[:, None, :] + tl.permute(column, (0, 2, 1))
            v = tl.load(cache.value_pages + turned, mask=there[:, None, :], other=0.0)
        else:
            v = tl.load(cache.value_pages + at, mask=there[:, :, None], other=0.0)
        if cache.k_scale is not None:
            k, v = k.to(x.dtype), v.to(x.dtype)
        if TURNED:
            score = tl.dot(k, x, input_precision="ieee")
        else:
            score = tl.dot(x, tl.permute(k, (0, 2, 1)), input_precision="ieee")
        if inner is not None:
            score = capped(score * inner)
        score *= scale
        if lengths is None:
            seen = tl.expand_dims(there, 3 - TOKENS)
        else:
            end = (lengths - start)[None, :, None]
            seen = local[:, None, :] < end
            if TILE.window is not None:
                seen &= local[:, None, :] >= end - TILE.window
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=TOKENS))
        p = tl.exp2(score - tl.expand_dims(new, TOKENS))
        if TURNED:
            rescale = tl.exp2(largest - new)
            total = total * rescale + tl.sum(p, axis=1)
            acc = tl.dot(v, p.to(v.dtype), acc * rescale[:, None, :], input_precision="ieee")
        else:
            total, acc = accumulate(p, v, new, largest, total, acc)
        largest = new
    top = tl.max(largest, axis=0)
    share = tl.exp2(largest - top[None, :])
    whole = tl.sum(total * share, axis=0)
    # No tokens: 0 / 1.
    share /= tl.where(whole > 0, whole, 1.0)[None, :]
    if TURNED:
        acc = tl.permute(acc * share[:, None, :], (0, 2, 1))
    else:
        acc *= share[:, :, None]
    if KEPT < ROWS:
        halves = tl.reshape(acc, (WAYS, 2, KEPT, D))
        acc, _ = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return sum_ways(acc), top + tl.log2(whole)


@triton.jit
def attend_many(
    x,
    cache,
    table,
    head,
    split,
    count,
    shortest,
    lengths,
    scale,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    inner=None,
    sink=None,
):
    """``attend`` of rows that warps share out: partial ``split`` of ``count``.

    A partial is a run of neighbouring blocks.
    lengths   [rows] tokens that each row attends to, 0: none; shortest: the least above 0
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = SIZES.dim
    length = tl.max(lengths, axis=0)
    begin = 0
    if TILE.window is not None:
        begin = tl.maximum(shortest - TILE.window, 0)
    first = begin // BLOCK_N
    blocks = tl.cdiv(tl.cdiv(length, BLOCK_N) - first, count)
    start = (first + split * blocks) * BLOCK_N
    end = tl.minimum((first + (split + 1) * blocks) * BLOCK_N, length)
    zeros = tl.zeros((ROWS,), tl.float32)
    largest, total = tl.full((ROWS,), -1e30, tl.float32), zeros
    if sink is not None:
        largest, total = before_keys(sink)
    state = largest, total, tl.zeros((ROWS, D), tl.float32)
    masked = tl.maximum(start, begin)
    if TILE.window is None:
        # All rows see the blocks before the first new token.
        masked = tl.maximum(start, tl.minimum(end, shortest // BLOCK_N * BLOCK_N))
        state = over_keys(x, lengths - 1, cache, table, head, start, masked, scale, state, False, SIZES, TILE, inner)
    largest, total, acc = over_keys(
        x, lengths - 1, cache, table, head, masked, end, scale, state, True, SIZES, TILE, inner
    )
    total = tl.where(lengths > 0, total, 0.0)
    mean = tl.where((total > 0)[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    return mean, tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def over_keys(
    x,
    position,
    cache,
    table,
    head,
    start,
    end,
    scale,
    state,
    MASKED: tl.constexpr,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    inner=None,
):
    """The online softmax of rows ``x`` [block_m, D] over keys start .. end - 1 more.

    Steps begin at multiples of block_n, and so does ``start`` unless TILE has a window. Without pages (SIZES.page = 0, and no
    window) they begin at ``start``. A key's weight is that of a ``ScoreRule`` with scale and inner.
    state   before and after: (largest exponent [block_m], sum of weights [block_m], weighted sum of values [block_m, D]), the
            sums relative to the exponent
    MASKED  row i sees keys up to position[i], from its window's first on; else all rows see all, and a step
            ends at ``end``
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    largest, total, acc = state
    column, local = tl.arange(0, SIZES.dim)[None, :], tl.arange(0, BLOCK_N)
    first = start
    if MASKED and TILE.window is not None:
        first = start // BLOCK_N * BLOCK_N
    page = pages_at(table, first, end, local, SIZES.page)
    for at in tl.range(first, end, BLOCK_N):
        cells = cells_at(page, head, at, local, SIZES)[:, None] + column
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_at(table, at + BLOCK_N, end, local, SIZES.page)
        if SIZES.page > 0 or not MASKED:
            k = tl.load(cache.key_pages + cells)
        if MASKED:
            there = local < end - at
            if TILE.window is not None:
                there &= local >= start - at
            if SIZES.page == 0:  # after the last row there may be no memory
                k = tl.load(cache.key_pages + cells, mask=there[:, None], other=0.0)
            v = tl.load(cache.value_pages + cells, mask=there[:, None], other=0.0)
        else:
            v = tl.load(cache.value_pages + cells)
        if cache.k_scale is not None:
            k, v = k.to(x.dtype), v.to(x.dtype)
        score = tl.dot(x, k.T, input_precision="ieee")
        if inner is not None:
            score = capped(score * inner)
        if MASKED:
            seen = (at + local)[None, :] <= position[:, None]
            if TILE.window is not None:
                seen &= (at + local)[None, :] > position[:, None] - TILE.window
            score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=1) * scale)
        p = tl.exp2(score * scale - new[:, None])
        total, acc = accumulate(p, v, new, largest, total, acc)
        largest = new
    return largest, total, acc

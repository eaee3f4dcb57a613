"""Attention in runs of positions: sums whose order depends on a token's position, and on nothing else.

A row is a query head of a token. Keys lie in runs of RUN positions, from position 0 on, of half of that in the first EARLY
positions: each run has a partial that begins anew, and partials are folded in the order of positions. So a row has the same
bits beside any rows, by any number of programs, in a decode step, a chunk of a prompt or a verification of drafts.

What holds the bits
    shapes   all tiles have block_m rows and steps of block_n keys: one instruction of the tensor cores, one order of sums
    masks    every step is masked. A key that a row does not see has weight 0, which changes no sum
    fma      products that are added are ``tl.fma`` or stand apart: a compiler has no choice left to make twice
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.online_softmax import capped
from weft.kernels.paged_cache import cells_at, pages_at

# Exponent of no weight: finite, since a difference of two is taken.
NOTHING: tl.constexpr = tl.constexpr(-1e30)


class RunTile(NamedTuple):
    """One program's part, a compile-time constant.

    group    query heads of a KV head
    block_m  rows of the tile, each a query head of a token; the rest only fills it up
    block_n  keys of a step
    run      positions of a run, a multiple of block_n
    early    positions, a multiple of run, whose runs are half as long, also a multiple of block_n
    queries  new tokens of a sequence in a program at most; 0: a prefill, with the tiles of ``SequenceRanges``
    split    True if programs share out a tile's runs
    window   tokens that a token attends to, itself the last one; None: all up to itself
    """

    group: int
    block_m: int
    block_n: int
    run: int
    queries: int = 0
    split: bool = False
    window: int | None = None
    early: int = 0


class RunPartials(NamedTuple):
    """Partials of one call in scratch memory; a pair is a tile of rows of one KV head.

    accs      fp32 [pairs, runs, rows, D]: weighted sums of values, relative to the exponent
    sums      fp32 [pairs, runs, 2, rows]: exponents, then sums of weights
    arrivals  int32 [pairs], 0: arrival counters of the programs; left as 0
    """

    accs: torch.Tensor
    sums: torch.Tensor
    arrivals: torch.Tensor


@triton.jit
def runs_between(begin, end, TILE: tl.constexpr):
    """(number of the run in which position ``begin`` lies, number of runs that begin before ``end``)"""
    HALF: tl.constexpr = TILE.run // 2
    EARLY: tl.constexpr = TILE.early
    if EARLY == 0:
        return begin // TILE.run, tl.cdiv(end, TILE.run)
    else:
        first = tl.minimum(begin, EARLY) // HALF + tl.maximum(begin - EARLY, 0) // TILE.run
        return first, tl.cdiv(tl.minimum(end, EARLY), HALF) + tl.cdiv(tl.maximum(end - EARLY, 0), TILE.run)


@triton.jit
def start_of(run, TILE: tl.constexpr):
    """First position of run number ``run``."""
    HALF: tl.constexpr = TILE.run // 2
    SHORT: tl.constexpr = TILE.early // HALF
    return tl.minimum(run, SHORT) * HALF + tl.maximum(run - SHORT, 0) * TILE.run


@triton.jit
def run_partial(
    x, position, cache, table, head, run, begin, end, scale, SIZES: tl.constexpr, TILE: tl.constexpr, inner=None
):
    """(exponent [block_m], sum of weights [block_m], weighted sum of values [block_m, D]) of one run.

    run       its number
    x         [block_m, D]; row i sees keys up to position[i], from its window's first on
    begin, end  keys before ``begin`` and from ``end`` on are seen by no row and may be NaN
    scale, inner  of a ``ScoreRule``
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    D: tl.constexpr = SIZES.dim
    ROWS: tl.constexpr = TILE.block_m
    column, local = tl.arange(0, D)[None, :], tl.arange(0, BLOCK_N)
    largest, total = tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    start, stop = start_of(run, TILE), tl.minimum(start_of(run + 1, TILE), end)
    first = start
    if TILE.window is not None:
        first = tl.maximum(start, begin // BLOCK_N * BLOCK_N)
    page = pages_at(table, first, stop, local, SIZES.page)
    for at in tl.range(first, stop, BLOCK_N):
        cells = cells_at(page, head, at, local, SIZES)[:, None] + column
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_at(table, at + BLOCK_N, stop, local, SIZES.page)
        there = local < end - at
        if TILE.window is not None:
            there &= local >= begin - at
        k = tl.load(cache.key_pages + cells, mask=there[:, None], other=0.0)
        v = tl.load(cache.value_pages + cells, mask=there[:, None], other=0.0)
        if cache.k_scale is not None:
            k, v = k.to(x.dtype), v.to(x.dtype)
        score = tl.dot(x, k.T, input_precision="ieee")
        if inner is not None:
            score = capped(score * inner)
        seen = (at + local)[None, :] <= position[:, None]
        if TILE.window is not None:
            seen &= (at + local)[None, :] > position[:, None] - TILE.window
        exponent = tl.where(seen, score * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(exponent, axis=1))
        p = tl.exp2(exponent - new[:, None])
        keep = tl.exp2(largest - new)
        total = tl.fma(total, keep, tl.sum(p, axis=1))
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        largest = new
    return largest, total, acc


@triton.jit
def fold_run(state, partial):
    """``state`` with the partial of the next run.

    Both are (exponent [R], sum of weights [R], weighted sum of values [R, D]). The partial of a run that a row does not see
    leaves the row as it is.
    """
    largest, total, acc = state
    of_run, weights, values = partial
    new = tl.maximum(largest, of_run)
    keep, share = tl.exp2(largest - new), tl.exp2(of_run - new)
    total = tl.fma(total, keep, weights * share)
    return new, total, tl.fma(acc, keep[:, None], values * share[:, None])


@triton.jit
def store_run(partial, runs, run, partials, ROWS: tl.constexpr):
    """Store the first ROWS rows of the partial of run ``run``, of up to ``runs``, of pair program_id(0)."""
    largest, total, acc = partial
    D: tl.constexpr = acc.shape[1]
    row, column = tl.arange(0, acc.shape[0]), tl.arange(0, D)[None, :]
    at = (tl.program_id(0).to(tl.int64) * runs + run) * ROWS
    tl.store(partials.accs + at * D + row[:, None] * D + column, acc, mask=row[:, None] < ROWS)
    tl.store(partials.sums + 2 * at + row, largest, mask=row < ROWS)
    tl.store(partials.sums + 2 * at + ROWS + row, total, mask=row < ROWS)


@triton.jit
def load_run(runs, run, partials, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows ``row`` of the partial that ``store_run`` stored; rows from ROWS on have no weight."""
    column, exists = tl.arange(0, D)[None, :], row < ROWS
    at = (tl.program_id(0).to(tl.int64) * runs + run) * ROWS
    largest = tl.load(partials.sums + 2 * at + row, mask=exists, other=NOTHING)
    total = tl.load(partials.sums + 2 * at + ROWS + row, mask=exists, other=0.0)
    acc = tl.load(partials.accs + at * D + row[:, None] * D + column, mask=exists[:, None], other=0.0)
    return largest, total, acc


@triton.jit
def arrive_at_pair(partials, programs):
    """True in the last of the ``programs`` of pair program_id(0) to arrive; it sees what all have stored.

    order  all threads store a partial (CTA barrier) before their program arrives (release); the last one acquires, and sets the
           arrival counter back
    """
    wl.gather_stores()
    last = tl.atomic_add(partials.arrivals + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(partials.arrivals + tl.program_id(0), 0)
    return last

"""Kernels of matmul_route_schedule: parts of a router's logits, and all that follows in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.expert_choices import TINY, choices_of
from weft.kernels.partial_sums import rounded_sum
from weft.ops.gemm.small_m import prefetch_columns
from weft.ops.moe.moe_schedule import write_tiles


class Rows(NamedTuple):
    """Operands, passed to the kernel as the argument ``rows``.

    x       [T, H], rows ``x_stride`` apart
    router  [E or E + 1, H], rows ``stride`` apart; row E is that of the shared expert's gate
    bias    fp32 [E], any tensor if not SCORING.biased
    added   [E], added to the logits; any tensor if not FORM.added
    """

    x: torch.Tensor
    x_stride: int
    router: torch.Tensor
    stride: int
    bias: torch.Tensor
    added: torch.Tensor


class Found(NamedTuple):
    """Results, passed to the kernel as ``results``: ``Routing``, the gate's logits [T], ``Schedule``."""

    ids: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor
    pairs: torch.Tensor
    counts: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor


class RouterForm(NamedTuple):
    """Compile-time sizes.

    experts  E, and ``count``, the number to schedule; rows: of the router
    k        choices
    tokens   at least T, a power of two; block: pairs of a tile of the schedule
    parts    programs that share a tile of logits, each with its share of H
    rows_of, step  rows of the router that a program multiplies, columns at a time: powers of two, at least 16
    ahead    the router's rows begin on 16 bytes, so that they can be prefetched
    added    the experts' logits have a bias
    """

    experts: int
    count: int
    rows: int
    k: int
    tokens: int
    block: int
    parts: int
    rows_of: int
    step: int
    ahead: bool
    added: bool = False


@triton.jit
def part_of_logits(rows, partials, T, H, program, FORM: tl.constexpr):
    """Store partials[part, t, r] = x[t, share] @ router[r, share].

    For a tile of the router's rows and a share of H. The first part begins with the bias of the experts' logits, if any.
    partials  fp32 [FORM.parts, T, FORM.rows]
    """
    TOKENS: tl.constexpr = max(16, FORM.tokens)
    TILE: tl.constexpr = FORM.rows_of
    STEP: tl.constexpr = FORM.step
    part, tile = program % FORM.parts, program // FORM.parts
    steps = tl.cdiv(H, STEP)
    first, last = part * steps // FORM.parts * STEP, (part + 1) * steps // FORM.parts * STEP
    row, token = tile * TILE + tl.arange(0, TILE), tl.arange(0, TOKENS)
    if FORM.ahead:
        columns = (min(last, H) - first) // 64 * 64
        prefetch_columns(rows.router, rows.stride, tile * TILE, FORM.rows, first, columns, TILE)
    wl.follow_previous_kernel()
    acc = tl.zeros([TILE, TOKENS], tl.float32)
    if FORM.added:
        acc += tl.load(rows.added + row, mask=(row < FORM.experts) & (part == 0), other=0.0).to(tl.float32)[:, None]
    of_router = rows.router + row.to(tl.int64)[:, None] * rows.stride
    of_x = rows.x + token.to(tl.int64)[:, None] * rows.x_stride
    for k in range(first, last, STEP):
        column = k + tl.arange(0, STEP)[None, :]
        a = tl.load(of_router + column, mask=(row < FORM.rows)[:, None] & (column < H), other=0.0)
        b = tl.load(of_x + column, mask=(token < T)[:, None] & (column < H), other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    at = (part * T + token)[None, :] * FORM.rows + row[:, None]
    tl.store(partials + at, acc, mask=(token < T)[None, :] & (row < FORM.rows)[:, None])


@triton.jit(do_not_specialize=["T"])
def router_parts_kernel(rows, partials, T, H, FORM: tl.constexpr):
    """partials[part, t, r] = x[t, share] @ router[r, share], shares of H; a bias in the first part

    grid      (tiles of rows * FORM.parts,)
    rows      ``Rows``
    partials  fp32 [FORM.parts, T, FORM.rows]

    signals, waits  none, except the wait for the previous kernel
    """
    part_of_logits(rows, partials, T, H, tl.program_id(0), FORM)


@triton.jit(do_not_specialize=["T", "first"])
def matmul_route_schedule_kernel(
    rows, results, partials, arrivals, T, H, first, scale, SCORING: tl.constexpr, FORM: tl.constexpr
):
    """``Routing`` of x @ router.T, and its ``Schedule`` of experts first .. first + FORM.count - 1

    logits = x @ router.T, with a bias if FORM.added, are added up in fp32 in the order of the parts, and rounded once to x's
    dtype.

    grid      (tiles of experts * FORM.parts,): each program multiplies its part, and the last one to end does the rest
    rows      ``Rows``; results: ``Found``, as ``route_kernel`` and ``moe_schedule_kernel`` give them, tokens in their order
    partials  fp32 [FORM.parts, T, FORM.rows], workspace of this launch
    arrivals  int32 [1], 0 before and after

    signals   arrivals: each program adds 1 when its part is stored (release)
    waits     none: the program that finds all arrived sees their parts (acquire), so programs need not be resident
    order     which program is the last changes no result
    reuse     arrivals: the last program sets it to 0, and the next kernel of the stream waits for this one's end

    program 0      | prefetch router | (previous kernel) | multiply | store part |
    the last one   | prefetch router | (previous kernel) | multiply | store part | sum, choose, schedule |
    """
    TOKENS: tl.constexpr = FORM.tokens
    PARTS: tl.constexpr = FORM.parts
    WIDTH: tl.constexpr = max(16, triton.next_power_of_2(FORM.experts))
    part_of_logits(rows, partials, T, H, tl.program_id(0), FORM)
    wl.gather_stores()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        dtype: tl.constexpr = rows.x.dtype.element_ty
        token, expert = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
        asked, size = partials + token * FORM.rows + expert, T * FORM.rows
        logits = rounded_sum(asked, (token < T) & (expert < FORM.experts), size, PARTS, dtype)
        logits = tl.where(expert < FORM.experts, logits.to(tl.float32), float("-inf"))
        if FORM.rows > FORM.experts:
            one = tl.arange(0, TOKENS)
            gate = rounded_sum(partials + one * FORM.rows + FORM.experts, one < T, size, PARTS, dtype)
            tl.store(results.gate + one, gate, mask=one < T)
        weight, place, _, _ = choices_of(logits, rows.bias, FORM.experts, SCORING, FORM.k)
        taken = (place > 0) & (token < T)
        if SCORING.renormalize:
            weight = weight / (tl.sum(tl.where(place > 0, weight, 0.0), axis=1, keep_dims=True) + TINY)
        pair = token * FORM.k + place - 1
        tl.store(results.ids + pair, tl.broadcast_to(expert, pair.shape), mask=taken)
        tl.store(results.weights + pair, (weight * scale).to(dtype), mask=taken)
        held = taken & (expert >= first) & (expert < first + FORM.count)
        number = held.to(tl.int32)
        before = tl.zeros(number.shape, tl.int32)
        if TOKENS > 1:
            before = tl.cumsum(number, 0) - number
        tl.store(results.pairs + (expert - first) * T + before, pair, mask=held)
        count, local = tl.sum(number, 0), tl.arange(0, WIDTH) - first
        tl.store(results.counts + local, count, mask=(local >= 0) & (local < FORM.count))
        tiles = write_tiles(count, tl.cumsum(count, 0) - count, results.tiles, T, FORM.block, -first)
        tl.store(results.tile_count, tiles)

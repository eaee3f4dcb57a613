"""Split-KV: a sequence's attention in partials, each of one program, joined by the last one.

The method is Flash-Decoding's (Dao et al., 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import store_groups
from weft.kernels.operands import rows_contiguous


class Partials(NamedTuple):
    """Split-KV partials of one call, in scratch memory. A pair is a sequence and one of its KV heads.

    means     fp32 [pairs, splits, GROUP, D]: the softmax of each partial by itself
    log_sums  fp32 [pairs, splits, GROUP]: log2 of the sum of the weights it was divided by
    arrivals  int32 [pairs], 0: arrival counters of the partials; left as 0 for the next kernel of this stream
    """

    means: torch.Tensor
    log_sums: torch.Tensor
    arrivals: torch.Tensor


class HeadGates(NamedTuple):
    """Gates of a result's heads, a kernel's argument: the rounded result is multiplied by their sigmoids.

    rows    [tokens, q_heads * D], of the result's dtype before any fp8, ``stride`` elements apart
    """

    rows: torch.Tensor
    stride: int

    @classmethod
    def of(cls, gate: torch.Tensor) -> HeadGates:
        rows = rows_contiguous(gate)
        return cls(rows, rows.stride(0))


@triton.jit
def split_count(length, splits, TILE: tl.constexpr):
    """Number of partials of a sequence of ``length`` tokens.

    At most ``splits``, each of about TILE.least tokens or more, of the tokens within the window.
    """
    if TILE.window is not None:
        length = tl.minimum(length, TILE.window)
    return tl.minimum(tl.maximum(tl.cdiv(length, TILE.least), 1), splits)


@triton.jit
def first_block(length, TILE: tl.constexpr):
    """First token of the first block that the last of ``length`` tokens attends to."""
    if TILE.window is None:
        return 0
    else:
        return tl.maximum(length - TILE.window, 0) // TILE.block_n * TILE.block_n


@triton.jit
def store_or_join(
    mean, log_sum, count, out, partials, fp8, HEADS: tl.constexpr, TILE: tl.constexpr, left=None, gate=None
):
    """Finish partial program_id(1) of the ``count`` of pair program_id(0), as ``attend`` computed it.

    mean   [kept, D], log_sum [rows]
    out    [pairs, group, D]: a pair's only partial, or all partials, joined by the program that arrives last
    fp8    ``Fp8Rows`` of ``out`` as rows of a sequence's HEADS pairs; else None
    left   as of ``rows_at``; unless None, ``out`` is where the pair's rows begin
    gate   pointer to the pair's gates [group, D]; None: there are none
    order  that of ``store_partial``
    TILE   ``DecodeTile``; where it is not split, ``partials`` is not touched
    """
    D: tl.constexpr = mean.shape[1]
    GROUP: tl.constexpr = TILE.group
    pair, splits = tl.program_id(0), tl.num_programs(1)
    alone = True
    if TILE.split:
        alone = count == 1
        if count > 1:
            if store_partial(mean, log_sum, count, partials, TILE):
                tl.store(partials.arrivals + pair, 0)
                first = pair.to(tl.int64) * splits * GROUP
                whole = join(partials.means + first * D, partials.log_sums + first, count, D, TILE)
                store_heads(whole, out, fp8, HEADS, TILE, left, gate)
    if alone:
        store_heads(mean, out, fp8, HEADS, TILE, left, gate)


@triton.jit
def store_heads(mean, out, fp8, HEADS: tl.constexpr, TILE: tl.constexpr, left=None, gate=None):
    """Store the first TILE.group rows of mean [ROWS, D], rounded, as the heads of pair program_id(0).

    out, fp8, HEADS, left, gate  as of ``store_or_join``
    """
    ROWS: tl.constexpr = mean.shape[0]
    D: tl.constexpr = mean.shape[1]
    GROUP: tl.constexpr = TILE.group
    pair, row = tl.program_id(0), tl.arange(0, ROWS)[:, None]
    if gate is not None:
        gates = tl.load(gate + row * D + tl.arange(0, D)[None, :], mask=row < GROUP, other=0.0)
        mean = mean.to(gates.dtype).to(tl.float32) * tl.sigmoid(gates.to(tl.float32))
    if fp8 is None:
        if left is None:
            out += pair.to(tl.int64) * (GROUP * D)
        at, exists = rows_at(row, left, D, TILE)
        tl.store(out + at + tl.arange(0, D)[None, :], mean.to(out.dtype.element_ty), mask=exists)
    else:
        GROUPS: tl.constexpr = ROWS * D // 128
        group = tl.arange(0, GROUPS)
        x = mean.to(fp8.dtype).reshape(GROUPS, 128)
        token, column = (pair // HEADS).to(tl.int64) + group * 0, pair % HEADS * (GROUP * D) + group * 128
        store_groups(x, out, fp8, token, column, group * 128 < GROUP * D, HEADS * GROUP * D)


@triton.jit
def rows_at(row, left, D: tl.constexpr, TILE: tl.constexpr):
    """(offsets of a pair's rows in the result, True where they exist)

    left  None: the result is [pairs, group, D]; else [tokens, heads, D], and of the pair's sequence this number of new tokens
          is left for the pair
    """
    GROUP: tl.constexpr = TILE.group
    if left is None:
        return row * D, row < GROUP
    else:
        HEADS: tl.constexpr = GROUP // TILE.queries
        token = row // HEADS
        return token * TILE.stride + row % HEADS * D, (row < GROUP) & (token < left)


@triton.jit
def store_partial(mean, log_sum, count, partials, TILE: tl.constexpr):
    """Store partial program_id(1) of ``count`` of pair program_id(0); True in the last program to arrive.

    mean, log_sum  as of ``store_or_join``
    order          all threads store a partial (CTA barrier) before its program arrives (release); the last program acquires. It
                   sets the arrival counter back
    """
    D: tl.constexpr = mean.shape[1]
    GROUP: tl.constexpr = TILE.group
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kept, row, column = tl.arange(0, mean.shape[0])[:, None], tl.arange(0, log_sum.shape[0]), tl.arange(0, D)[None, :]
    at = (pair.to(tl.int64) * splits + split) * GROUP
    tl.store(partials.means + at * D + kept * D + column, mean, mask=kept < GROUP)
    tl.store(partials.log_sums + at + row, log_sum, mask=row < GROUP)
    wl.gather_stores()
    return tl.atomic_add(partials.arrivals + pair, 1, sem="acq_rel", scope="gpu") == count - 1


@triton.jit
def join(means, log_sums, count, D: tl.constexpr, TILE: tl.constexpr):
    """Mean [ROWS, D] of the ``count`` partials of one sequence and KV head, in order.

    Zeros for a row that attends to no token.
    """
    _, total, acc = joined(means, log_sums, count, TILE.group, D, TILE.joined)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def joined(means, log_sums, count, GROUP: tl.constexpr, D: tl.constexpr, JOINED: tl.constexpr):
    """The ``count`` partials of one sequence and KV head joined in order, before the division.

    Returns (largest exponent [ROWS], sum of weights [ROWS], weighted sum of values [ROWS, D]).

    means [count, GROUP, D], log_sums [count, GROUP] as of ``Partials``. JOINED are in flight at a time. ROWS is GROUP
    or the next power of two; rows beyond GROUP have no weight. The sums are relative to the exponent, of two.
    """
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    row = tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    exists = row < GROUP
    # Rows beyond GROUP have no weight: any finite number keeps them from NaN.
    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, count, JOINED, num_stages=1):
        for i in tl.static_range(JOINED):
            present = exists & (start + i < count)
            partial = (start + i) * GROUP
            log_sum = tl.load(log_sums + partial + row, mask=present, other=float("-inf"))
            mean = tl.load(means + partial * D + at, mask=present[:, None], other=0.0)
            new = tl.maximum(largest, log_sum)
            weight, rescale = tl.exp2(log_sum - new), tl.exp2(largest - new)
            total = total * rescale + weight
            acc = acc * rescale[:, None] + mean * weight[:, None]
            largest = new
    return largest, total, acc

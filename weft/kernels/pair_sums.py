"""Weighted sums of the results of each token's experts, as of moe_sum, for kernels that read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class PairSum(NamedTuple):
    """Results of pairs of a token and its choice, to be added up by token; also a kernel's argument.

    first    y [T * k, WIDTH], row t * k + j of choice j of token t
    count    k, a compile-time constant
    ids      int32 [T, k]; weights [T, k]
    experts  number of this rank's, from ``place`` on
    place    2 * the first one's number + 3, for which Triton compiles no further kernel
    shared   [T, WIDTH], added to the sums; None: nothing is
    gate     [T], ``stride`` apart: shared[t] is multiplied by sigmoid(gate[t]); None: it is not
    """

    first: torch.Tensor
    count: tl.constexpr
    ids: torch.Tensor
    weights: torch.Tensor
    experts: int
    place: int
    shared: torch.Tensor | None
    gate: torch.Tensor | None
    stride: int


@triton.jit
def pair_of(x, token, exists, j):
    """(pair, whether its expert is one of these, its weight) of choice ``j`` of tokens."""
    pair = token * x.count + j
    expert = tl.load(x.ids + pair, mask=exists, other=-1) - (x.place - 3) // 2
    weight = tl.load(x.weights + pair, mask=exists, other=0.0).to(tl.float32)
    return pair, (expert >= 0) & (expert < x.experts), weight


@triton.jit
def row_of(x, pair, is_here, column, there, WIDTH: tl.constexpr):
    """Elements of a pair's row; 0 if its expert is another rank's, whose row is not read."""
    return tl.load(x.first + pair * WIDTH + column, mask=there & is_here, other=0.0)


@triton.jit
def sum_of_pairs(x, token, column, there, exists, WIDTH: tl.constexpr, dtype: tl.constexpr, UNROLLED: tl.constexpr):
    """Sums of ``x``, a PairSum, rounded to ``dtype``: the bits of moe_sum.

    token, column  int64 and int32, of the shape of ``there`` when broadcast; there, exists: masks of elements, of tokens
    UNROLLED       all ids are loaded, then all rows, which takes registers: one choice after the other takes ``count`` times
                   the memory's latency
    """
    COUNT: tl.constexpr = x.count
    total = tl.zeros(there.shape, tl.float32)
    if UNROLLED:
        pairs, rows = (), ()
        for j in tl.static_range(COUNT):
            pairs += (pair_of(x, token, exists, j),)
        for j in tl.static_range(COUNT):
            rows += (row_of(x, pairs[j][0], pairs[j][1], column, there, WIDTH),)
        for j in tl.static_range(COUNT):
            total += tl.where(pairs[j][1], rows[j].to(tl.float32) * pairs[j][2], 0.0)
    else:
        for j in range(COUNT):
            pair, is_here, weight = pair_of(x, token, exists, j)
            total += tl.where(is_here, row_of(x, pair, is_here, column, there, WIDTH).to(tl.float32) * weight, 0.0)
    if x.shared is not None:
        row = tl.load(x.shared + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        if x.gate is not None:
            gate = tl.load(x.gate + token * x.stride, mask=exists, other=0.0).to(tl.float32)
            row *= 1.0 / (1.0 + tl.exp(-gate))
        total += row
    return total.to(dtype)

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
    place    2 * the first one's number + 3, for which Triton compiles no kernel of its own
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
def pair_of(x, token, column, there, exists, j, WIDTH: tl.constexpr):
    """weight * result of choice ``j`` in fp32; 0 if its expert is another rank's, whose row is not read."""
    pair = token * x.count + j
    expert = tl.load(x.ids + pair, mask=exists, other=-1) - (x.place - 3) // 2
    mine = (expert >= 0) & (expert < x.experts)
    row = tl.load(x.first + pair * WIDTH + column, mask=there & mine, other=0.0).to(tl.float32)
    weight = tl.load(x.weights + pair, mask=exists, other=0.0).to(tl.float32)
    return tl.where(mine, row * weight, 0.0)


@triton.jit
def sum_of_pairs(x, token, column, there, exists, WIDTH: tl.constexpr, dtype: tl.constexpr, UNROLLED: tl.constexpr):
    """Sums of ``x``, a PairSum, rounded to ``dtype``: the bits of moe_sum.

    token, column  int64 and int32, of the shape of ``there`` when broadcast; there, exists: masks of elements, of tokens
    UNROLLED       the loads of all choices are in flight at once, which takes registers
    """
    COUNT: tl.constexpr = x.count
    total = tl.zeros(there.shape, tl.float32)
    if UNROLLED:
        for j in tl.static_range(COUNT):
            total += pair_of(x, token, column, there, exists, j, WIDTH)
    else:
        for j in range(COUNT):
            total += pair_of(x, token, column, there, exists, j, WIDTH)
    if x.shared is not None:
        row = tl.load(x.shared + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        if x.gate is not None:
            gate = tl.load(x.gate + token * x.stride, mask=exists, other=0.0).to(tl.float32)
            row *= 1.0 / (1.0 + tl.exp(-gate))
        total += row
    return total.to(dtype)

"""Log-sum-exp of logits that ranks share: eight slices of the vocabulary, joined in one tree.

    slice s of a row: (m, l) = (max of x, sum of 2 ** ((x - m) / ln 2))       x: its logits, in fp32, in blocks from the first
    node:             (m, l) = (max(m0, m1), l0 * 2 ** (m0 - m) + l1 * 2 ** (m1 - m))        ((0 1) (2 3)) ((4 5) (6 7))

A rank has 8 / W neighbouring slices, so no bit of the result depends on W, on the number of rows or on further rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.operands import rows_contiguous
from weft.kernels.slices import SLICES
from weft.ops.local import capabilities_of, check_like
from weft.ops.registration import FLOATS, check_count
from weft.runtime.capabilities import launch_options

PARTS: tl.constexpr = tl.constexpr(SLICES)
BLOCK: tl.constexpr = tl.constexpr(1024)
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
# Of a slice without a finite logit: a difference of two is 0.
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit(do_not_specialize=["stride", "width"])
def log_sums_kernel(logits, stride, out, width):
    """out[b, s, :] = (m, l) of slice s of row b of logits    grid: (B, slices)

    logits  rows ``stride`` elements apart; a slice has ``width`` logits. out  fp32 [B, slices, 2]
    order   element i of a block is added to the sums of lane i, block by block; then lanes, by ``tl.sum``
    """
    row, part, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    source = logits + row.to(tl.int64) * stride + part * width
    most = tl.full((BLOCK,), LOWEST, tl.float32)
    for at in range(0, width, BLOCK):
        x = tl.load(source + at + column, mask=at + column < width, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, x)
    largest = tl.max(most, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, width, BLOCK):
        x = tl.load(source + at + column, mask=at + column < width, other=float("-inf")).to(tl.float32)
        total += tl.exp2((x - largest) * LOG2_E)
    pair = out + (row.to(tl.int64) * tl.num_programs(1) + part) * 2
    tl.store(pair, largest)
    tl.store(pair + 1, tl.sum(total, axis=0))


@triton.jit
def halved(x):
    """(even elements, odd elements) of a row x [N]."""
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))


@triton.jit
def node(largest, total):
    """(m, l) of pairs of neighbours, of rows [N]: [N / 2]."""
    left, right = halved(largest)
    left_sum, right_sum = halved(total)
    most = tl.maximum(left, right)
    left_share, right_share = tl.exp2((left - most) * LOG2_E), tl.exp2((right - most) * LOG2_E)
    return most, tl.fma(left_sum, left_share, right_sum * right_share)


@triton.jit
def join_kernel(pairs, out):
    """out[b] = log of the sum of exp of row b, from its eight slices, pairs [B, 8, 2]    grid: (B,)"""
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    wl.follow_previous_kernel()
    source = pairs + (row.to(tl.int64) * PARTS + part) * 2
    largest, total = tl.load(source), tl.load(source + 1)
    largest, total = node(largest, total)
    most, whole = node(largest, total)
    left, right = tl.split(most)
    left_sum, right_sum = tl.split(whole)
    top = tl.maximum(left, right)
    all_of_it = tl.fma(left_sum, tl.exp2((left - top) * LOG2_E), right_sum * tl.exp2((right - top) * LOG2_E))
    tl.store(out + row, top + tl.log(all_of_it))


def log_sums(logits: torch.Tensor, slices: int) -> torch.Tensor:
    """(m, l) [B, slices, 2] fp32 of equal slices of each row of logits [B, N], fp16, bf16 or fp32.

    ValueError where ``slices`` do not divide N, and for other shapes or dtypes.
    """
    check_like("log_sums", "logits", logits, None, FLOATS, ("B", "N"))
    check_count("log_sums", "slices", slices)
    batch, columns = logits.shape
    if slices < 1 or columns % slices:
        raise ValueError(f"log_sums: {columns} logits of a row are not {slices} equal slices; pad the vocabulary")
    logits = rows_contiguous(logits)
    out = torch.empty((batch, slices, 2), dtype=torch.float32, device=logits.device)
    if batch > 0:
        options = launch_options(capabilities_of(logits.device))
        log_sums_kernel[(batch, slices)](logits, logits.stride(0), out, columns // slices, num_warps=4, **options)
    return out


def join_log_sums(pairs: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exp [B] fp32 from pairs [B, 8, 2] of all slices in their order."""
    check_like("join_log_sums", "pairs", pairs, None, (torch.float32,), ("B", SLICES, 2))
    out = torch.empty(len(pairs), dtype=torch.float32, device=pairs.device)
    if len(pairs) > 0:
        options = launch_options(capabilities_of(pairs.device))
        join_kernel[(len(pairs),)](pairs.contiguous(), out, num_warps=1, **options)
    return out

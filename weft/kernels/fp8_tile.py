"""GEMM of one output tile of fp8 operands with scales (weft.kernels.fp8).

    C[m, n] = sum over groups g of (sum over k in g of x[m, k] * w[n, k]) * (x_scale[m, g] * w_scale[n, g])

A step along K is one dot, whose fp32 result is multiplied by the scales and added: the tensor cores' narrower
accumulator then holds at most 128 terms. Without groups the scales are applied once, at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import Fp8, spread


class Fp8Scales(NamedTuple):
    """Scales of both operands of a GEMM, passed to kernels as the argument ``fp8``.

    x             fp32 scales of the rows
    x_row, x_column  elements from row to row, and from group to group
    weight        fp32 scales of the weight, with rows of ``weight_row`` elements
    weight_rows   rows of the weight under one scale; 0: all
    columns       columns of the weight under one scale; 0: all of K, and x has a scale for each row
    uniform       all rows of a tile of the weight are under one scale, of a gated weight gate's
    expert        elements from the scales of one expert's weight to the next expert's
    two           of a gated weight: up's rows of a tile are under two scales, one after the other; else they are as gate's
    """

    x: torch.Tensor
    x_row: int
    x_column: int
    weight: torch.Tensor
    weight_row: int
    weight_rows: tl.constexpr
    columns: tl.constexpr
    uniform: tl.constexpr
    expert: int = 0
    two: tl.constexpr = tl.constexpr(False)


def scales_of_gemm(x: torch.Tensor, weight: Fp8, block_n: int, gated: bool) -> Fp8Scales:
    """Kernel argument ``fp8`` for a weight [N, K] or [experts, N, K].

    x  scales of the rows; block_n: rows of a tile of the weight, gate's or up's

    Up's rows begin amid a scale where N is no multiple of its rows. Read for each row their scales filled the registers: 2880
    features of gpt-oss spilled 2 KB a thread, and 2,048 tokens took one H200 26 ms, in bf16 1.1.
    """
    scales, (N, K) = weight.scales, weight.shape[-2:]
    rows = 0 if scales.shape[-2] == 1 else spread(scales.shape[-2], N)
    columns = 0 if scales.shape[-1] == 1 else spread(scales.shape[-1], K)
    uniform = rows % block_n == 0
    two = uniform and rows > 0 and gated and N // 2 % block_n != 0
    x_row, x_column = (step if size > 1 else 0 for size, step in zip(x.shape, x.stride(), strict=True))
    forms = map(tl.constexpr, (rows, columns, uniform))
    expert = scales.stride(0) if scales.dim() == 3 else 0
    return Fp8Scales(x, x_row, x_column, scales, scales.stride(-2), *forms, expert, tl.constexpr(two))


@triton.jit
def row_scales(fp8, rows, M, k):
    """Scales [rows] of rows of x at column k, 0 from row M on."""
    return tl.load(fp8.x + rows * fp8.x_row + k // 128 * fp8.x_column, mask=rows < M, other=0.0)


@triton.jit
def weight_scales(fp8, first, limit, k, BLOCK_N: tl.constexpr, expert=0, UP: tl.constexpr = False):
    """Scales [BLOCK_N] of an expert's rows from ``first`` on at column k; one scale if ``uniform``.

    UP  the rows are up's; if ``two`` (first scale, second scale, rows under the first one)
    """
    source = fp8.weight + tl.cast(expert, tl.int64) * fp8.expert
    if fp8.columns > 0:
        source += k // fp8.columns
    if UP and fp8.two:
        place = first // fp8.weight_rows
        second = tl.minimum(place + 1, (limit - 1) // fp8.weight_rows)
        low, high = tl.load(source + place * fp8.weight_row), tl.load(source + second * fp8.weight_row)
        return low, high, (place + 1) * fp8.weight_rows - first
    elif fp8.uniform:
        if fp8.weight_rows > 0:
            source += first // fp8.weight_rows * fp8.weight_row
        return tl.load(source)
    else:
        n = first + tl.arange(0, BLOCK_N)
        return tl.load(source + n // fp8.weight_rows * fp8.weight_row, mask=n < limit, other=0.0)


@triton.jit
def prefetch_weight_scales(fp8, first, K):
    """Prefetch into the L2 the uniform scales of a tile of the weight from row ``first`` on.

    A step along K takes less time than a load from memory, and its scales are loaded one step ahead.
    """
    if fp8.columns > 0 and fp8.uniform and fp8.weight_rows > 0:
        source = fp8.weight + first // fp8.weight_rows * fp8.weight_row + 4 * tl.arange(0, 128)
        there = (4 * tl.arange(0, 128) + 4 <= K // fp8.columns) & (source.to(tl.int64) % 16 == 0)
        wl.prefetch(source, tl.where(there, 16, 0))


@triton.jit
def scaled(acc, of_rows, of_weight, fp8, TRANSPOSED: tl.constexpr, UP: tl.constexpr = False):
    """A tile's sums, multiplied by the scales of its rows [BLOCK_M] and of the weight's rows.

    of_weight  ``weight_scales``
    """
    if UP and fp8.two:
        low, high, under_low = of_weight
        if TRANSPOSED:
            first = (tl.arange(0, acc.shape[0]) < under_low)[:, None]
            return acc * tl.where(first, (of_rows * low)[None, :], (of_rows * high)[None, :])
        else:
            first = (tl.arange(0, acc.shape[1]) < under_low)[None, :]
            return acc * tl.where(first, (of_rows * low)[:, None], (of_rows * high)[:, None])
    elif fp8.uniform:
        both = of_rows * of_weight
        if TRANSPOSED:
            return acc * both[None, :]
        else:
            return acc * both[:, None]
    elif TRANSPOSED:
        return acc * (of_rows[None, :] * of_weight[:, None])
    else:
        return acc * (of_rows[:, None] * of_weight[None, :])


@triton.jit
def fp8_dot(x, w, TRANSPOSED: tl.constexpr):
    """Compute x @ w.T, or if TRANSPOSED w @ x.T, in fp32."""
    if TRANSPOSED:
        return tl.dot(w, x.T)
    else:
        return tl.dot(x, w.T)


@triton.jit
def tile_scales(fp8, rows, M, column, N, k, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Scales at column k: of x's ``rows``, of a weight's rows from ``column`` on, and of up's if GATED."""
    of_weight = weight_scales(fp8, column, N, k, BLOCK_N)
    of_up = of_weight
    if GATED:
        of_up = weight_scales(fp8, N + column, 2 * N, k, BLOCK_N, UP=True)
    return row_scales(fp8, rows, M, k), of_weight, of_up


@triton.jit
def scaled_step(x, weight, fp8, N, row, column, k, scales, acc, up, TRANSPOSED: tl.constexpr, GATED: tl.constexpr):
    """``acc`` and ``up`` after a step at column k, of which ``tile_scales`` made ``scales``."""
    of_rows, of_weight, of_up = scales
    a = x.load([row, k])
    acc += scaled(fp8_dot(a, weight.load([column, k]), TRANSPOSED), of_rows, of_weight, fp8, TRANSPOSED)
    if GATED:
        up += scaled(fp8_dot(a, weight.load([N + column, k]), TRANSPOSED), of_rows, of_up, fp8, TRANSPOSED, UP=True)
    return acc, up


@triton.jit
def fp8_tile(x, weight, fp8, M, N, row, column, first, last, block, TRANSPOSED: tl.constexpr, GATED: tl.constexpr):
    """(x @ weight.T, x @ up.T) of a tile over steps first .. last - 1; the same twice unless GATED.

    Each is [block.m, block.n]; if TRANSPOSED, its transpose: block is ``Block`` of the small-M kernel, block.k at most 128, or
    256: two steps of 128 whose loads begin together.
    x, weight  descriptors over e4m3 [M, K] and [N, K], or [2 N, K] if GATED
    fp8        ``Fp8Scales``
    """
    BLOCK_M: tl.constexpr = block.n if TRANSPOSED else block.m
    BLOCK_N: tl.constexpr = block.m if TRANSPOSED else block.n
    BLOCK_K: tl.constexpr = block.k
    acc = tl.zeros((block.m, block.n), dtype=tl.float32)
    up = acc
    rows = row + tl.arange(0, BLOCK_M)
    # Loaded a step ahead, so that the tensor cores do not wait for them.
    start, end = first * BLOCK_K, last * BLOCK_K
    scales = tile_scales(fp8, rows, M, column, N, start, BLOCK_N, GATED)
    second = scales
    if BLOCK_K > 128:
        second = tile_scales(fp8, rows, M, column, N, start + 128, BLOCK_N, GATED)
    for k in range(start, end, BLOCK_K):
        if fp8.columns > 0:
            after = min(k + BLOCK_K, end - BLOCK_K)
            next_scales = tile_scales(fp8, rows, M, column, N, after, BLOCK_N, GATED)
            if BLOCK_K > 128:
                next_second = tile_scales(fp8, rows, M, column, N, after + 128, BLOCK_N, GATED)
            acc, up = scaled_step(x, weight, fp8, N, row, column, k, scales, acc, up, TRANSPOSED, GATED)
            if BLOCK_K > 128:
                acc, up = scaled_step(x, weight, fp8, N, row, column, k + 128, second, acc, up, TRANSPOSED, GATED)
                second = next_second
            scales = next_scales
        else:
            for half in tl.static_range((BLOCK_K + 127) // 128):
                a = x.load([row, k + 128 * half])
                acc += fp8_dot(a, weight.load([column, k + 128 * half]), TRANSPOSED)
                if GATED:
                    up += fp8_dot(a, weight.load([N + column, k + 128 * half]), TRANSPOSED)
    if fp8.columns == 0:
        acc = scaled(acc, scales[0], scales[1], fp8, TRANSPOSED)
        if GATED:
            up = scaled(up, scales[0], scales[2], fp8, TRANSPOSED, UP=True)
    return acc, up

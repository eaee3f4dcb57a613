"""Weights in 4 bits (weft.kernels.four_bit) in kernels: numbers of 16 bits, the GEMM of one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels import four_bit
from weft.kernels.four_bit import FourBit
from weft.language.lowering import stock
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Columns of a step along K, of its half that has half of every byte, and of half of that.
STEP: tl.constexpr = tl.constexpr(four_bit.BLOCK)
HALF: tl.constexpr = tl.constexpr(four_bit.BLOCK // 2)
QUARTER: tl.constexpr = tl.constexpr(four_bit.BLOCK // 4)
MIDDLE: tl.constexpr = tl.constexpr(four_bit.MIDDLE)
# Rows of a program of ``dequantize_kernel``.
ROWS = 64


class Grid(NamedTuple):
    """Scales of a ``FourBit`` weight, passed to kernels as the argument ``grid``.

    scales, zeros  of the weight, with rows of ``row`` elements
    columns        of a scale; 0: all of K
    has_zeros      else ``zeros`` are not read
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    row: int
    columns: tl.constexpr
    has_zeros: tl.constexpr


def grid_of(weight: FourBit) -> Grid:
    """Kernel argument ``grid`` of a weight, or of the rows of all experts."""
    scales = weight.scales.flatten(0, -2)
    zeros = scales if weight.zeros is None else weight.zeros.flatten(0, -2)
    columns = 0 if scales.shape[1] == 1 else weight.group
    return Grid(scales, zeros, scales.shape[1], tl.constexpr(columns), tl.constexpr(weight.zeros is not None))


@triton.jit
def of_columns(source, grid, rows, limit, k, K):
    """Values [rows, HALF] of ``source`` for columns from k on, of groups narrower than a quarter.

    0 from row ``limit`` and column K on.
    """
    ROWS: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = HALF // grid.columns
    at, inside = (source + rows.to(tl.int64) * grid.row)[:, None], (rows < limit)[:, None]
    group = k // grid.columns + tl.arange(0, GROUPS)[None, :]
    values = tl.load(at + group, mask=inside & (group * grid.columns < K), other=0)
    return tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, grid.columns)).reshape(ROWS, HALF)


@triton.jit
def of_quarters(source, grid, rows, limit, k, K):
    """Values of ``source`` for the four quarters of a step from k on, [rows] for each quarter.

    Groups have QUARTER columns or more; 0 from row ``limit`` and column K on. Each thread loads the few values of its rows, so
    no layout is converted.
    """
    of_rows, inside = source + rows.to(tl.int64) * grid.row, rows < limit
    values = ()
    for quarter in tl.static_range(4):
        if grid.columns == 0:
            values += (tl.load(of_rows, mask=inside, other=0),)
        else:
            # k is a multiple of STEP, and so of every group: quarters of one group have one address.
            group = k // grid.columns + quarter * QUARTER // grid.columns
            values += (tl.load(of_rows + group, mask=inside & (group * grid.columns < K), other=0),)
    return values


@triton.jit
def scales_of_step(grid, rows, limit, k, K):
    """Scales of a step from k on, and its zeros, to be loaded while the step before is multiplied.

    Four of ``of_quarters`` each. Of narrower groups nothing but k: they are loaded where they are used.
    """
    if grid.columns > 0 and grid.columns < QUARTER:
        return (k + tl.zeros((), tl.int32),)
    elif grid.has_zeros:
        return of_quarters(grid.scales, grid, rows, limit, k, K) + of_quarters(grid.zeros, grid, rows, limit, k, K)
    else:
        return of_quarters(grid.scales, grid, rows, limit, k, K)


@triton.jit
def of_two_quarters(first, second, grid):
    """[rows, HALF] of the values [rows] of its two quarters, or [rows, 1] if they are equal."""
    if grid.columns == 0 or grid.columns >= HALF:
        return first[:, None]
    else:
        ROWS: tl.constexpr = first.shape[0]
        both = tl.where(tl.arange(0, 2)[None, :] == 0, first[:, None], second[:, None])
        return tl.broadcast_to(both[:, :, None], (ROWS, 2, QUARTER)).reshape(ROWS, HALF)


@triton.jit
def of_half(source, values, FIRST: tl.constexpr, HIGH: tl.constexpr, grid, rows, limit, k, K):
    """Values of a step's first half, or if HIGH of its second, from ``values`` or ``source``.

    values  ``scales_of_step``, from number FIRST on; of narrow groups they are loaded from ``source``
    """
    if grid.columns > 0 and grid.columns < QUARTER:
        return of_columns(source, grid, rows, limit, k + HIGH * HALF, K)
    else:
        return of_two_quarters(values[FIRST + 2 * HIGH], values[FIRST + 2 * HIGH + 1], grid)


@triton.jit
def weight_of(bytes, HIGH: tl.constexpr, grid, values, rows, limit, k, K, dtype: tl.constexpr):
    """The weight [rows, HALF] of the first half of a step from k on, or if HIGH of its second.

    bytes   uint8 [rows, HALF], whose low halves are the numbers, or if HIGH their high halves
    values  ``scales_of_step``
    """
    scales = of_half(grid.scales, values, 0, HIGH, grid, rows, limit, k, K)
    if grid.scales.dtype.element_ty == tl.uint8 and dtype == tl.bfloat16:
        return scaled_e2m1(bytes, scales, HIGH)
    numbers = bytes >> (4 * HIGH) & 15
    if grid.scales.dtype.element_ty == tl.uint8:
        return scaled_by_fp32(numbers, scales).to(dtype)
    else:
        # 2**23 + number, whose lowest bits are the number's.
        large = (numbers.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        if grid.has_zeros:
            zero = 8388608.0 + of_half(grid.zeros, values, 4, HIGH, grid, rows, limit, k, K).to(tl.float32)
        else:
            zero = 8388608.0 + MIDDLE
        return ((large - zero) * scales).to(dtype)


@triton.jit
def scaled_by_fp32(numbers, scales):
    """fp32 of e2m1 ``numbers``, uint8 in 4 bits, times 2**(scales - 127) of e8m0."""
    # e2m1's exponent and mantissa in fp32's lowest ones: 2**-126 times the number, also where it is subnormal.
    bits = (numbers & 8).to(tl.uint32) << 28 | (numbers & 7).to(tl.uint32) << 22
    exponent = scales.to(tl.uint32)
    # e8m0: its smallest is subnormal in fp32, its largest NaN.
    scale = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True) * (2.0**126) * scale.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def scaled_e2m1(bytes, scales, HIGH: tl.constexpr):
    """bf16 of the e2m1 numbers in the low or HIGH halves of ``bytes``, times 2**(scales - 127) of e8m0.

    Exact: bf16 has the exponents of fp32, and two bits of mantissa suffice.
    """
    if stock.multiplies_bf16_in_pairs():
        exponent = scales.to(tl.int32)
        # As in fp32: the smallest is subnormal, the largest NaN.
        scale = tl.where(exponent == 0, 0x40, tl.where(exponent == 255, 0x7FC0, exponent << 7))
        return stock.scaled_e2m1(bytes, scale.to(tl.int16).to(tl.bfloat16, bitcast=True), HIGH)
    else:
        return scaled_by_fp32(bytes >> (4 * HIGH) & 15, scales).to(tl.bfloat16)


@triton.jit
def four_bit_dot(low, high, bytes, grid, values, rows, limit, k, K, acc, TRANSPOSED: tl.constexpr):
    """acc + x @ w.T of STEP columns from k on, or if TRANSPOSED its transpose.

    low, high  x [M, HALF] of columns from k on, and from k + HALF on
    bytes      [rows, HALF] of the weight; values: ``scales_of_step``
    """
    first = weight_of(bytes, 0, grid, values, rows, limit, k, K, low.dtype)
    second = weight_of(bytes, 1, grid, values, rows, limit, k, K, low.dtype)
    if TRANSPOSED:
        acc = tl.dot(first, low.T, acc)
        return tl.dot(second, high.T, acc)
    else:
        acc = tl.dot(low, first.T, acc)
        return tl.dot(high, second.T, acc)


@triton.jit
def four_bit_tile(
    x, weight, grid, N, K, row, column, first, last, block, TRANSPOSED: tl.constexpr, GATED: tl.constexpr
):
    """(x @ weight.T, x @ up.T) of a tile over steps first .. last - 1; the same twice unless GATED.

    A step is STEP columns, and its scales are loaded a step ahead. Each is [block.m, block.n]; if TRANSPOSED, its transpose:
    block is ``Block`` of the small-M kernel.
    x       descriptor over [M, K] in blocks of HALF columns; weight: over bytes of [N, K], or of [2 N, K] if GATED
    grid    ``Grid``
    """
    BLOCK_N: tl.constexpr = block.m if TRANSPOSED else block.n
    acc = tl.zeros((block.m, block.n), dtype=tl.float32)
    up = acc
    n = column + tl.arange(0, BLOCK_N)
    values = scales_of_step(grid, n, N, first * STEP, K)
    of_up = values
    if GATED:
        of_up = scales_of_step(grid, N + n, 2 * N, first * STEP, K)
    for k in range(first * STEP, last * STEP, STEP):
        bytes = weight.load([column, k // 2])
        low = x.load([row, k])
        high = x.load([row, k + HALF])
        next_values = scales_of_step(grid, n, N, k + STEP, K)
        acc = four_bit_dot(low, high, bytes, grid, values, n, N, k, K, acc, TRANSPOSED)
        values = next_values
        if GATED:
            bytes = weight.load([N + column, k // 2])
            next_values = scales_of_step(grid, N + n, 2 * N, k + STEP, K)
            up = four_bit_dot(low, high, bytes, grid, of_up, N + n, 2 * N, k, K, up, TRANSPOSED)
            of_up = next_values
    return acc, up


@triton.jit
def dequantize_kernel(data, grid, out, N, K, BLOCK_ROWS: tl.constexpr):
    """out[N, K] of a ``FourBit`` weight's ``data``        grid: (cdiv(N, BLOCK_ROWS), cdiv(K, STEP))"""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.program_id(1) * STEP
    j = tl.arange(0, HALF)[None, :]
    row, inside = rows.to(tl.int64)[:, None], (rows < N)[:, None]
    bytes = tl.load(data + row * (tl.cdiv(K, STEP) * HALF) + k // 2 + j, mask=inside, other=0)
    values = scales_of_step(grid, rows, N, k, K)
    first = weight_of(bytes, 0, grid, values, rows, N, k, K, out.dtype.element_ty)
    second = weight_of(bytes, 1, grid, values, rows, N, k, K, out.dtype.element_ty)
    at = out + row * K + k + j
    wl.follow_previous_kernel()  # the buffer of the result may be one that it reads
    tl.store(at, first, mask=inside & (k + j < K))
    tl.store(at + HALF, second, mask=inside & (k + HALF + j < K))


def dequantized(weight: FourBit, dtype: torch.dtype, caps: Capabilities) -> torch.Tensor:
    """``weight.dequantized(dtype)``, of 16 bits, in one kernel."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    N, K = out.numel() // weight.columns, weight.columns
    launch = launch_on(
        weight.device, dequantize_kernel, (), lambda: {"BLOCK_ROWS": ROWS, "num_warps": 4, **launch_options(caps)}
    )
    launch((cdiv(N, ROWS), cdiv(K, STEP.value)), weight.data, grid_of(weight), out, N, K)
    return out

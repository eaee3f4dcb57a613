"""Weights in 4 bits (weft.kernels.four_bit) in kernels: numbers of 16 bits, the GEMM of one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels import four_bit
from weft.kernels.four_bit import FourBit
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Columns of a step along K, and of its half that has half of every byte.
STEP: tl.constexpr = tl.constexpr(four_bit.BLOCK)
HALF: tl.constexpr = tl.constexpr(four_bit.BLOCK // 2)
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
    """Values of ``source`` for columns k .. k + HALF - 1, [rows, HALF], or [rows, 1] if they are equal.

    0 from row ``limit`` and column K on.
    """
    ROWS: tl.constexpr = rows.shape[0]
    of_rows = source + rows.to(tl.int64) * grid.row
    if grid.columns == 0:
        return tl.load(of_rows, mask=rows < limit, other=0)[:, None]
    elif grid.columns >= HALF:
        return tl.load(of_rows + k // grid.columns, mask=(rows < limit) & (k < K), other=0)[:, None]
    else:
        at, inside = of_rows[:, None], (rows < limit)[:, None]
        GROUPS: tl.constexpr = HALF // grid.columns
        group = k // grid.columns + tl.arange(0, GROUPS)[None, :]
        values = tl.load(at + group, mask=inside & (group * grid.columns < K), other=0)
        return tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, grid.columns)).reshape(ROWS, HALF)


@triton.jit
def weight_of(numbers, grid, rows, limit, k, K, dtype: tl.constexpr):
    """The weight [rows, HALF] from column k on, of ``numbers`` uint8 in their low 4 bits."""
    scales = of_columns(grid.scales, grid, rows, limit, k, K)
    if grid.scales.dtype.element_ty == tl.uint8:
        # e2m1's exponent and mantissa in fp32's lowest ones: 2**-126 times the number, also where it is subnormal.
        bits = (numbers & 8).to(tl.uint32) << 28 | (numbers & 7).to(tl.uint32) << 22
        exponent = scales.to(tl.uint32)
        # e8m0: its smallest is subnormal in fp32, its largest NaN.
        scale = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        return (bits.to(tl.float32, bitcast=True) * (2.0**126) * scale.to(tl.uint32).to(tl.float32, bitcast=True)).to(
            dtype
        )
    else:
        # 2**23 + number, whose lowest bits are the number's.
        large = (numbers.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        if grid.has_zeros:
            zero = 8388608.0 + of_columns(grid.zeros, grid, rows, limit, k, K).to(tl.float32)
        else:
            zero = 8388608.0 + MIDDLE
        return ((large - zero) * scales).to(dtype)


@triton.jit
def four_bit_dot(low, high, bytes, grid, rows, limit, k, K, acc, TRANSPOSED: tl.constexpr):
    """acc + x @ w.T of STEP columns from k on, or if TRANSPOSED its transpose.

    low, high  x [M, HALF] of columns from k on, and from k + HALF on
    bytes      [rows, HALF] of the weight
    """
    first = weight_of(bytes & 15, grid, rows, limit, k, K, low.dtype)
    second = weight_of(bytes >> 4, grid, rows, limit, k + HALF, K, low.dtype)
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

    A step is STEP columns. Each is [block.m, block.n]; if TRANSPOSED, its transpose: block is ``Block`` of the small-M kernel.
    x       descriptor over [M, K] in blocks of HALF columns; weight: over bytes of [N, K], or of [2 N, K] if GATED
    grid    ``Grid``
    """
    BLOCK_N: tl.constexpr = block.m if TRANSPOSED else block.n
    acc = tl.zeros((block.m, block.n), dtype=tl.float32)
    up = acc
    n = column + tl.arange(0, BLOCK_N)
    for k in range(first * STEP, last * STEP, STEP):
        bytes = weight.load([column, k // 2])
        low = x.load([row, k])
        high = x.load([row, k + HALF])
        acc = four_bit_dot(low, high, bytes, grid, n, N, k, K, acc, TRANSPOSED)
        if GATED:
            bytes = weight.load([N + column, k // 2])
            up = four_bit_dot(low, high, bytes, grid, N + n, 2 * N, k, K, up, TRANSPOSED)
    return acc, up


@triton.jit
def dequantize_kernel(data, grid, out, N, K, BLOCK_ROWS: tl.constexpr):
    """out[N, K] of a ``FourBit`` weight's ``data``        grid: (cdiv(N, BLOCK_ROWS), cdiv(K, STEP))"""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.program_id(1) * STEP
    j = tl.arange(0, HALF)[None, :]
    row, inside = rows.to(tl.int64)[:, None], (rows < N)[:, None]
    bytes = tl.load(data + row * (tl.cdiv(K, STEP) * HALF) + k // 2 + j, mask=inside, other=0)
    first = weight_of(bytes & 15, grid, rows, N, k, K, out.dtype.element_ty)
    second = weight_of(bytes >> 4, grid, rows, N, k + HALF, K, out.dtype.element_ty)
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

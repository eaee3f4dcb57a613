"""Weights in 4 bits (weft.kernels.four_bit) in kernels: numbers of 16 bits, the GEMM of one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels import four_bit
from weft.kernels.four_bit import MX_GROUP, SCALE_BYTES, FourBit
from weft.language.lowering import stock
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Columns of a block and of a quarter, whose numbers are at one place of the block's words.
COLUMNS: tl.constexpr = tl.constexpr(four_bit.BLOCK)
OF_WORD: tl.constexpr = tl.constexpr(four_bit.OF_WORD)
QUARTER: tl.constexpr = tl.constexpr(four_bit.BLOCK // four_bit.OF_WORD)
MIDDLE: tl.constexpr = tl.constexpr(four_bit.MIDDLE)
# Rows of a program of ``dequantize_kernel``.
ROWS = 64


class Grid(NamedTuple):
    """Scales of a ``FourBit`` weight, passed to kernels as the argument ``grid``.

    scales, zeros  of the weight, with rows of ``row`` elements
    columns        of a scale; 0: all of K
    has_zeros      else ``zeros`` are not read
    in_words       ``scales`` are int32: those of a block of MXFP4, of 32 columns each, the first in the lowest byte
    is_small       scales of MXFP4, none more than 2
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    row: int
    columns: tl.constexpr
    has_zeros: tl.constexpr
    in_words: tl.constexpr = tl.constexpr(False)
    is_small: tl.constexpr = tl.constexpr(False)


def words_of(weight: FourBit) -> torch.Tensor:
    """``data`` as int16 words, as kernels take it."""
    return weight.data.view(torch.int16)


def grid_of(weight: FourBit) -> Grid:
    """Kernel argument ``grid`` of a weight, or of the rows of all experts."""
    scales, is_small = weight.scales.flatten(0, -2), weight.scales.dtype == torch.int8
    if is_small:
        scales = scales.view(torch.uint8)
    (rows, count), row = scales.shape, scales.stride(0) if len(scales) > 1 else scales.shape[1]
    # Rows further apart may have anything between them.
    in_words = row == cdiv(count, SCALE_BYTES) * SCALE_BYTES and scales.data_ptr() % SCALE_BYTES == 0
    if weight.is_mxfp4 and weight.group == MX_GROUP and in_words:
        words = scales.as_strided((rows, row), (row, 1)).view(torch.int32)
        return Grid(words, words, row // SCALE_BYTES, *map(tl.constexpr, (MX_GROUP, False, True, is_small)))
    zeros = scales if weight.zeros is None else weight.zeros.flatten(0, -2)
    columns = 0 if count == 1 else weight.group
    scales, zeros = scales.contiguous(), zeros.contiguous()
    return Grid(scales, zeros, count, *map(tl.constexpr, (columns, weight.zeros is not None, False, is_small)))


@triton.jit
def of_quarter(source, grid, rows, k, K):
    """Values of ``source`` for the QUARTER columns from k on, [rows, QUARTER] or if equal [rows, 1].

    0 from column K on.
    """
    ROWS: tl.constexpr = rows.shape[0]
    of_rows = source + rows.to(tl.int64) * grid.row
    if grid.columns == 0:
        return tl.load(of_rows)[:, None]
    elif grid.columns >= QUARTER:
        # By groups, not by k: quarters of one group have one address and one mask.
        group = k // grid.columns
        return tl.load(of_rows + group, mask=group * grid.columns < K, other=0)[:, None]
    else:
        GROUPS: tl.constexpr = QUARTER // grid.columns
        group = k // grid.columns + tl.arange(0, GROUPS)[None, :]
        values = tl.load(of_rows[:, None] + group, mask=group * grid.columns < K, other=0)
        return tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, grid.columns)).reshape(ROWS, QUARTER)


@triton.jit
def scaled_by_fp32(numbers, scales):
    """fp32 of e2m1 ``numbers`` in 4 bits, times 2**(scales - 127) of e8m0."""
    # e2m1's exponent and mantissa in fp32's lowest ones: 2**-126 times the number, also where it is subnormal.
    bits = (numbers & 8).to(tl.uint32) << 28 | (numbers & 7).to(tl.uint32) << 22
    exponent = scales.to(tl.uint32)
    # e8m0: its smallest is subnormal in fp32, its largest NaN.
    scale = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True) * (2.0**126) * scale.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_of(words, PLACE: tl.constexpr):
    """Numbers of 4 bits at one PLACE of ``words`` (``four_bit.place_bits``), int32."""
    bits = words.to(tl.int32)
    if PLACE == 3:
        return bits >> 10 & 3 | bits >> 11 & 12
    return bits >> (6 - 3 * PLACE) & 7 | bits >> (12 - 3 * PLACE) & 8


@triton.jit
def scaled_e2m1(words, scales, PLACE: tl.constexpr, is_small: tl.constexpr, dtype: tl.constexpr):
    """``dtype`` of the e2m1 numbers at one PLACE of ``words``, times 2**(scales - 127) of e8m0.

    is_small  no scale is more than 2

    Exact in bf16, which has the exponents of fp32, and mantissa enough for two bits.
    """
    if dtype == tl.bfloat16 and stock.multiplies_bf16_in_pairs():
        exponent = scales.to(tl.int32)
        if is_small:
            # 2**126 times the scale, a number that is not subnormal.
            scale = (exponent << 7) + (126 << 7)
        else:
            # As in fp32: the smallest is subnormal, the largest NaN.
            scale = tl.where(exponent == 0, 0x40, tl.where(exponent == 255, 0x7FC0, exponent << 7))
        return stock.scaled_e2m1(words, scale.to(tl.int16).to(tl.bfloat16, bitcast=True), PLACE, is_small)
    else:
        return scaled_by_fp32(e2m1_of(words, PLACE), scales).to(dtype)


@triton.jit
def quarter_of(words, of_block, PLACE: tl.constexpr, grid, rows, k, K, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """The weight [rows, QUARTER] from column k + PLACE * QUARTER on, of ``words`` of a block from k on.

    words     [rows, QUARTER]
    of_block  [rows] elements of grid.scales for the block, if BLOCKS
    """
    k += PLACE * QUARTER
    if grid.in_words:
        return scaled_e2m1(words, (of_block >> (8 * PLACE) & 255)[:, None], PLACE, grid.is_small, dtype)
    if BLOCKS:
        scales = of_block[:, None]
    else:
        scales = of_quarter(grid.scales, grid, rows, k, K)
    if grid.scales.dtype.element_ty == tl.uint8:
        return scaled_e2m1(words, scales, PLACE, grid.is_small, dtype)
    if grid.has_zeros:
        zero = of_quarter(grid.zeros, grid, rows, k, K).to(tl.float32)
    else:
        zero = tl.full((1, 1), MIDDLE, tl.float32)
    if dtype == tl.bfloat16 and grid.scales.dtype.element_ty == tl.bfloat16 and stock.multiplies_bf16_in_pairs():
        # A number less its zero has few bits, so that a product of bf16 is rounded once, as that of fp32.
        return stock.scaled_int4(words, scales, (-128.0 - zero).to(tl.bfloat16), PLACE)
    # 2**23 + number, whose lowest bits are the number's.
    large = ((words.to(tl.int32) >> (4 * PLACE) & 15) | 0x4B000000).to(tl.float32, bitcast=True)
    return ((large - (8388608.0 + zero)) * scales.to(tl.float32)).to(dtype)


@triton.jit
def side_by_side(left, right):
    """[rows, 2 n] of two blocks [rows, n], as views: each thread keeps the elements that it has."""
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def block_of(words, scales, grid, rows, k, K, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """The weight [rows, COLUMNS] of a block from column k on.

    words   [rows, QUARTER]; scales: [rows] of grid.scales if BLOCKS
    """
    first = quarter_of(words, scales, 0, grid, rows, k, K, dtype, BLOCKS)
    second = quarter_of(words, scales, 1, grid, rows, k, K, dtype, BLOCKS)
    third = quarter_of(words, scales, 2, grid, rows, k, K, dtype, BLOCKS)
    fourth = quarter_of(words, scales, 3, grid, rows, k, K, dtype, BLOCKS)
    return side_by_side(side_by_side(first, second), side_by_side(third, fourth))


@triton.jit
def weight_of(words, grid, rows, k, K, dtype: tl.constexpr):
    """The weight [rows, COLUMNS or 2 COLUMNS] from column k on.

    words  [rows, QUARTER or 2 QUARTER]
    rows   numbers of rows that the weight has: of a ragged tile the last one again

    Triton copies the scales of two blocks ahead, as it does ``words``. Those of one block, fewer than threads, each thread
    would copy for all threads of its row: 64 rows take longer.
    """
    # A row has one element of grid.scales for a block: a scale, or a word of MXFP4's four.
    BLOCKS: tl.constexpr = grid.in_words or grid.columns == COLUMNS
    if words.shape[1] == QUARTER:
        scales = rows
        if BLOCKS:
            at = grid.scales + rows.to(tl.int64) * grid.row + k // COLUMNS
            scales = tl.load(at, mask=k < K, other=0)
        return block_of(words, scales, grid, rows, k, K, dtype, BLOCKS)
    else:
        tl.static_assert(words.shape[1] == 2 * QUARTER, "a step along K has one block or two")
        left, right = tl.split(words.reshape(words.shape[0], 2, QUARTER).permute(0, 2, 1))
        of_left, of_right = rows, rows
        if BLOCKS:
            block = k // COLUMNS + tl.arange(0, 2)[None, :]
            at = grid.scales + rows.to(tl.int64)[:, None] * grid.row + block
            both = tl.load(at, mask=block * COLUMNS < K, other=0)
            of_left, of_right = tl.split(both)
        return side_by_side(
            block_of(left, of_left, grid, rows, k, K, dtype, BLOCKS),
            block_of(right, of_right, grid, rows, k + COLUMNS, K, dtype, BLOCKS),
        )


@triton.jit
def four_bit_tile(
    x, weight, grid, N, K, row, column, first, last, block, TRANSPOSED: tl.constexpr, GATED: tl.constexpr
):
    """(x @ weight.T, x @ up.T) of a tile over steps first .. last - 1; the same twice unless GATED.

    Each is [block.m, block.n]; if TRANSPOSED, its transpose. A step is block.k columns.
    x       descriptor over [M, K]; weight: over int16 words of [N, K], or of [2 N, K] if GATED
    grid    ``Grid``; block: ``Block`` of the small-M kernel
    """
    BLOCK_N: tl.constexpr = block.m if TRANSPOSED else block.n
    acc = tl.zeros((block.m, block.n), dtype=tl.float32)
    up = acc
    n = tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
    for k in range(first * block.k, last * block.k, block.k):
        words = weight.load([column, k // OF_WORD])
        a = x.load([row, k])
        b = weight_of(words, grid, n, k, K, a.dtype)
        if TRANSPOSED:
            acc = tl.dot(b, a.T, acc)
        else:
            acc = tl.dot(a, b.T, acc)
        if GATED:
            words = weight.load([N + column, k // OF_WORD])
            b = weight_of(words, grid, N + n, k, K, a.dtype)
            if TRANSPOSED:
                up = tl.dot(b, a.T, up)
            else:
                up = tl.dot(a, b.T, up)
    return acc, up


@triton.jit
def dequantize_kernel(words, grid, out, N, K, BLOCK_ROWS: tl.constexpr):
    """out[N, K] of a ``FourBit`` weight's ``words``        grid: (cdiv(N, BLOCK_ROWS), cdiv(K, COLUMNS))"""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.program_id(1) * COLUMNS
    row, inside = rows.to(tl.int64)[:, None], (rows < N)[:, None]
    at = row * (tl.cdiv(K, COLUMNS) * QUARTER) + k // OF_WORD + tl.arange(0, QUARTER)[None, :]
    of_words = tl.load(words + at, mask=inside, other=0)
    block = weight_of(of_words, grid, tl.minimum(rows, N - 1), k, K, out.dtype.element_ty)
    column = k + tl.arange(0, COLUMNS)[None, :]
    wl.follow_previous_kernel()  # the buffer of the result may be one that it reads
    tl.store(out + row * K + column, block, mask=inside & (column < K))


def dequantized(weight: FourBit, dtype: torch.dtype, caps: Capabilities) -> torch.Tensor:
    """``weight.dequantized(dtype)``, of 16 bits, in one kernel."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    N, K = out.numel() // weight.columns, weight.columns
    launch = launch_on(
        weight.device, dequantize_kernel, (), lambda: {"BLOCK_ROWS": ROWS, "num_warps": 4, **launch_options(caps)}
    )
    launch((cdiv(N, ROWS), cdiv(K, four_bit.BLOCK)), words_of(weight), grid_of(weight), out, N, K)
    return out

"""Rows of e4m3 as int32 words, which travel between ranks: four columns a word, 128 a scale.

    word i of a group = columns 4 i .. 4 i + 3, the first in the lowest byte         scales: weft.kernels.fp8

No word is -2**31, the mark of memory that is not yet written (weft.language.lamport): three zeros below -0.0 are sent as four
zeros.

Error of a finite value x that is put into words and read back, s the scale of its group, L its largest finite magnitude:

    |x - read back| <= min(16 s, max(|x| / 16, s / 1024)) + 2**-22 |x|,  at most L / 28 + 2**-22 L  where L >= 5.3e-36

e4m3 has three bits of fraction: half a unit in the last place is at most 1/16 of the value, 16 for values of 256 to 448, and
2**-10 below 2**-6. s = L / 448, so that 16 s = L / 28. The last term covers the fp32 roundings of s, of 1 / s and of both
multiplications. Zeros stay zeros. Below L = 448 * 2**-126 s is 2**-126, and the error at most L / 16 + 2**-136. NaN and
infinities read back as NaN, and leave the other values of their group as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.fp8 import COLUMNS, in_one_layout, quantized

# Words of a group of 128 columns.
WORDS: tl.constexpr = tl.constexpr(32)
UNWRITTEN: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit
def group_place(group, n, width):
    """(offsets int64 [G, 128], mask) of ``group`` [G] int32, numbered along rows of ``width`` columns.

    n elements in all; the last group of a row may be ragged.
    """
    of_row = tl.cdiv(width, COLUMNS)
    row = group // of_row
    columns = ((group - row * of_row) * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * width + columns
    return at, (columns < width) & (at < n)


@triton.jit
def words_of(x):
    """(words [G * 32], scales [G]) of groups ``x`` [G, 128]."""
    GROUPS: tl.constexpr = x.shape[0]
    rows, scales = quantized(in_one_layout(x))
    # In pairs, as a conversion makes them. Where a pair comes apart, ptxas 12.8 of Triton 3.6 may take its upper byte from a
    # register that nothing has written: sums of four octets had wrong bytes on H200s, in tiles of 32 columns a thread and more.
    octets = rows.to(tl.uint8, bitcast=True).to(tl.int32).reshape(GROUPS * WORDS, 2, 2)
    # Disjoint bits: their sum is their union.
    pairs = tl.sum(octets << (8 * tl.arange(0, 2))[None, None, :], axis=2)
    words = tl.sum(pairs << (16 * tl.arange(0, 2))[None, :], axis=1)
    return tl.where(words == UNWRITTEN, 0, words), scales.reshape(GROUPS)


@triton.jit
def octet(words, PLACE: tl.constexpr):
    """Column PLACE of each of ``words``, fp32, without its scale."""
    return ((words >> (8 * PLACE)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def values_of(words, scales):
    """Groups [G, 128] in fp32 of words [G * 32] and scales [G]."""
    GROUPS: tl.constexpr = scales.shape[0]
    even = tl.join(octet(words, 0), octet(words, 2))
    odd = tl.join(octet(words, 1), octet(words, 3))
    return tl.join(even, odd).reshape(GROUPS, COLUMNS) * scales[:, None]


@triton.jit
def sum_in_order(words, scales, COUNT: tl.constexpr):
    """Sum of COUNT rows from row 0 on, [G, 128] fp32: words [ROWS, G * 32] with scales [ROWS, G].

    Rows are taken out as words: as columns they would pass four times as many bytes through shared memory.
    """
    row = tl.arange(0, words.shape[0])[:, None]
    total = tl.zeros((scales.shape[1], COLUMNS), tl.float32)
    for at in tl.static_range(COUNT):
        of_row = tl.sum(tl.where(row == at, words, 0), axis=0)
        total += values_of(of_row, tl.sum(tl.where(row == at, scales, 0.0), axis=0))
    return total

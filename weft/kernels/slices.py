"""Sums over slices of K in one binary tree, of the same bits for any rows and ranks.

K of a GEMM is cut into SLICES slices of equal length. A leaf is the sum over one slice, in fp32, a step of block.k after
another. Neighbouring nodes are added, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), by whatever holds them: a program, the kernel
after it, or the ranks' all-reduce. Where nodes travel between ranks, every node of the tree is rounded to the dtype that
travels, also the nodes that stay within a rank.

    rank 0 of 2   0 1 2 3 -> node of four -- sent --> node of eight
    rank 1 of 2   4 5 6 7 -> node of four -- sent --> node of eight
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language.lowering import stock

# Slices of K of a GEMM over all ranks: a row-parallel one, whose ranks hold 8 / W slices each.
SLICES = 8


@triton.jit
def shape_free_dots():
    """Mark a program whose dots have bits that depend on no block's rows or columns.

    On GPUs that is the instructions' doing; the simulator computes such a program's dots so.
    """
    stock.exact_dots()


@triton.jit
def as_node(x, ROUNDED: tl.constexpr, dtype: tl.constexpr):
    """``x``, fp32, as a node of the tree.

    If ROUNDED it is rounded to ``dtype``, and never -0.0, which no transport keeps.
    """
    if ROUNDED:
        x = x.to(dtype).to(tl.float32)
        return tl.where(x == 0.0, 0.0, x)
    else:
        return x


@triton.jit
def joined(left, right, ROUNDED: tl.constexpr, dtype: tl.constexpr):
    """Node above two neighbours, fp32."""
    return as_node(left + right, ROUNDED, dtype)


@triton.jit
def node_of(source, mask, stride, COUNT: tl.constexpr, ROUNDED: tl.constexpr, dtype: tl.constexpr):
    """Node above COUNT neighbours, ``stride`` elements apart from ``source`` on, fp32.

    COUNT is 1, 2, 4 or 8.
    """
    nodes = ()
    for place in tl.static_range(COUNT):
        nodes += (tl.load(source + place * tl.cast(stride, tl.int64), mask=mask, other=0.0).to(tl.float32),)
    for _ in tl.static_range(3):
        if len(nodes) > 1:
            above = ()
            for pair in tl.static_range(len(nodes) // 2):
                above += (joined(nodes[2 * pair], nodes[2 * pair + 1], ROUNDED, dtype),)
            nodes = above
    return nodes[0]


@triton.jit
def node_of_ranks(received):
    """Node above the ranks' rows [ROWS, BLOCK], every node rounded to their dtype.

    ROWS is 1, 2, 4 or 8.
    """
    dtype: tl.constexpr = received.dtype
    BLOCK: tl.constexpr = received.shape[1]
    x = received.to(tl.float32)
    for _ in tl.static_range(2):
        if x.shape[0] > 2:
            x = as_node(tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, BLOCK)), axis=1), True, dtype)
    return as_node(tl.sum(x, axis=0), True, dtype)

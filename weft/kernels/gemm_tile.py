"""GEMM of one output tile, shared by all kernels: its split-K partials, and how it is stored.

``C[M, N] = A[M, K] @ B[N, K].T``, accumulated in fp32. Operands are read through tensor descriptors (TMA on NVIDIA from
sm_90 on, ordinary loads elsewhere) or, where a row does not start on 16 bytes, through masked pointer loads, chosen by a
constexpr.

Along K the accumulator has half of all registers, and a value computed before that loop for use after it would be spilled. So
addresses are computed where they are used (``wl.zero_here``), and a large tile is finished in ``halves``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.tile_schedule import contributors


class Block(NamedTuple):
    """Compile-time sizes of an output tile, passed to kernels as the argument ``block``.

    m, n, k      rows and columns of the tile, and the step along K
    descriptors  operands are tensor descriptors, else pointers
    join_rows    rows of a split-K tile that are summed at a time
    piece        elements of a finished tile that leave in each step along K of the next one
    """

    m: tl.constexpr
    n: tl.constexpr
    k: tl.constexpr
    descriptors: tl.constexpr
    join_rows: tl.constexpr
    piece: tl.constexpr


class Operand(NamedTuple):
    """GEMM operand in a kernel: a tensor descriptor over [rows, K], or a pointer to rows ``stride`` apart."""

    data: tl.tensor
    stride: tl.tensor
    rows: tl.tensor


class Sizes(NamedTuple):
    """Sizes of a GEMM a[M, K] @ b[N, K].T, passed to kernels as the argument ``sizes``.

    M is a separate argument: kernels are compiled for N, K and strides that are multiples of 16, but not for each M's.

    a_stride, b_stride  elements from row to row
    """

    N: tl.tensor
    K: tl.tensor
    a_stride: tl.tensor
    b_stride: tl.tensor


class Outgoing(NamedTuple):
    """A copy that a GEMM makes along K: target[0 : count] = source[0 : count]; count 0 for none."""

    source: tl.tensor
    target: tl.tensor
    count: tl.tensor


class SplitK(NamedTuple):
    """Scratch memory of split-K partials, passed to kernels as the argument ``split``.

    partials  fp32 [programs, tile]: each program's partial tile
    arrivals  int32 [split tiles]: arrival counters of the partial tiles; 0 between kernels
    """

    partials: tl.tensor
    arrivals: tl.tensor


@triton.jit
def gemm_tile(a, b, row, column, K, first, last, outgoing, block, COPIES: tl.constexpr):
    """acc[block.m, block.n] (fp32) = a[row : row + block.m, k] @ b[column : column + block.n, k].T

    k     steps first .. last - 1 of block.k columns
    a, b  ``Operand``. Rows outside count as zeros. The order of additions depends on block.k and ``first``.

    COPIES: the loop copies ``outgoing``, block.piece elements a step and the rest at the end, so that a link is loaded
    evenly. The source is memory of this program that a CTA barrier has made readable.
    """
    BLOCK_M: tl.constexpr = block.m
    BLOCK_N: tl.constexpr = block.n
    BLOCK_K: tl.constexpr = block.k
    PIECE: tl.constexpr = block.piece
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    moved = 0
    if COPIES:
        element = tl.arange(0, PIECE)
        piece = tl.load(outgoing.source + element, mask=element < outgoing.count, other=0.0)
    if block.descriptors:
        for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
            acc = tl.dot(a.data.load([row, k]), b.data.load([column, k]).T, acc, input_precision="ieee")
            if COPIES:
                # Loaded a step ago: the tensor cores do not wait for it.
                tl.store(outgoing.target + moved + element, piece, mask=element < outgoing.count - moved)
                moved += PIECE
                piece = tl.load(outgoing.source + moved + element, mask=element < outgoing.count - moved, other=0.0)
    else:
        m, n, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        a_stride = a.stride + 16 * wl.zero_here()
        b_stride = b.stride + 16 * wl.zero_here()
        # 64-bit offsets to the tile, 32-bit ones in it: half the registers of a pointer for each element.
        a_tile = a.data + tl.cast(row, tl.int64) * a_stride
        b_tile = b.data + tl.cast(column, tl.int64) * b_stride
        for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
            deep = k + depth < K
            x_mask = (m < a.rows - row)[:, None] & deep[None, :]
            y_mask = (n < b.rows - column)[None, :] & deep[:, None]
            x = tl.load(a_tile + (m[:, None] * a_stride + (k + depth)[None, :]), mask=x_mask, other=0.0)
            y = tl.load(b_tile + (n[None, :] * b_stride + (k + depth)[:, None]), mask=y_mask, other=0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
    if COPIES:
        # As much at once as the registers hold: each round costs the latency of the L2.
        REST: tl.constexpr = min(BLOCK_M * BLOCK_N, 8192)
        source = outgoing.source + 16 * wl.zero_here()
        while moved < outgoing.count:
            at = moved + tl.arange(0, REST)
            left = at < outgoing.count
            tl.store(outgoing.target + at, tl.load(source + at, mask=left, other=0.0), mask=left)
            moved += REST
    return acc


@triton.jit
def leave_partial(acc, split, place, tiles, depth, block):
    """Store this program's partial of a split-K tile; True for the last program, which joins them.

    The arrival counter is left at 0 for the next kernel of this stream.
    """
    low, end = contributors(place, tiles, depth)
    partials = split.partials + 16 * wl.zero_here()
    partial = partials + tl.program_id(0).to(tl.int64) * (block.m * block.n)
    tl.store(partial + packed(block.m, block.n, block.n), acc)
    wl.gather_stores()
    arrival = tl.atomic_add(split.arrivals + (place - tiles.whole), 1, sem="acq_rel", scope="gpu")
    is_last = arrival == end - low - 1
    if is_last:
        tl.store(split.arrivals + (place - tiles.whole), 0)
    return is_last


@triton.jit
def join_partials(split, place, row, tiles, depth, block):
    """Sum of a split-K tile's partials in program order, fp32: rows row .. row + block.join_rows - 1."""
    low, end = contributors(place, tiles, depth)
    partials = split.partials + row * block.n
    x = tl.load(partials + low.to(tl.int64) * (block.m * block.n) + packed(block.join_rows, block.n, block.n))
    for other in tl.range(low + 1, end, num_stages=1):
        x += tl.load(partials + other.to(tl.int64) * (block.m * block.n) + packed(block.join_rows, block.n, block.n))
    return x


@triton.jit
def store_tile(out, x, row, column, first_row, rows, N):
    """out[first_row + row :, column :] = x, without rows from ``rows`` on and columns from N on.

    ``out`` has rows of N elements, one after the other; ``rows`` counts from ``first_row``.
    """
    N += 16 * wl.zero_here()
    m = row + tl.arange(0, x.shape[0])
    n = column + tl.arange(0, x.shape[1])
    at = out + (first_row + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def packed(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets [ROWS, COLUMNS] in a stored tile of BLOCK_N columns.

    Stored tiles are whole and lie one after the other: no masks, and every row begins on 16 bytes.
    """
    return tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def halves(x):
    """Left and right columns of a tile. A thread holds some of both, so no data moves."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))

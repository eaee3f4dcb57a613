"""The one GEMM body: an output tile, its split-K partial sums, and how it is stored.

``C[M, N] = A[M, K] @ B[N, K].T``, accumulated in fp32. Operands are read through tensor descriptors (TMA on NVIDIA from
sm_90 on, ordinary loads elsewhere); where a row does not start on 16 bytes, through masked pointer loads, chosen by a
constexpr.

Along K the accumulator has half of all registers, and what is computed before it for use behind it would be spilled. So
addresses are computed where they are used (``wl.zero_here``), and a large tile is finished in ``halves``.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.tile_schedule import contributors


@triton.jit
def gemm_tile(
    a, a_stride, a_rows, b, b_stride, b_rows, row, column, K, first, last, source, target, left,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """acc[BLOCK_M, BLOCK_N] (fp32) = a[row : row + BLOCK_M, k] @ b[column : column + BLOCK_N, k].T over the steps
    first .. last - 1 of BLOCK_K along k

    a, b: tensor descriptors over [a_rows, K] and [b_rows, K] if DESCRIPTORS, else pointers to rows that are a_stride
    and b_stride elements apart. Rows outside count as zeros. The order of additions depends on BLOCK_K and ``first``.

    Along the way it copies target[0:left] = source[0:left], PIECE elements a step and the rest at the end, so that a
    link takes them evenly. ``source`` is memory of this program, which a CTA barrier has made readable. 0: no copy.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    moved = 0
    if PIECE > 0:
        lanes = tl.arange(0, PIECE)
        piece = tl.load(source + lanes, mask=lanes < left, other=0.0)
    if DESCRIPTORS:
        for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
            acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc, input_precision="ieee")
            if PIECE > 0:
                # Loaded a step ago: the tensor cores do not wait for it.
                tl.store(target + moved + lanes, piece, mask=lanes < left - moved)
                moved += PIECE
                piece = tl.load(source + moved + lanes, mask=lanes < left - moved, other=0.0)
    else:
        m, n, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        a_stride += 16 * wl.zero_here()
        b_stride += 16 * wl.zero_here()
        # 64-bit to the tile, 32-bit in it: half the registers of a pointer for each element.
        a_tile = a + tl.cast(row, tl.int64) * a_stride
        b_tile = b + tl.cast(column, tl.int64) * b_stride
        for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
            deep = k + depth < K
            x_mask = (m < a_rows - row)[:, None] & deep[None, :]
            y_mask = (n < b_rows - column)[None, :] & deep[:, None]
            x = tl.load(a_tile + (m[:, None] * a_stride + (k + depth)[None, :]), mask=x_mask, other=0.0)
            y = tl.load(b_tile + (n[None, :] * b_stride + (k + depth)[:, None]), mask=y_mask, other=0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
    if PIECE > 0:
        # All at once as far as registers go: each round is a trip to the L2 and back.
        REST: tl.constexpr = min(BLOCK_M * BLOCK_N, 8192)
        source += 16 * wl.zero_here()
        while moved < left:
            at = moved + tl.arange(0, REST)
            tl.store(target + at, tl.load(source + at, mask=at < left, other=0.0), mask=at < left)
            moved += REST
    return acc


@triton.jit
def leave_part(
    acc, scratch, tickets, place, tiles, whole, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part of a split tile in ``scratch``; whether it was the last, who puts them together.

    scratch  fp32 [programs, tile]: every program's part
    tickets  [split tiles], 0: how many parts are there. Left as 0 for the next kernel of this stream
    """
    low, end = contributors(place, tiles, whole, depth)
    scratch += 16 * wl.zero_here()
    mine = scratch + tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N)
    tl.store(mine + packed(BLOCK_M, BLOCK_N, BLOCK_N), acc)
    wl.gather_stores()
    ticket = tl.atomic_add(tickets + (place - whole), 1, sem="acq_rel", scope="gpu")
    is_last = ticket == end - low - 1
    if is_last:
        tl.store(tickets + (place - whole), 0)
    return is_last


@triton.jit
def join_parts(
    scratch, place, row, tiles, whole, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + ROWS - 1 of the split tile, fp32: its parts added up by program, for the last program only."""
    low, end = contributors(place, tiles, whole, depth)
    scratch += row * BLOCK_N
    x = tl.load(scratch + low.to(tl.int64) * (BLOCK_M * BLOCK_N) + packed(ROWS, BLOCK_N, BLOCK_N))
    for other in tl.range(low + 1, end, num_stages=1):
        x += tl.load(scratch + other.to(tl.int64) * (BLOCK_M * BLOCK_N) + packed(ROWS, BLOCK_N, BLOCK_N))
    return x


@triton.jit
def store_tile(out, x, row, column, first_row, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[first_row + row :, column :] = x, cut off at ``rows`` rows (counted from ``first_row``) and N columns.

    ``out``: rows of N elements, one after the other.
    """
    N += 16 * wl.zero_here()
    m = row + tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    at = out + (first_row + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def packed(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of the first ROWS rows and COLUMNS columns of a tile of BLOCK_N columns where tiles lie whole, one behind the
    other: no masks, every row on 16 bytes."""
    return tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def halves(x):
    """The left and the right columns of a tile. A thread has some of both, so that nothing is moved."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))

"""Small-M GEMM kernel, for ``matmul`` and ``matmul_silu_mul`` in decode steps.

    out[M, N] = x[M, K] @ weight[N, K].T
    gated:  out[M, N] = silu(x @ gate.T) * (x @ up.T), weight[2 N, K]: gate's rows, then up's; or another ACTIVATION
    with a deferred RMS scale (weft.kernels.deferred_norm): each row times 1 / sqrt(mean square + eps), in fp32

The time goes into reading the weight once. So the schedule is the opposite of the persistent kernel's
(weft.kernels.tile_schedule): all programs are resident at once, each with an equal share of the weight, so that the memory is
busy from the first microsecond to the last on any number of SMs; a tile of few rows has no epilogue worth hiding. The
body of a tile is weft.kernels.gemm_tile's, except the gated one, which reads x once for two accumulators.

The weight does not depend on the previous kernel, so under programmatic dependent launch the programs start
while that kernel is still running and prefetch the first ``ahead`` columns of their rows; they read x after it has ended.

    previous | ... running ... |
    gemm     | prefetch weight | wait | multiply, store a partial |
    sum                                     | (waits)       | add partials |            only where K is split
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.activations import activated
from weft.kernels.four_bit import FourBit
from weft.kernels.four_bit_tile import OF_WORD, Grid, four_bit_tile, grid_of, words_of
from weft.kernels.fp8 import COLUMNS, Fp8, Fp8Rows, RowFormat, empty_rows, fp8_of, rows_argument, store_rows
from weft.kernels.fp8_tile import Fp8Scales, fp8_tile, prefetch_weight_scales, scales_of_gemm
from weft.kernels.gemm_tile import Block, Operand, Outgoing, Sizes, gemm_tile
from weft.kernels.operands import RowScales, ScaledMatrix, descriptor_or_self, row_stride
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.recording import traced_view

# Elements that a program of sum_partials_kernel adds up.
SUM_BLOCK = 1024


@triton.jit
def gated_tile(x, weight, N, row, column, first, last, block, TRANSPOSED: tl.constexpr):
    """(x @ gate.T, x @ up.T) of one tile over steps first .. last - 1 along K; x is read once.

    Each is [block.m, block.n], fp32; if TRANSPOSED, its transpose. x, weight: descriptors over [M, K] and [2 N, K].
    """
    gate = tl.zeros((block.m, block.n), dtype=tl.float32)
    up = gate
    for k in range(first * block.k, last * block.k, block.k):
        a = x.load([row, k])
        g = weight.load([column, k])
        u = weight.load([N + column, k])
        if TRANSPOSED:
            gate = tl.dot(g, a.T, gate)
            up = tl.dot(u, a.T, up)
        else:
            gate = tl.dot(a, g.T, gate)
            up = tl.dot(a, u.T, up)
    return gate, up


@triton.jit
def prefetch_columns(weight, stride, row, rows, k, columns, BLOCK_N: tl.constexpr):
    """Prefetch weight[row : row + BLOCK_N, k : k + columns] into the L2.

    The weight has ``rows`` rows; ``columns`` is a multiple of 128 bytes.
    """
    # At least one request for each of 128 threads, so that none is sent twice.
    PIECES: tl.constexpr = max(1, 128 // BLOCK_N)
    n, piece = row + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, PIECES)[None, :]
    length = columns // PIECES
    nbytes = tl.where(n < rows, length * (weight.dtype.element_ty.primitive_bitwidth // 8), 0)
    wl.prefetch(weight + n.to(tl.int64) * stride + (k + piece * length), tl.broadcast_to(nbytes, (BLOCK_N, PIECES)))


@triton.jit
def gated_by(gate, up, ACTIVATION: tl.constexpr):
    """Activation of ``gate``, by its name (weft.kernels.activations), times ``up``."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit
def store_rounded(x, out, at, mask, written, token, exists, first, width):
    """``store_rows`` of fp32 ``x``, rounded to the dtype of ``out``, or first to that of ``written``."""
    if written is None:
        tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)
    else:
        x = tl.where(mask, x, 0.0).to(written.dtype)
        store_rows(x, out, at, mask, written, token, exists, first, width)


@triton.jit(do_not_specialize=["M", "partials", "ahead"])
def small_m_kernel(
    x,
    weight,
    weight_rows,
    out,
    M,
    sizes,
    partials,
    ahead,
    scales,
    block,
    team,
    fp8,
    grid,
    written,
    TRANSPOSED: tl.constexpr,
    GATED: tl.constexpr,
    SQUARES: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
):
    """out[M, N] = x @ weight.T, gated as above        grid: (tiles * partials,)

    The programs of a tile have consecutive ids.
    x, weight       descriptors; weight_rows: the same weight as a pointer, for the prefetch
    sizes           ``Sizes``, where A is x and B the weight; N is that of out
    out             [M, N] if partials is 1; else fp32 [partials, 1 or 2 if GATED, M, N], which sum_partials_kernel adds up
    scales          ``RowScales`` of SQUARES parts, by which row m's results are multiplied. SQUARES 0: none
    block           ``Block``: block.m rows of x and block.n of the weight; if TRANSPOSED the other way round
    team            in a trace (``traced_view``), else None
    fp8             ``Fp8Scales`` of operands in e4m3; else None
    grid            ``Grid`` of a weight in 4 bits, whose int16 words the weight's arguments are; else None
    written         ``Fp8Rows`` of ``out`` in e4m3, if GATED and partials is 1, in tiles of whole groups; else None

    signals, waits  none, except the wait for the previous kernel
    """
    BLOCK_M: tl.constexpr = block.n if TRANSPOSED else block.m
    BLOCK_N: tl.constexpr = block.m if TRANSPOSED else block.n
    BLOCK_K: tl.constexpr = block.k
    if GATED:
        halves: tl.constexpr = 2
    else:
        halves: tl.constexpr = 1
    part, tile = tl.program_id(0) % partials, tl.program_id(0) // partials
    tile_rows = tl.cdiv(M, BLOCK_M)
    row, column = tile % tile_rows * BLOCK_M, tile // tile_rows * BLOCK_N
    depth = tl.cdiv(sizes.K, BLOCK_K)
    first, last = part * depth // partials, (part + 1) * depth // partials
    # Columns of 128 bytes.
    GRAIN: tl.constexpr = 1024 // weight_rows.dtype.element_ty.primitive_bitwidth
    if grid is not None:
        PACKED: tl.constexpr = OF_WORD
    else:
        PACKED: tl.constexpr = 1
    if ahead > 0:
        start = first * BLOCK_K // PACKED
        columns = min(ahead, min(last * BLOCK_K, sizes.K) - first * BLOCK_K) // PACKED // GRAIN * GRAIN
        for half in tl.static_range(halves):
            of_half = weight_rows + half * tl.cast(sizes.N, tl.int64) * sizes.b_stride
            prefetch_columns(of_half, sizes.b_stride, column, sizes.N, start, columns, BLOCK_N)
    if fp8 is not None:
        for half in tl.static_range(halves):
            prefetch_weight_scales(fp8, half * sizes.N + column, sizes.K)
    wl.wait_for_previous_kernel()
    began = wl.begin_tile(team)
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if SQUARES > 0:
        # Loaded now and added up after the GEMM, so that the loads are in flight during it.
        of_row = tl.arange(0, triton.next_power_of_2(SQUARES))
        asked = scales.squares + m[:, None] * SQUARES + of_row[None, :]
        of_rows = tl.load(asked, mask=(m < M)[:, None] & (of_row < SQUARES)[None, :], other=0.0)
    if fp8 is not None:
        acc, up = fp8_tile(x, weight, fp8, M, sizes.N, row, column, first, last, block, TRANSPOSED, GATED)
    elif grid is not None:
        acc, up = four_bit_tile(x, weight, grid, sizes.N, sizes.K, row, column, first, last, block, TRANSPOSED, GATED)
    elif GATED:
        acc, up = gated_tile(x, weight, sizes.N, row, column, first, last, block, TRANSPOSED)
    elif TRANSPOSED:
        weights, rows = Operand(weight, sizes.b_stride, sizes.N), Operand(x, sizes.a_stride, M)
        acc = gemm_tile(weights, rows, column, row, sizes.K, first, last, Outgoing(out, out, 0), block, False)
    else:
        weights, rows = Operand(weight, sizes.b_stride, sizes.N), Operand(x, sizes.a_stride, M)
        acc = gemm_tile(rows, weights, row, column, sizes.K, first, last, Outgoing(out, out, 0), block, False)
    # Not earlier: the next GEMM's programs would compete with these for the memory. 33.0 us; at the start of the kernel 36.9
    # (H200, in series, 16 x 12800 x 5120 gated).
    wl.let_next_kernel_start()
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(of_rows, axis=1) + scales.eps)
        if TRANSPOSED:
            factor = factor[None, :]
        else:
            factor = factor[:, None]
        acc *= factor
        if GATED:
            up *= factor
    if TRANSPOSED:
        at = m[None, :].to(tl.int64) * sizes.N + n[:, None]
        mask = (m < M)[None, :] & (n < sizes.N)[:, None]
    else:
        at = m[:, None].to(tl.int64) * sizes.N + n[None, :]
        mask = (m < M)[:, None] & (n < sizes.N)[None, :]
    size = tl.cast(M, tl.int64) * sizes.N
    out += part * halves * size
    if GATED:
        if partials == 1:
            result = gated_by(acc, up, ACTIVATION)
            if written is not None and TRANSPOSED:
                store_rounded(result.T, out, at.T, mask.T, written, m, m < M, column, sizes.N)
            else:
                store_rounded(result, out, at, mask, written, m, m < M, column, sizes.N)
        else:
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
            tl.store(out + size + at, up.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    wl.end_tile(began, tile % tile_rows, tile // tile_rows, team)


@triton.jit(do_not_specialize=["partials"])
def sum_partials_kernel(
    source,
    out,
    size,
    width,
    partials,
    written,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
):
    """out[i] = sum over p of source[p, i], gated as above

    grid: (size / width * cdiv(width, BLOCK),)

    source   fp32 [partials, 1 or 2 if GATED, size], added up in the order of p; out [size / width, width]
    written  ``Fp8Rows`` of ``out`` in e4m3, in whole groups; else None
    """
    if GATED:
        halves: tl.constexpr = 2
    else:
        halves: tl.constexpr = 1
    across = tl.cdiv(width, BLOCK)
    row, first = tl.program_id(0) // across, tl.program_id(0) % across * BLOCK
    mask = first + tl.arange(0, BLOCK) < width
    at = row.to(tl.int64) * width + first + tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    step = tl.cast(size, tl.int64) * halves
    total = tl.load(source + at, mask=mask, other=0.0)
    if GATED:
        up = tl.load(source + size + at, mask=mask, other=0.0)
    for partial in tl.range(1, partials, num_stages=1):
        total += tl.load(source + partial * step + at, mask=mask, other=0.0)
        if GATED:
            up += tl.load(source + partial * step + size + at, mask=mask, other=0.0)
    if GATED:
        total = gated_by(total, up, ACTIVATION)
    token = row + tl.arange(0, 1)
    store_rounded(total[None, :], out, at[None, :], mask[None, :], written, token, token >= 0, first, width)


class Given(NamedTuple):
    """Operands as the kernel takes them. width: columns of a step, of both."""

    x: torch.Tensor
    weight: torch.Tensor
    fp8: Fp8Scales | None
    grid: Grid | None
    width: int

    @classmethod
    def of(cls, x: torch.Tensor | Fp8, weight: torch.Tensor | Fp8 | FourBit, design: SmallM, *, gated: bool) -> Given:
        if isinstance(weight, FourBit):
            return cls(x, words_of(weight), None, grid_of(weight), design.block_k)
        if isinstance(weight, Fp8):
            scales = scales_of_gemm(x.scales, weight, design.block_n, gated)
            return cls(x.data, weight.data, scales, None, min(design.block_k, COLUMNS.value))
        return cls(x, weight, None, None, design.block_k)


def run(
    operand: ScaledMatrix,
    weight: torch.Tensor | Fp8 | FourBit,
    design: SmallM,
    *,
    activation: str | None = None,
    summed: bool = True,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    format: RowFormat | None = None,
) -> torch.Tensor | Fp8:
    """GEMM of operands with dense rows, each on 16 bytes, and contiguous scales: out[M, N].

    If not ``summed``, the split-K partials fp32 [partials, M, N]. With an ``Fp8`` weight x is ``Fp8`` too; with a ``FourBit``
    weight block_k is 128 or 256.
    activation: of the gate; None: not gated. dtype: that of a new ``out``, x's by default. format: gated results are put in fp8
    so, where the design ``writes`` that.
    """
    dtype = dtype or operand.data.dtype
    given = Given.of(operand.data, weight, design, gated=activation is not None)
    (M, K), halves = given.x.shape, 1 if activation is None else 2
    N, partials, block, written = given.weight.shape[0] // halves, design.partials_of(K), SUM_BLOCK, None
    if format is not None:
        out, scales = empty_rows(given.x, M, N, format)
        block = next_power_of_2(N) if format.kind == "token" else SUM_BLOCK
        written = rows_argument(scales, format, dtype, block)
    elif out is None and (partials == 1 or summed):
        out = torch.empty((M, N), dtype=dtype, device=given.x.device)
    if partials == 1:
        _launch(given, operand.scales, design, activation, out, written)
        return out if format is None else fp8_of(out, scales, format)
    sums = torch.empty((partials, halves, M, N), dtype=torch.float32, device=given.x.device)
    _launch(given, operand.scales, design, activation, sums, None)
    if not summed:
        return sums.squeeze(1)
    sum_partials(sums, out, block, written, activation or "silu")
    return out if format is None else fp8_of(out, scales, format)


def _launch(
    given: Given,
    scales: RowScales | None,
    design: SmallM,
    activation: str | None,
    out: torch.Tensor,
    written: Fp8Rows | None,
) -> None:
    """Run the kernel: results, or split-K partials, in ``out`` [.., M, N]."""
    x, weight, fp8, grid, width = given
    (M, K), N, gated, activation = x.shape, out.shape[-1], activation is not None, activation or "silu"
    squares, options = 0 if scales is None else scales.squares.shape[1], launch_options(capabilities_of(x.device))
    launch = launch_on(
        x.device,
        small_m_kernel,
        (design, gated, squares, activation),
        lambda: {"SQUARES": squares, **constants(design, gated, activation), **options},
    )
    partials = design.partials_of(K)
    launch(
        cdiv(M, design.block_m) * cdiv(N, design.block_n) * partials,
        descriptor_or_self(x, design.block_m, width, True),
        descriptor_or_self(weight, design.block_n, width // (1 if grid is None else OF_WORD.value), True),
        weight,
        out,
        M,
        Sizes(N, K, row_stride(x), row_stride(weight)),
        partials,
        design.ahead,
        scales or RowScales(out, 0.0),
        block_of(design),
        traced_view(),
        fp8,
        grid,
        written,
    )


def sum_partials(sums: torch.Tensor, out: torch.Tensor, block: int, written: Fp8Rows | None, activation: str) -> None:
    """``out`` of split-K partials [partials, 2 if gated else 1, M, N]; in fp8 by rows, else as one row."""
    partials, halves, M, N = sums.shape
    options, gated, width = launch_options(capabilities_of(out.device)), halves == 2, M * N if written is None else N
    sizes = {"GATED": gated, "BLOCK": block, "ACTIVATION": activation, "num_warps": min(16, max(4, block // 512))}
    launch = launch_on(out.device, sum_partials_kernel, (gated, block, activation), lambda: {**sizes, **options})
    launch(M * N // width * cdiv(width, block), sums, out, M * N, width, partials, written)


def writes(design: SmallM, K: int, format: RowFormat) -> bool:
    """True if a gated GEMM by ``design`` can put its results in fp8 so.

    Tiles of one program need whole groups. A scale for a token needs whole rows, which only a sum of partials sees.
    """
    if design.partials_of(K) > 1 or format.kind == "static":
        return True
    return format.kind == "group" and design.block_n % COLUMNS.value == 0


@functools.lru_cache
def block_of(design: SmallM) -> Block:
    """Kernel argument ``block``."""
    rows = (design.block_n, design.block_m) if design.transposed else (design.block_m, design.block_n)
    sizes = (*rows, design.block_k, True, 1, 1)
    return Block(*map(tl.constexpr, sizes))


def constants(design: SmallM, gated: bool, activation: str = "silu") -> dict[str, Any]:
    """Constexpr parameters and compiler options of the kernel that follow from its design."""
    return {
        "TRANSPOSED": design.transposed,
        "GATED": gated,
        "ACTIVATION": activation,
        "num_warps": design.num_warps,
        "num_stages": design.num_stages,
    }

"""Products of few rows, bound by reading the weight once: what ``matmul`` and ``matmul_silu_mul`` run for a decode step.

    out[M, N] = x[M, K] @ weight[N, K].T
    gated:  out[M, N] = silu(x @ gate.T) * (x @ up.T), weight[2 N, K]: gate's rows, then up's
    of a factored norm (weft.kernels.deferred_norm): each row of the products times 1 / sqrt(mean square + eps), in fp32

A kernel of its own, since its schedule is the opposite of the persistent one of weft.kernels.tile_schedule: all programs are
resident at once with an equal share of the weight each, so that the memory is busy from the first microsecond to the
last, whatever the number of SMs that share it; a tile of few rows has no epilogue worth hiding. The product itself is
weft.kernels.gemm_tile's, but for the gated one, which reads x once for two.

What the weight holds does not depend on the kernel before, so under programmatic dependent launch the programs come
up while that one is still running and ask for the first ``ahead`` columns of their rows; x they read once it has ended.

    before  | ... running ... |
    gemm    | prefetch weight | wait | multiply, leave a part |
    sum                                    | (waits)          | add parts up |            only where K is split
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.gemm_tile import gemm_tile
from weft.kernels.operands import can_describe, operand, row_stride
from weft.ops.gemm import cublas
from weft.ops.gemm.small_m_config import SkinnyConfig, configured, parts_of
from weft.ops.local import capabilities_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Elements that a program of sum_parts_kernel adds up.
SUM_BLOCK = 1024


@triton.jit
def gated_tile(
    x, weight, N, row, column, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """(x @ gate.T, x @ up.T) of one tile over the steps first .. last - 1 along K, each [BLOCK_M, BLOCK_N] (fp32) or, if
    TURNED, [BLOCK_N, BLOCK_M]. x, weight: descriptors over [M, K] and [2 N, K]. Two accumulators, one reading of x."""
    if TURNED:
        gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = gate
    for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
        a = x.load([row, k])
        g = weight.load([column, k])
        u = weight.load([N + column, k])
        if TURNED:
            gate = tl.dot(g, a.T, gate)
            up = tl.dot(u, a.T, up)
        else:
            gate = tl.dot(a, g.T, gate)
            up = tl.dot(a, u.T, up)
    return gate, up


@triton.jit
def prefetch_columns(weight, stride, row, rows, k, columns, BLOCK_N: tl.constexpr):
    """weight[row : row + BLOCK_N, k : k + columns], of ``rows`` rows, into the L2. ``columns``: a multiple of 64."""
    # A request for each of 128 threads at least, so that none is sent twice.
    PIECES: tl.constexpr = max(1, 128 // BLOCK_N)
    n, piece = row + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, PIECES)[None, :]
    length = columns // PIECES
    nbytes = tl.where(n < rows, length * (weight.dtype.element_ty.primitive_bitwidth // 8), 0)
    wl.prefetch(weight + n.to(tl.int64) * stride + (k + piece * length), tl.broadcast_to(nbytes, (BLOCK_N, PIECES)))


@triton.jit
def silu_of(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["M", "parts", "ahead"])
def skinny_kernel(
    x, weight, rows_of_weight, stride, out, M, N, K, parts, ahead, squares, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TURNED: tl.constexpr, GATED: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x @ weight.T, gated as above        grid: (tiles * parts,), the parts of a tile side by side

    x, weight       descriptors; rows_of_weight, stride: the same weight, for the prefetch
    out             [M, N] if parts is 1; else fp32 [parts, 1 or 2 if GATED, M, N]: what sum_parts_kernel adds up
    squares         fp32 [M, SQUARES]: row m's products times 1 / sqrt(sum(squares[m]) + eps). SQUARES 0: as they are
    signals, waits  none but the kernel before
    """
    if GATED:
        halves: tl.constexpr = 2
    else:
        halves: tl.constexpr = 1
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts
    tile_rows = tl.cdiv(M, BLOCK_M)
    row, column = tile % tile_rows * BLOCK_M, tile // tile_rows * BLOCK_N
    depth = tl.cdiv(K, BLOCK_K)
    first, last = part * depth // parts, (part + 1) * depth // parts
    if ahead > 0:
        start = first * BLOCK_K
        columns = min(ahead, min(last * BLOCK_K, K) - start) // 64 * 64
        for half in tl.static_range(halves):
            of_half = rows_of_weight + half * tl.cast(N, tl.int64) * stride
            prefetch_columns(of_half, stride, column, N, start, columns, BLOCK_N)
    wl.wait_for_previous_kernel()
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if SQUARES > 0:
        # Asked for now, added up behind the product: they are under way meanwhile.
        of_row = tl.arange(0, triton.next_power_of_2(SQUARES))
        asked = squares + m[:, None] * SQUARES + of_row[None, :]
        of_rows = tl.load(asked, mask=(m < M)[:, None] & (of_row < SQUARES)[None, :], other=0.0)
    if GATED:
        acc, up = gated_tile(x, weight, N, row, column, first, last, BLOCK_M, BLOCK_N, BLOCK_K, TURNED)
    elif TURNED:
        acc = gemm_tile(
            weight, stride, N, x, K, M, column, row, K, first, last, out, out, 0, BLOCK_N, BLOCK_M, BLOCK_K, True, 0
        )
    else:
        acc = gemm_tile(
            x, K, M, weight, stride, N, row, column, K, first, last, out, out, 0, BLOCK_M, BLOCK_N, BLOCK_K, True, 0
        )
    # Not before: the next product's programs would take turns with these for the memory. 33.0 us, at the start 36.9
    # (one after the other, 16 x 12800 x 5120 gated).
    wl.let_next_kernel_start()
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(of_rows, axis=1) + eps)
        if TURNED:
            factor = factor[None, :]
        else:
            factor = factor[:, None]
        acc *= factor
        if GATED:
            up *= factor
    if TURNED:
        at = m[None, :].to(tl.int64) * N + n[:, None]
        mask = (m < M)[None, :] & (n < N)[:, None]
    else:
        at = m[:, None].to(tl.int64) * N + n[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
    size = tl.cast(M, tl.int64) * N
    out += part * halves * size
    if GATED:
        if parts == 1:
            tl.store(out + at, silu_of(acc, up).to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
            tl.store(out + size + at, up.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(parts_of, out, size, parts, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = sum over p of parts_of[p, i], gated as above        grid: (cdiv(size, BLOCK),)

    parts_of  fp32 [parts, 1 or 2 if GATED, size], added up in the order of p; out [size]
    """
    if GATED:
        halves: tl.constexpr = 2
    else:
        halves: tl.constexpr = 1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    wl.follow_previous_kernel()
    step = tl.cast(size, tl.int64) * halves
    total = tl.load(parts_of + at, mask=mask, other=0.0)
    if GATED:
        up = tl.load(parts_of + size + at, mask=mask, other=0.0)
    for part in tl.range(1, parts, num_stages=1):
        total += tl.load(parts_of + part * step + at, mask=mask, other=0.0)
        if GATED:
            up += tl.load(parts_of + part * step + size + at, mask=mask, other=0.0)
    if GATED:
        total = silu_of(total, up)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def chosen_for(
    op: str, x: torch.Tensor, weight: torch.Tensor, caps: Capabilities, in_parts: bool = False
) -> SkinnyConfig | None:
    """The config of one call of ``op`` with these operands, whose rows are dense; None: another design. in_parts: whether the
    kernel behind adds the parts up."""
    N = weight.shape[0] // (2 if op == "matmul_silu_mul" else 1)
    config, _ = configured(op, x.shape[0], N, x.shape[1], x.dtype, caps, in_parts=in_parts)
    return config if config is not None and can_describe(x, weight) else None


def product(x: torch.Tensor, weight: torch.Tensor, caps: Capabilities) -> torch.Tensor:
    """x[M, K] @ weight[N, K].T of operands whose rows are dense: by this kernel, if it has a config for so few, else by the
    library."""
    config = chosen_for("matmul", x, weight, caps)
    return cublas.matmul(x, weight) if config is None else run(x, weight, config, gated=False)


def run(
    x: torch.Tensor, weight: torch.Tensor, config: SkinnyConfig, gated: bool, *,
    squares: torch.Tensor | None = None, eps: float = 0.0, summed: bool = True,
) -> torch.Tensor:  # fmt: skip
    """out[M, N] of operands whose rows are dense, each on 16 bytes; or, not ``summed`` (nor gated), fp32 [parts, M, N].

    squares, eps  of a FactoredNorm; contiguous
    """
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    options: dict[str, Any] = launch_options(capabilities_of(x.device))
    parts = parts_of(config, K)
    if parts == 1:
        out = sums = torch.empty((M, N), dtype=x.dtype, device=x.device)
    else:
        sums = torch.empty((parts, weight.shape[0] // N, M, N), dtype=torch.float32, device=x.device)
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    skinny_kernel[(tiles * parts,)](
        operand(x, config.block_m, config.block_k, True), operand(weight, config.block_n, config.block_k, True),
        weight, row_stride(weight), sums, M, N, K, parts, config.ahead, sums if squares is None else squares, eps,
        SQUARES=0 if squares is None else squares.shape[1], **constants(config, gated), **options,
    )  # fmt: skip
    if parts > 1:
        if not summed:
            return sums.squeeze(1)
        out = torch.empty((M, N), dtype=x.dtype, device=x.device)
        sum_parts_kernel[(cdiv(M * N, SUM_BLOCK),)](
            sums, out, M * N, parts, GATED=gated, BLOCK=SUM_BLOCK, num_warps=4, **options
        )
    return out


def constants(config: SkinnyConfig, gated: bool) -> dict[str, Any]:
    """The keyword arguments of the kernel that come from its config."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "TURNED": config.turned,
        "GATED": gated,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }

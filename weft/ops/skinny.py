"""Products of few rows, bound by reading the weight once: what ``matmul`` and ``matmul_silu_mul`` run for a decode step.

    out[M, N] = x[M, K] @ weight[N, K].T
    gated:  out[M, N] = silu(x @ gate.T) * (x @ up.T), weight[2 N, K]: gate's rows, then up's
    of a factored norm (weft.ops.factored_norm): each row of the products times 1 / sqrt(mean square + eps), in fp32

A kernel of its own, since its schedule is the opposite of the persistent one of weft.ops.tiles: all programs are
resident at once with an equal share of the weight each, so that the memory is busy from the first microsecond to the
last, whatever the number of SMs that share it; a tile of few rows has no epilogue worth hiding. The product itself is
weft.ops.gemm's, but for the gated one, which reads x once for two.

What the weight holds does not depend on the kernel before, so under programmatic dependent launch the programs come
up while that one is still running and ask for the first ``ahead`` columns of their rows; x they read once it has ended.

    before  | ... running ... |
    gemm    | prefetch weight | wait | multiply, leave a part |
    sum                                    | (waits)          | add parts up |            only where K is split
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.arithmetic import cdiv, next_power_of_2
from weft.ops.gemm import can_describe, gemm_tile, operand, row_stride
from weft.ops.local import capabilities_of, launch_options
from weft.ops.registration import HALVES

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

OPS = ("matmul", "matmul_silu_mul")
MAX_PARTS = 16
# Rows up to which it beats cuBLAS: 64x5120x6400 19.2 / 19.5 us, 128x5120x6400 25.3 / 21.0.
MAX_ROWS = 64
# Elements of a weight that takes longer to read than a kernel takes to start: 2 us. The smallest measured has 10 million.
LEAST_WEIGHT = 4 << 20
# Columns that a program prefetches. Behind a norm of 4 us, which stands for an all-reduce: 16x5120x6400 23.4 us with none,
# 22.5 with 256, 22.3 with 1024; behind one that does not wait 20.1, 19.9, 20.3, and behind a product 1024 cost 1 us (of the
# search; no file keeps it).
AHEAD = 256
# Steps along K that make a part worth its sum.
LEAST_STEPS = 8
# Elements that a program of sum_parts_kernel adds up.
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyConfig:
    """How a product of few rows is computed.

    block_m, block_n, block_k  of a tile of ``out`` and a step along K: powers of two, at least 16
    parts       programs that share a tile, each with its part of K: 1 .. MAX_PARTS
    ahead       columns of its part of the weight that a program prefetches before the kernel before it has ended:
                a multiple of 64
    turned      out.T = weight @ x.T: the weight's rows take the place that tensor instructions have 64 or more of
    num_warps, num_stages      of the compiler
    """

    block_m: int
    block_n: int
    block_k: int
    parts: int = 1
    ahead: int = 0
    turned: bool = False
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} is not a power of two of at least 16")
        if not 1 <= self.parts <= MAX_PARTS:
            raise ValueError(f"parts={self.parts} is not in 1 .. {MAX_PARTS}")
        if self.ahead < 0 or self.ahead % 64 != 0:
            raise ValueError(f"ahead={self.ahead} is not a multiple of 64 columns, or 0")


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
    squares         fp32 [M, SQUARES]: row m's products times 1 / sqrt(sum(squares[m]) / K + eps). SQUARES 0: as they are
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
        factor = tl.rsqrt(tl.sum(of_rows, axis=1) / K + eps)
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


def chosen_for(op: str, x: torch.Tensor, weight: torch.Tensor, caps: Capabilities) -> SkinnyConfig | None:
    """The config of one call of ``op`` with these operands, whose rows are dense; None: another design."""
    N = weight.shape[0] // (2 if op == "matmul_silu_mul" else 1)
    config, _ = configured(op, x.shape[0], N, x.shape[1], x.dtype, caps)
    return config if config is not None and can_describe(x, weight) else None


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


def parts_of(config: SkinnyConfig, K: int) -> int:
    """Programs that share a tile: no more than there are steps along K."""
    return min(config.parts, cdiv(K, config.block_k))


def configured(
    op: str, M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities, *, factored: bool = False
) -> tuple[SkinnyConfig | None, str]:
    """The config of a call of ``op``, "matmul" or "matmul_silu_mul", with ``out`` [M, N], and the reason as a sentence;
    None: the library, or the persistent kernel. Operands that no descriptor reaches get another design all the same.
    factored: of a FactoredNorm, which with another design costs a norm of several kernels."""
    gated = op == "matmul_silu_mul"
    if dtype not in HALVES:
        return None, f"{dtype}: a product of few rows is for fp16 and bf16"
    if caps.is_simulated:
        wanted = gated or factored
        return config_for(M, N, K, caps, gated) if wanted else None, "simulated: the kernel is what is to be seen"
    if caps.arch != "sm_90":
        return None, f"{caps.arch}: not measured"
    if M > MAX_ROWS:
        return None, f"M={M} > {MAX_ROWS}: x and the weight weigh the same, and cuBLAS shares x between SMs"
    if K * N * (2 if gated else 1) < LEAST_WEIGHT and not factored:
        return None, f"N={N} K={K}: a weight too small to be what takes the time"
    reason = f"M={M} <= {MAX_ROWS}: all programs at once, each reading its share of the weight"
    return config_for(M, N, K, caps, gated), reason


def config_for(M: int, N: int, K: int, caps: Capabilities, gated: bool) -> SkinnyConfig:
    """The config for ``out`` [M, N]: of any sizes on any target, though ``configured`` asks for few of them.

    Medians in CUDA graphs on H200, one product after the other, with cuBLAS in brackets (benchmarks/lab/h200-skinny.json).
    """
    block_m = max(16, min(128, next_power_of_2(M)))
    if caps.is_simulated:
        return SkinnyConfig(block_m=16, block_n=32, block_k=64, parts=2 if K > 128 else 1)
    if caps.arch not in ("sm_90", "sm_100", "sm_103"):
        # 64 KiB of shared memory suffice for all of these. gfx9 has 64 KiB, sm_12x 99.
        return SkinnyConfig(block_m=min(64, block_m), block_n=32, block_k=64, num_stages=2 if gated else 3)
    tiles = cdiv(N, 64)
    if block_m == 16 or (block_m == 32 and (gated or tiles <= caps.sms)):
        # 16x2560x5120 9.5 (10.9), 16x5120x6400 19.2 (18.8), 16x12800x5120 33.4 (35.8); 32: 9.5 (11.1), 19.6 (19.1).
        block_n, block_k, stages, turned = 64, 128, 5, True
    elif block_m == 32:
        # More tiles than SMs, so two programs an SM. 32x12800x5120 35.4 (36.4).
        block_n, block_k, stages, turned = 64, 128, 4, False
    elif block_m == 64 and not gated and tiles <= caps.sms:
        # One program an SM, with all of its memory. 64x5120x6400 19.2 (19.5).
        block_n, block_k, stages, turned = 64, 128, 6, True
    elif block_m == 64:
        # 64x12800x5120 34.9 (36.5), gated 36.0 (37.9 with its silu).
        block_n, block_k, stages, turned = 64 if gated else 128, 64, 6, True
    else:
        # 128x5120x6400 25.3 (21.0), gated 128x12800x5120 40.7 (38.6 with its silu): the library gets these.
        block_n, block_k, stages, turned = 64, 64 if gated else 128, 5 if gated else 4, True
    programs = caps.sms * (2 if block_m == 16 and K > 8192 else 1)
    steps = cdiv(K, block_k)
    return SkinnyConfig(
        block_m=block_m, block_n=block_n, block_k=block_k, turned=turned, num_stages=stages, ahead=AHEAD,
        num_warps=8 if block_m == 128 and gated else 4,
        parts=max(1, min(programs // cdiv(N, block_n), steps // LEAST_STEPS, MAX_PARTS)),
    )  # fmt: skip


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

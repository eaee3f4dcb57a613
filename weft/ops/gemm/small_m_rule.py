"""Designs of small-M GEMMs (weft.ops.gemm.small_m), and the rule that chooses one.

The limits are crossovers measured on H200: docs/decisions.md, "Small-M GEMMs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.ops.registration import HALVES
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.ops.gemm.gemm_op import GemmCall
    from weft.runtime.capabilities import Capabilities

MAX_PARTIALS = 16
# Where the kernel behind adds them up: with more, all-reduces keep some in local memory.
MAX_PARTIALS_LEFT = 3
# Up to 64 rows this kernel takes within 5 % of cuBLAS's time by itself, and less behind another kernel, under whose end
# it begins; with 128 rows it takes a fifth more by itself. With rows that do not fill a tile (65, 96) it loses more.
MAX_ROWS = 64
# Where the kernel behind adds split-K partials up (matmul_parts) it wins up to 128 rows: it may begin as the kernel before
# ends, which cuBLAS's cannot.
MAX_ROWS_OF_PARTIALS, LEAST_ROWS_OF_PARTIALS = 128, 96
# Columns of a partial sum at least, where the kernel before is no all-reduce. Half as many gained nothing.
LEAST_COLUMNS_OF_PARTIAL = 4096
# A gated GEMM of exactly this many rows, whose tiles are one round, takes cuBLAS's time and saves the kernel of silu; so does
# one that leaves partials, with two programs an SM.
WHOLE_ROWS = 128
# Elements of a weight that takes longer to read than a kernel takes to start: 2 us. The smallest measured has 10 million.
LEAST_WEIGHT = 4 << 20
# Columns that a program prefetches while the kernel before it leaves the memory idle, as an all-reduce does. Behind a kernel
# that reads memory itself prefetching costs time.
AHEAD = 256
# Least steps along K of a partial sum: where a kernel of its own adds them up, and where the kernel behind does.
LEAST_STEPS, LEAST_STEPS_LEFT = 8, 16


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class SmallM:
    """Small-M GEMM.

    block_m, block_n, block_k  sizes of a tile of ``out`` and of a step along K: powers of two, at least 16
    partials     programs that share a tile, each with its share of K: 1 .. MAX_PARTIALS
    ahead        columns of its share of the weight that a program prefetches before the previous kernel has ended:
                 a multiple of 64
    transposed   out.T = weight @ x.T: tensor instructions have 64 or more rows, which the weight fills
    num_warps, num_stages      compiler options
    """

    block_m: int
    block_n: int
    block_k: int
    partials: int = 1
    ahead: int = 0
    transposed: bool = False
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} is not a power of two of at least 16")
        if not 1 <= self.partials <= MAX_PARTIALS:
            raise ValueError(f"partials={self.partials} is not in 1 .. {MAX_PARTIALS}")
        if self.ahead < 0 or self.ahead % 64 != 0:
            raise ValueError(f"ahead={self.ahead} is not a multiple of 64 columns, or 0")

    def partials_of(self, K: int) -> int:
        """Number of programs that share a tile of a GEMM with this K, at most the steps along K."""
        return min(self.partials, cdiv(K, self.block_k))


def is_small(M: int) -> bool:
    """True if GEMMs of ``M`` rows go by the small-M kernel, which applies deferred RMS scales, where a GPU has one."""
    return M <= MAX_ROWS


def choose_small_m(call: GemmCall, caps: Capabilities, *, gated: bool = False) -> tuple[SmallM | None, str]:
    """The small-M design for ``call``, or None for another one, and the reason as a sentence. gated: weight is [2 N, K]."""
    M, N, K = call.M, call.N, call.K
    if call.dtype not in HALVES:
        return None, f"{call.dtype}: the small-M GEMM is for fp16 and bf16"
    if not call.aligned:
        return None, "rows that do not begin on 16 bytes: no tensor descriptor reaches them"
    if caps.is_simulated:
        wanted = gated or call.deferred_norm or call.partials
        return default_small_m(
            call, caps, gated=gated
        ) if wanted else None, "simulated: the kernel is what is to be seen"
    if caps.arch != "sm_90":
        return None, f"{caps.arch}: not measured"
    design = default_small_m(call, caps, gated=gated)
    if call.partials and LEAST_ROWS_OF_PARTIALS <= M <= MAX_ROWS_OF_PARTIALS and design.partials_of(K) > 1:
        return design, f"M={M} <= {MAX_ROWS_OF_PARTIALS}, and the kernel behind adds the split-K partials up"
    whole = gated and M == WHOLE_ROWS and cdiv(N, 64) <= caps.sms < 2 * cdiv(N, 64)
    if M > MAX_ROWS and not whole:
        return None, f"M={M} > {MAX_ROWS}: x and the weight weigh the same, and cuBLAS shares x between SMs"
    if K * N * (2 if gated else 1) < LEAST_WEIGHT and not call.deferred_norm:
        return None, f"N={N} K={K}: a weight too small to be what takes the time"
    if whole:
        return design, f"M={M}, one round of whole tiles: silu needs no kernel of its own"
    return design, f"M={M} <= {MAX_ROWS}: all programs at once, each reading its share of the weight"


def default_small_m(call: GemmCall, caps: Capabilities, *, gated: bool = False) -> SmallM:
    """The design for ``out`` [M, N], of any sizes on any target, though ``choose_small_m`` asks for few of them."""
    M, N, K, in_parts, factored = call.M, call.N, call.K, call.partials, call.deferred_norm
    block_m = max(16, min(128, next_power_of_2(M)))
    if caps.is_simulated:
        return SmallM(block_m=16, block_n=32, block_k=64, partials=2 if K > 128 else 1)
    if caps.arch not in ("sm_90", "sm_100", "sm_103"):
        # 64 KiB of shared memory suffice for all of these. gfx9 has 64 KiB, sm_12x 99.
        return SmallM(block_m=min(64, block_m), block_n=32, block_k=64, num_stages=2 if gated else 3)
    tiles = cdiv(N, 64)
    # In parts and not of a norm that an all-reduce computes: a row-parallel layer's.
    reads_before = in_parts and not factored
    ahead = 0 if reads_before or (gated and (block_m > 16 or tiles <= caps.sms)) else AHEAD
    shared = min(2 * caps.sms // tiles, K // (128 * LEAST_STEPS_LEFT))
    if in_parts and not gated and block_m <= 32 and tiles <= caps.sms < 2 * tiles and shared > 1:
        # A program a tile would leave SMs idle: two an SM.
        return SmallM(
            block_m=block_m, block_n=64, block_k=128, transposed=True, num_stages=4, ahead=ahead, partials=shared
        )
    programs = caps.sms * (2 if block_m == 16 and K > 8192 else 1)
    if block_m <= 32:
        block_n, block_k, stages, turned = 64, 128, 5, True
        if not gated and block_m == 32 and tiles > caps.sms:
            stages = 4  # two programs an SM: with one at a time, 400 tiles would be four rounds of 132
        elif not gated and programs // 2 < tiles <= caps.sms:
            stages = 7  # a program a tile and one an SM, with all of its memory
        elif gated and tiles <= caps.sms:
            stages = 4  # in whole steps; by itself it wants 5
        elif gated and block_m == 16:
            stages = 3  # two programs an SM here too; of 32 rows two do not fit
    elif block_m == 64 and not gated and tiles <= caps.sms:
        # One program an SM, with all of its memory.
        block_n, block_k, stages, turned = 64, 128, 6, True
    elif block_m == 64:
        block_n, block_k, turned = 64 if gated else 128, 64, True
        stages = 4 if gated and tiles > caps.sms else 6  # with 4 two programs fit an SM
    elif reads_before and not gated:
        # Three programs a tile of 128 columns, so that x is read half as often as with 64.
        fits = MAX_PARTIALS_LEFT * cdiv(N, 128) <= caps.sms and K // MAX_PARTIALS_LEFT >= LEAST_COLUMNS_OF_PARTIAL
        return SmallM(
            block_m=block_m, block_n=128, block_k=64, transposed=True, num_stages=5, ahead=ahead,
            partials=MAX_PARTIALS_LEFT if fits else 1,
        )  # fmt: skip
    elif (
        in_parts
        and not gated
        and M == WHOLE_ROWS
        and caps.sms < 2 * tiles
        and MAX_PARTIALS_LEFT * tiles <= 2 * caps.sms
    ):
        # Two programs an SM.
        parts = MAX_PARTIALS_LEFT if cdiv(K, 128) // MAX_PARTIALS_LEFT >= LEAST_STEPS else 1
        return SmallM(
            block_m=block_m, block_n=64, block_k=64, transposed=True, num_stages=4, ahead=ahead, partials=parts
        )
    else:
        # The library gets these, but for parts and whole gated tiles (configured).
        block_n, block_k, stages, turned = 64, 64 if gated else 128, 7 if gated else 4, True
    steps = cdiv(K, block_k)
    most = MAX_PARTIALS_LEFT if in_parts else MAX_PARTIALS
    return SmallM(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        transposed=turned,
        num_stages=stages,
        ahead=ahead,
        num_warps=8 if block_m == 128 and gated else 4,
        partials=max(1, min(programs // cdiv(N, block_n), steps // LEAST_STEPS, most)),
    )

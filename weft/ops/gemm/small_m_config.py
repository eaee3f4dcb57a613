"""How a product of few rows is computed (weft.ops.gemm.small_m): the configs, and which call gets which.

The limits are crossovers measured on H200: docs/decisions.md, "Small-M GEMMs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.ops.registration import HALVES
from weft.plan.memo import remembered
from weft.runtime.arithmetic import cdiv, next_power_of_2

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

OPS = ("matmul", "matmul_silu_mul")
MAX_PARTS = 16
# Where the kernel behind adds them up: with more, all-reduces keep some in local memory.
MAX_PARTS_LEFT = 3
# Up to 64 rows this kernel is as fast as cuBLAS's by itself, give or take 5 %, and ahead behind another kernel, under whose end
# it begins; with 128 it is a fifth slower by itself. With rows that do not fill a tile (65, 96) it loses more.
MAX_ROWS = 64
# Where the kernel behind adds the parts up (matmul_parts) it wins up to 128 rows: it may begin as the kernel before ends, which
# cuBLAS's cannot.
MAX_ROWS_IN_PARTS, LEAST_ROWS_IN_PARTS = 128, 96
# Columns of a part at least, where the kernel before is no all-reduce. Half as many gained nothing.
LEAST_COLUMNS_IN_PARTS = 4096
# A gated product of exactly so many rows, whose tiles are one round, is as fast as cuBLAS's and saves the kernel of silu; so is
# one in parts, with two programs an SM.
WHOLE_ROWS = 128
# Elements of a weight that takes longer to read than a kernel takes to start: 2 us. The smallest measured has 10 million.
LEAST_WEIGHT = 4 << 20
# Columns that a program prefetches while the kernel before it leaves the memory idle, as an all-reduce does. Behind a kernel
# that reads memory itself prefetching costs time.
AHEAD = 256
# Steps along K that make a part worth its sum; and worth its place where the kernel behind adds the parts up.
LEAST_STEPS, LEAST_STEPS_IN_PARTS = 8, 16


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


def parts_of(config: SkinnyConfig, K: int) -> int:
    """Programs that share a tile: no more than there are steps along K."""
    return min(config.parts, cdiv(K, config.block_k))


@remembered
def configured(
    op: str, M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities, *, factored: bool = False,
    in_parts: bool = False,
) -> tuple[SkinnyConfig | None, str]:  # fmt: skip
    """The config of a call of ``op``, "matmul" or "matmul_silu_mul", with ``out`` [M, N], and the reason as a sentence;
    None: the library, or the persistent kernel. Operands that no descriptor reaches get another design all the same.
    factored: of a FactoredNorm, which with another design whoever reads the product must divide, or a norm of several kernels
    before it. in_parts: of ``matmul_parts``."""
    gated = op == "matmul_silu_mul"
    if dtype not in HALVES:
        return None, f"{dtype}: a product of few rows is for fp16 and bf16"
    if caps.is_simulated:
        wanted = gated or factored or in_parts
        return config_for(M, N, K, caps, gated) if wanted else None, "simulated: the kernel is what is to be seen"
    if caps.arch != "sm_90":
        return None, f"{caps.arch}: not measured"
    config = config_for(M, N, K, caps, gated, in_parts, factored)
    if in_parts and LEAST_ROWS_IN_PARTS <= M <= MAX_ROWS_IN_PARTS and parts_of(config, K) > 1:
        return config, f"M={M} <= {MAX_ROWS_IN_PARTS}, in parts: nobody has to add them up for it"
    whole = gated and M == WHOLE_ROWS and cdiv(N, 64) <= caps.sms < 2 * cdiv(N, 64)
    if M > MAX_ROWS and not whole:
        return None, f"M={M} > {MAX_ROWS}: x and the weight weigh the same, and cuBLAS shares x between SMs"
    if K * N * (2 if gated else 1) < LEAST_WEIGHT and not factored:
        return None, f"N={N} K={K}: a weight too small to be what takes the time"
    if whole:
        return config, f"M={M}, one round of whole tiles: silu needs no kernel of its own"
    return config, f"M={M} <= {MAX_ROWS}: all programs at once, each reading its share of the weight"


def config_for(
    M: int, N: int, K: int, caps: Capabilities, gated: bool, in_parts: bool = False, factored: bool = False
) -> SkinnyConfig:
    """The config for ``out`` [M, N]: of any sizes on any target, though ``configured`` asks for few of them. in_parts and
    factored as of there."""
    block_m = max(16, min(128, next_power_of_2(M)))
    if caps.is_simulated:
        return SkinnyConfig(block_m=16, block_n=32, block_k=64, parts=2 if K > 128 else 1)
    if caps.arch not in ("sm_90", "sm_100", "sm_103"):
        # 64 KiB of shared memory suffice for all of these. gfx9 has 64 KiB, sm_12x 99.
        return SkinnyConfig(block_m=min(64, block_m), block_n=32, block_k=64, num_stages=2 if gated else 3)
    tiles = cdiv(N, 64)
    # In parts and not of a norm that an all-reduce computes: a row-parallel layer's.
    reads_before = in_parts and not factored
    ahead = 0 if reads_before or (gated and (block_m > 16 or tiles <= caps.sms)) else AHEAD
    shared = min(2 * caps.sms // tiles, K // (128 * LEAST_STEPS_IN_PARTS))
    if in_parts and not gated and block_m <= 32 and tiles <= caps.sms < 2 * tiles and shared > 1:
        # A program a tile would leave SMs idle: two an SM.
        return SkinnyConfig(
            block_m=block_m, block_n=64, block_k=128, turned=True, num_stages=4, ahead=ahead, parts=shared
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
        fits = MAX_PARTS_LEFT * cdiv(N, 128) <= caps.sms and K // MAX_PARTS_LEFT >= LEAST_COLUMNS_IN_PARTS
        return SkinnyConfig(
            block_m=block_m, block_n=128, block_k=64, turned=True, num_stages=5, ahead=ahead,
            parts=MAX_PARTS_LEFT if fits else 1,
        )  # fmt: skip
    elif in_parts and not gated and M == WHOLE_ROWS and caps.sms < 2 * tiles and MAX_PARTS_LEFT * tiles <= 2 * caps.sms:
        # Two programs an SM.
        parts = MAX_PARTS_LEFT if cdiv(K, 128) // MAX_PARTS_LEFT >= LEAST_STEPS else 1
        return SkinnyConfig(
            block_m=block_m, block_n=64, block_k=64, turned=True, num_stages=4, ahead=ahead, parts=parts
        )
    else:
        # The library gets these, but for parts and whole gated tiles (configured).
        block_n, block_k, stages, turned = 64, 64 if gated else 128, 7 if gated else 4, True
    steps = cdiv(K, block_k)
    return SkinnyConfig(
        block_m=block_m, block_n=block_n, block_k=block_k, turned=turned, num_stages=stages, ahead=ahead,
        num_warps=8 if block_m == 128 and gated else 4,
        parts=max(1, min(programs // cdiv(N, block_n), steps // LEAST_STEPS, MAX_PARTS_LEFT if in_parts else MAX_PARTS)),
    )  # fmt: skip

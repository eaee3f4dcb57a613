"""How a product of few rows is computed (weft.ops.skinny): the configs, and which call gets which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.ops.arithmetic import cdiv, next_power_of_2
from weft.ops.registration import HALVES

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

OPS = ("matmul", "matmul_silu_mul")
MAX_PARTS = 16
# Where the kernel behind adds them up: with more, all-reduces keep some in local memory.
MAX_PARTS_LEFT = 3
# Rows up to which it beats cuBLAS: 64x5120x6400 19.2 / 19.5 us, 128x5120x6400 25.3 / 21.0. Idle SMs are not why: 128x12800x5120
# took 37.1 in 100 whole tiles and 44.7 in equal shares for all 132, the cut tiles put together by one program (36.3); and rows
# that are not there make it slower: 96x12800x5120 40.8 (35.4), 65x 48.7 (35.5). Of a search that no file keeps.
MAX_ROWS = 64
# The same where the kernel behind adds the parts up (matmul_parts) and there are some, from LEAST_ROWS_IN_PARTS on. Decode
# steps, ms, with cuBLAS's products / with parts, at W=2 down of 128 sequences 12.17 / 11.82, of 96 11.46 / 11.16, qkv too of
# 128 11.77, of 96 0.4 more; at W=4's shapes qkv of 96 6.95 / 6.90, of 72 6.62 / 6.83 (benchmarks/lab/h200-128-rows.json).
MAX_ROWS_IN_PARTS, LEAST_ROWS_IN_PARTS = 128, 96
# Columns of a part where the kernel before is no all-reduce. With half as many nothing was gained: down at W=4's shapes 6.84 ms
# and 6.85.
LEAST_COLUMNS_IN_PARTS = 4096
# So many rows, no fewer (rows that are not there take longer than others: see MAX_ROWS), of a gated one whose tiles are one
# round: the library's way costs silu's kernel and the gap before it. Decode steps of 128 sequences at W=4's shapes, ms: the
# library and silu_mul 7.086, this with 5 stages 7.100, 6 7.040, 7 7.012 (benchmarks/lab/h200-ahead.json). And of one in parts,
# two programs an SM.
WHOLE_ROWS = 128
# Elements of a weight that takes longer to read than a kernel takes to start: 2 us. The smallest measured has 10 million.
LEAST_WEIGHT = 4 << 20
# Columns that a program prefetches while the kernel before it waits and leaves the memory alone, as an all-reduce does. Decode
# steps of Qwen3-32B with 256 / none, ms, of one sequence and of 32 with W=4's shapes, then with W=2's
# (benchmarks/lab/h200-ahead.json): qkv, behind an all-reduce, 5.01 / 5.04, 6.06 / 6.08, 8.52 / 8.56, 10.21 / 10.22. o and down,
# behind kernels that read memory themselves, 4.96 / 4.93, 6.06 / 6.03, 8.52 / 8.52, 10.21 / 10.18: none. gate-up, behind an
# all-reduce, 4.96 / 4.97, 6.06 / 5.99, 8.52 / 8.55, 10.21 / 10.16: none, but for up to 16 rows where tiles outnumber SMs.
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
    factored as of there.

    Medians in CUDA graphs on H200, one product after the other, with cuBLAS in brackets (benchmarks/lab/h200-skinny.json).
    """
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
        # A program a tile would leave SMs idle: two an SM. Decode steps of Qwen3-32B, ms, before and so: W=4 one sequence
        # 5.08 / 5.01, 8 5.36 / 5.33, 32 the same; W=2 8.70 / 8.56, 8.90 / 8.83, 9.30 / 9.25 (benchmarks/lab/h200-parts.json).
        return SkinnyConfig(
            block_m=block_m, block_n=64, block_k=128, turned=True, num_stages=4, ahead=ahead, parts=shared
        )
    programs = caps.sms * (2 if block_m == 16 and K > 8192 else 1)
    if block_m <= 32:
        # 16x2560x5120 9.5 (10.9), 16x12800x5120 33.4 (35.8), gated 34.9 (36.8); 32: 9.5 (11.1), gated 35.3 (37.5). Stages in
        # a search that no file keeps: 32x25600x5120 64.6 with 4, 73.8 with 5 (66.3), 32x12800x5120 33.7, 36.9 (35.5);
        # 16x5120x6400 18.4 with 7, 19.1 with 5 (18.8), 32x5120x6400 18.7, 19.5 (19.1).
        block_n, block_k, stages, turned = 64, 128, 5, True
        if not gated and block_m == 32 and tiles > caps.sms:
            stages = 4  # two programs an SM: with one at a time, 400 tiles would be four rounds of 132
        elif not gated and programs // 2 < tiles <= caps.sms:
            stages = 7  # a program a tile and one an SM, with all of its memory
        elif gated and tiles <= caps.sms:
            # Decode steps at W=4's shapes, one sequence 4.97 with 5 stages, 4.93 with 4; 32 5.99, 5.93 (h200-ahead.json).
            stages = 4
        elif gated and block_m == 16:
            # Two programs an SM here too: gated 1x12800x5120 behind a norm 64.3, with one 67.8; 16 66.3, 67.0; of 32 rows two
            # do not fit (benchmarks/lab/h200-parts.json).
            stages = 3
    elif block_m == 64 and not gated and tiles <= caps.sms:
        # One program an SM, with all of its memory. 64x5120x6400 19.2 (19.5).
        block_n, block_k, stages, turned = 64, 128, 6, True
    elif block_m == 64:
        # 64x12800x5120 34.9 (36.5), gated with 6400 outputs 36.0 (37.9 with its silu). With 12800, behind a norm, 69.8 with 4
        # stages, of which two programs fit an SM, 72.9 with 6.
        block_n, block_k, turned = 64 if gated else 128, 64, True
        stages = 4 if gated and tiles > caps.sms else 6
    elif reads_before and not gated:
        # Three programs a tile of 128 columns, so that x is read half as often as with 64. Decode steps of 128 sequences at
        # W=2, ms, down with block_n=128 12.03, with 64 12.09.
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
        # 128x5120x6400 25.3 (21.0): the library gets these, but for parts and whole gated tiles (configured).
        block_n, block_k, stages, turned = 64, 64 if gated else 128, 7 if gated else 4, True
    steps = cdiv(K, block_k)
    return SkinnyConfig(
        block_m=block_m, block_n=block_n, block_k=block_k, turned=turned, num_stages=stages, ahead=ahead,
        num_warps=8 if block_m == 128 and gated else 4,
        parts=max(1, min(programs // cdiv(N, block_n), steps // LEAST_STEPS, MAX_PARTS_LEFT if in_parts else MAX_PARTS)),
    )  # fmt: skip

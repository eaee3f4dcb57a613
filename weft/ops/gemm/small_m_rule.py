"""Designs of small-M GEMMs (weft.ops.gemm.small_m), and the rule for shapes without a row.

The limits are crossovers measured on H200 (benchmarks/lab/skinny.py), by the time of a whole decode step of Qwen3-32B: a kernel
may begin during the end of the one before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.ops.gemm import deep_gemm
from weft.ops.knobs import check_knobs, counts, design_type, either, halved, knob, powers, stepped
from weft.ops.registration import HALVES
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import SHARED_BYTES

if TYPE_CHECKING:
    from weft.ops.gemm.gemm_op import GemmCall
    from weft.runtime.capabilities import Capabilities

MAX_PARTIALS = 16
# Where the next kernel adds them up: with more, all-reduces keep some in local memory.
MAX_PARTIALS_LEFT = 3
# Up to 64 rows this kernel takes within 5 % of cuBLAS's time by itself, and less after another kernel, under whose end
# it begins; with 128 rows it takes a fifth more by itself. One H100, 16x5120x4096 after a norm: 17.6 us, cuBLAS 19.8
# (benchmarks/lab/h100-skinny.json). Where it wins with more rows, rows of the table say so.
MAX_ROWS = 64
# Rows up to which an fp8 GEMM of any weight, and of one of few rows that is not gated, takes less time than cuBLAS's block
# scaling. One H200, 25600x5120: 64 rows 41.3 us, cuBLAS 43.9; 128 rows 57.8 and 44.5. 5120x12800: 128 rows 31.9 and 38.9
# (benchmarks/fp8_gemm.py). Gated ones had tiles of 128 rows too: steps of 128 sequences of Qwen3-32B took four H200s 38 us a
# layer more than predicted (results/h200-x4-fp8); cuBLAS takes 24.8 us for that weight (lab/h200-fp8-gemm-w4.json).
MAX_FP8_ROWS, MAX_FP8_ROWS_NARROW = 64, 128
# Rows up to which a 4-bit weight is converted in the GEMM, in place of before it. One H200, 25600x5120, in brackets with the
# weight converted before: MXFP4 128 rows 127 us (179), 256 rows 248 (202); int4 128 rows 135 (178), 256 rows 267 (205).
MAX_FOUR_BIT_ROWS = 128
# Numbers of a weight below which that pays up to 32 rows alone: 512x1536 gated, 48 rows 18 us, converted before 11.
LEAST_FOUR_BIT_WEIGHT = 2 << 20
# Blocks along K of a partial sum with a 4-bit weight: the least, and the least from which twice as many programs pay.
LEAST_STEPS_OF_FOUR_BIT, MANY_STEPS = 4, 48
# Elements of a weight that takes longer to read than a kernel takes to start: 2 us. The smallest measured has 10 million.
LEAST_WEIGHT = 4 << 20
# Columns that a program prefetches while the kernel before it leaves the memory idle, as an all-reduce does. Behind a kernel
# that reads memory itself prefetching costs time. Two H200s, a decode step with W=4's shapes, qkv prefetched: 5.01 ms, not 5.04
# (lab/h200-ahead.json@cd3ccc0).
AHEAD = 256
# Stages of a gated GEMM, by the most tiles that an SM has: as many programs fit an SM, and all tiles run at once. With more
# stages one fits, and the last few tiles wait for a whole round. One H200, 8704x5120 gated, 136 tiles: 4, 32 and 64 rows take
# 46, 48 and 50 us, with one program an SM 56, 58 and 60 (benchmarks/lab/gated_rounds.py).
STAGES_AT_ONCE = {2: 5, 3: 3}
# Least steps along K of a partial sum: where a separate kernel adds them up, and where the next kernel does.
LEAST_STEPS, LEAST_STEPS_LEFT = 8, 16
# The same of an fp8 weight too small for a program on most SMs.
LEAST_STEPS_FEW = 7


@design_type
class SmallM:
    """Small-M GEMM.

    block_m, block_n, block_k  sizes of a tile of ``out`` and of a step along K: powers of two, at least 16
    partials     programs that share a tile, each with its share of K: 1 .. MAX_PARTIALS
    ahead        columns of its share of the weight that a program prefetches before the previous kernel has ended:
                 a multiple of 64
    transposed   out.T = weight @ x.T: tensor instructions have 64 or more rows, which the weight fills
    num_warps, num_stages      compiler options
    """

    block_m: int = knob(legal=powers(16))
    block_n: int = knob(legal=powers(16))
    block_k: int = knob(legal=powers(16))
    partials: int = knob(1, counts(MAX_PARTIALS), stepped())
    ahead: int = knob(0, near=either(0, AHEAD))
    transposed: bool = False
    num_warps: int = knob(4, near=halved(4, 8))
    num_stages: int = knob(4, near=stepped(2))

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.ahead < 0 or self.ahead % 64 != 0:
            raise ValueError(f"ahead={self.ahead} is not a multiple of 64 columns, or 0")

    def partials_of(self, K: int) -> int:
        """Number of programs that share a tile of a GEMM with this K, at most the steps along K."""
        return min(self.partials, cdiv(K, self.block_k))


def partials_left(design: object, K: int) -> int:
    """Number of split-K partials that a GEMM by ``design`` leaves to the kernel after it; 1: none."""
    return design.partials_of(K) if isinstance(design, SmallM) else 1


def empty_partials(x: torch.Tensor, N: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Empty result [M, N] of rows ``x``, or ``count`` split-K partials of it if there are several."""
    if count == 1:
        return x.new_empty((x.shape[0], N), dtype=dtype)
    return x.new_empty((count, x.shape[0], N), dtype=torch.float32)


def is_small(M: int) -> bool:
    """True if the small-M kernel, which applies deferred RMS scales, computes GEMMs of ``M`` rows."""
    return M <= MAX_ROWS


def takes(call: GemmCall) -> bool:
    """True if the kernel can compute ``call``: it reads through tensor descriptors, in 16-bit floats."""
    return call.dtype in HALVES and (call.aligned or call.quantized)


def small_m_rule(call: GemmCall, caps: Capabilities, *, gated: bool) -> tuple[bool, str]:
    """True if the small-M kernel computes ``call`` where no row decides; and the reason.

    gated  the weight is [2 N, K]
    """
    M, N, K = call.M, call.N, call.K
    if call.fp8:
        return _fp8_rule(call, caps, gated)
    if call.four_bit:
        if M > MAX_FOUR_BIT_ROWS:
            why = "a kernel converts the weight to 16 bits, which takes less time than the GEMM"
            return False, f"M={M} > {MAX_FOUR_BIT_ROWS}: {why}"
        if M > 32 and K * N * (2 if gated else 1) < LEAST_FOUR_BIT_WEIGHT:
            return False, f"M={M}, N={N} K={K}: a weight too small to be what takes the time is converted to 16 bits"
        return True, f"M={M} <= {MAX_FOUR_BIT_ROWS}: the weight is read in 4 bits"
    if call.dtype not in HALVES:
        return False, f"{call.dtype}: the small-M GEMM is for fp16 and bf16"
    if not call.aligned:
        return False, "rows that do not begin on 16 bytes: no tensor descriptor reaches them"
    if caps.arch != "sm_90":
        return False, f"{caps.arch}: not measured"
    if M > MAX_ROWS:
        return False, f"M={M} > {MAX_ROWS}: x and the weight weigh the same, and cuBLAS shares x between SMs"
    if K * N * (2 if gated else 1) < LEAST_WEIGHT and not call.deferred_norm:
        return False, f"N={N} K={K}: a weight too small to be what takes the time"
    return True, f"M={M} <= {MAX_ROWS}: all programs at once, each reading its share of the weight"


def _fp8_rule(call: GemmCall, caps: Capabilities, gated: bool) -> tuple[bool, str]:
    if caps.arch != "sm_90":
        return True, f"{caps.arch}: fp8 by cuBLAS not measured"
    if call.dtype != torch.bfloat16:
        return True, f"{call.dtype}: cuBLAS's fp8 GEMMs return bfloat16"
    if not call.aligned:
        return True, f"N={call.N} K={call.K} or scales of other blocks than 128 x 128, which cuBLAS does not take"
    most = MAX_FP8_ROWS_NARROW if cdiv(call.N, 64) <= caps.sms and not gated else MAX_FP8_ROWS
    if most < call.M:
        instead = "; by DeepGEMM in cuBLAS's place, where it works"
        taken = call.block_fp8 and deep_gemm.takes(call.M, call.N * (2 if gated else 1), call.K)
        return False, f"M={call.M} > {most}: bound by the tensor cores, as cuBLAS is" + instead * taken
    return True, f"M={call.M} <= {most}: all programs at once, each reading its share of the weight"


def _default_fp8(call: GemmCall, caps: Capabilities, gated: bool) -> SmallM:
    """``default_small_m`` with an fp8 weight: more programs than SMs keep the memory busy."""
    block_m = max(16, min(128, next_power_of_2(call.M)))
    if call.M > MAX_FP8_ROWS_NARROW:
        return SmallM(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=3 if gated else 4)
    if block_m >= 64 and cdiv(call.N, 64) <= 2 * caps.sms and not gated:
        return _fp8_by_rows(call, caps)
    whole_groups = call.fp8_rows and block_m <= 32
    # With up to 32 rows a tile of 128 columns takes as long as one of 64 and the kernel that puts its rows in fp8; with
    # 64 it takes 60.8 us, both 44.7 (H200, 25600x5120 gated, benchmarks/fp8_rows.py).
    block_n = 128 if whole_groups else _columns_of(call, block_m, gated)
    tiles, of_ten, least_steps = cdiv(call.N, block_n), _of_ten(block_n), LEAST_STEPS
    if block_n == 128 and not gated and 4 * tiles * _fp8_partials(call, caps, tiles, of_ten) < 3 * caps.sms:
        # Too few programs. One H200, 5 x 3584 x 3584: 12.2 us, of 64 columns with 4 partials 11.2 (h200-regret-unseen).
        block_n, least_steps = 64, LEAST_STEPS_FEW
        tiles, of_ten = cdiv(call.N, block_n), _of_ten(block_n)
    if gated and block_n == 64:
        # About one program an SM: 14 x 2048 x 7168 with 4 partials 17.9 us, with 7 20.0; 1 x 9728 x 2560 19.0, with 2 20.8.
        of_ten = 10 + 5 * tiles // caps.sms
    no_kernel_follows = whole_groups and 5 * tiles >= 3 * caps.sms
    return SmallM(
        block_m=block_m,
        block_n=block_n,
        block_k=128,
        transposed=True,
        num_stages=4 if gated or block_n == 128 else _fp8_stages(call, block_m),
        partials=1 if no_kernel_follows else _fp8_partials(call, caps, tiles, of_ten, least_steps),
    )


def _fp8_stages(call: GemmCall, block_m: int) -> int:
    """Stages of tiles of 64 columns.

    Each program has a third of a long K: with 4 stages the bytes in flight are too few. H200, 1 x 5120 x 12800 in a layer: 18.3
    us, 4 stages 22.2; shorter ones take 5 % longer with 8 (benchmarks/lab/fp8_layers.py).
    """
    return 8 if block_m <= 32 and call.K >= 8192 else 4


def _fp8_by_rows(call: GemmCall, caps: Capabilities) -> SmallM:
    """Design whose tensor instructions the rows fill as the weight would, and then lie in fewer registers.

    Two programs an SM where K is long or there are two tiles of rows, else one with most of the memory. H200, 5120x5120 and
    5120x12800, 64 rows: 12.9 and 25.4 us, transposed 13.3 and 28.3.
    """
    of_ten, num_stages = (20, 4) if call.M > 64 else (13, 4) if call.K >= 8192 else (10, 6)
    tiles = cdiv(call.M, 64) * cdiv(call.N, 128)
    partials = _fp8_partials(call, caps, tiles, of_ten)
    if 2 * tiles * partials < caps.sms:  # 56 x 2560 x 1536: 9.8 us, of 128 columns 11.9
        return SmallM(block_m=64, block_n=64, block_k=128, partials=_fp8_partials(call, caps, 2 * tiles, of_ten))
    return SmallM(block_m=64, block_n=128, block_k=128, num_stages=num_stages, partials=partials)


def _columns_of(call: GemmCall, block_m: int, gated: bool) -> int:
    """block_n of a transposed tile of a quantized weight."""
    return 128 if block_m <= 64 and not (gated or call.partials) else 64


def _of_ten(block_n: int) -> int:
    """Transposed programs for ten SMs: wide tiles keep more bytes in flight."""
    return 16 if block_n == 128 else 25


def _fp8_partials(call: GemmCall, caps: Capabilities, tiles: int, of_ten: int, least_steps: int = LEAST_STEPS) -> int:
    """Programs that share each of ``tiles`` tiles, with ``of_ten`` programs for ten SMs."""
    most = MAX_PARTIALS_LEFT if call.partials or call.M > 64 else MAX_PARTIALS
    return max(1, min(of_ten * caps.sms // 10 // tiles, cdiv(call.K, 128) // least_steps, most))


def _default_four_bit(call: GemmCall, caps: Capabilities, gated: bool) -> SmallM:
    """``default_small_m`` with a 4-bit weight, by the fastest tiles of 60 unseen shapes on one H200.

    Transposed: tensor instructions take their first operand from registers, where its numbers are made. Wide tiles make numbers
    for more rows, and pay where there are enough of them.
    """
    block_m, steps = max(16, min(128, next_power_of_2(call.M))), cdiv(call.K, 128)
    wide = block_m == 128 or block_m == 64 and 2 * cdiv(call.N, 128) >= 3 * caps.sms
    block_n = 128 if wide and not (gated or call.partials) else 64
    most = MAX_PARTIALS_LEFT if call.partials or block_m == 128 else MAX_PARTIALS
    tiles = cdiv(call.M, block_m) * cdiv(call.N, block_n)
    partials = max(
        1, min(_four_bit_partials(tiles, steps, block_m, caps, gated), steps // LEAST_STEPS_OF_FOUR_BIT, most)
    )
    deep = block_m <= 32 and steps >= 2 * LEAST_STEPS_OF_FOUR_BIT * partials
    return SmallM(
        block_m=block_m,
        block_n=block_n,
        block_k=256 if deep else 128,
        transposed=True,
        num_stages=3 if deep else 4,
        partials=partials,
    )


def _four_bit_partials(tiles: int, steps: int, block_m: int, caps: Capabilities, gated: bool) -> int:
    """Programs that share each of ``tiles`` tiles of ``steps`` blocks along K.

    Two programs an SM, or three of few rows with gate and up; four where each still has many steps. More tiles than that: two
    a tile where their last round is shorter.
    """
    if block_m == 128:
        return caps.sms // tiles
    of_sm = 3 if gated and block_m == 16 else 2
    partials = of_sm * caps.sms // tiles
    if partials > 0:
        return 2 * partials if not gated and block_m <= 32 and steps >= MANY_STEPS * partials else partials
    programs = (of_sm if gated or block_m == 64 else 4 if block_m == 16 else 3) * caps.sms
    return 2 if cdiv(2 * tiles, programs) < 2 * cdiv(tiles, programs) else 1


def default_small_m(call: GemmCall, caps: Capabilities, *, gated: bool) -> SmallM:
    """The design where no row decides, for ``out`` [M, N] of any sizes on any target.

    The rows of H200 were found by search; this follows them: a ring of stages as deep as shared memory allows, tiles of 64
    columns, and wider ones where more than a round of programs would result; K is split until every SM has a program.
    """
    block_m = max(16, min(128, next_power_of_2(call.M)))
    if caps.arch not in ("sm_90", "sm_100", "sm_103"):
        # 64 KiB of shared memory suffice for all of these. gfx9 has 64 KiB, sm_12x 99.
        block_k, num_stages = (128, 2) if call.quantized else (64, 2 if gated else 3)
        return SmallM(block_m=min(64, block_m), block_n=32, block_k=block_k, num_stages=num_stages)
    if call.quantized:
        return (_default_fp8 if call.fp8 else _default_four_bit)(call, caps, gated)
    tiles, programs = cdiv(call.N, 64), caps.sms
    most, least_steps = MAX_PARTIALS_LEFT if call.partials else MAX_PARTIALS, LEAST_STEPS
    block_n, block_k, num_stages = _tile_of(block_m, tiles, caps, gated)
    if block_m <= 32 and call.partials and tiles <= caps.sms < 2 * tiles:
        # A program a tile would leave SMs idle: two an SM.
        programs, most, least_steps, num_stages = 2 * caps.sms, MAX_PARTIALS, LEAST_STEPS_LEFT, 4
    # A row-parallel layer's GEMM, and a gated one, follow a kernel that reads memory.
    idle_before = not gated and (call.deferred_norm or not call.partials)
    return SmallM(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        transposed=True,
        num_stages=num_stages,
        num_warps=8 if block_m == 128 and gated else 4,
        ahead=AHEAD if idle_before else 0,
        partials=max(1, min(programs // cdiv(call.N, block_n), cdiv(call.K, block_k) // least_steps, most)),
    )


def _tile_of(block_m: int, tiles: int, caps: Capabilities, gated: bool) -> tuple[int, int, int]:
    """(block_n, block_k, num_stages) with a weight of 16 bits. tiles: of 64 columns."""
    of_sm = cdiv(tiles, caps.sms)
    if gated and block_m <= 64 and of_sm in STAGES_AT_ONCE:
        stage = 2 * 64 * (block_m + 2 * 64)  # bytes of 64 columns of K: rows, gate and up
        return 64, 64, min(STAGES_AT_ONCE[of_sm], SHARED_BYTES // of_sm // stage)
    if block_m <= 32:
        return 64, 128, 4 if gated or (block_m == 32 and tiles > caps.sms) else 5
    if block_m == 64 and not gated:
        # One program an SM, with most of its memory.
        return (64, 128, 6) if tiles <= caps.sms else (128, 64, 6)
    return 64, 64, 7 if gated else 4

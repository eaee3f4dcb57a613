"""Rule of the tiles of grouped GEMMs, and the tiles that a search tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.kernels.four_bit import BLOCK
from weft.kernels.fp8 import COLUMNS
from weft.ops.gemm.space import STAGES_BYTES
from weft.ops.moe.grouped.gemms import FixedTiles, FourBitTiles, GroupedCall, GroupedTiles, Tiles
from weft.ops.registration import HALVES
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Pairs from which on tiles of 16 pairs are enough for two programs an SM: 256 are faster so, 64 are not. Not measured between.
MANY_PAIRS = 256
# The same of fp8 operands: 64 are faster so, 8 are not.
TWO_PROGRAMS = 64
# K up to which a tile's steps are so few that more programs an SM, each with fewer steps in flight, take less time: of 16
# bits; of fp8, whose tiles then have 128 rows.
SHORT_K, SHORT_FP8_K = 512, 2048
# Most pairs of a tile by which a weight in 4 bits is read as it is.
FEW_PAIRS = 32
# Pairs of all tiles up to which programs of a gated GEMM with 4-bit weights are too few for all SMs.
FEW_GATED_PAIRS = 8
# block_n, block_k, num_warps, per_sm for 16-bit floats: bound by reading weights up to 32 pairs a tile, then by tensor cores.
FEW = (
    (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 2), (128, 64, 4, 3), (128, 128, 4, 1),
    (128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 8, 2),
)  # fmt: skip
QUICK_FEW = ((64, 128, 4, 3), (128, 128, 4, 2), (128, 128, 4, 3))
MANY = ((256, 64, 8, 1), (128, 64, 4, 2), (128, 64, 8, 1), (128, 128, 8, 1), (256, 32, 8, 1), (64, 64, 4, 3))
QUICK_MANY = ((256, 64, 8, 1), (128, 64, 4, 2))
# The same of fp8 operands, a step of 128 columns under one scale; gate's and up's rows need 256.
FEW_FP8 = ((256, 128, 4, 1), (256, 128, 4, 2), (128, 128, 4, 2), (128, 128, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4))
MANY_FP8 = ((256, 128, 8, 1), (128, 128, 8, 1), (128, 128, 4, 2), (64, 128, 4, 2))


def grouped_tiles_for(call: GroupedCall, caps: Capabilities, *, gated: bool) -> GroupedTiles:
    """The fastest designs of probes on one H200 (Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral), for bf16.

    fp8 ones are ``_fp8_tiles``.

    up to 32  pairs a tile: 4 stages of 32 KB in one program an SM, or of 16 KB in two, so that all programs have room at once.
              From MANY_PAIRS on, of 16 pairs a tile, 3 stages of 32 KB in two. A layer of half of 128 experts takes at most 4 %
              longer than with the best design, of all 128 6 % (benchmarks/lab/h200-grouped-designs.json). So too where all
              gated tiles run at once by two an SM, in two rounds by one: one token of gpt-oss-120b 41.9 us, otherwise 46.3, of
              MiniMax-M2 46.2 and 48.9 (benchmarks/lab/h200-regret-unseen/w1.json). The second GEMM of K up to SHORT_K by
              three programs an SM of 3 stages: granite's of 24 tokens 21.2 us, otherwise 22.7 (w1-sixty.json there)
    gathered  128 x 256 in 4 stages; 3 stages take 7 % longer at 256 rows an expert, 128 x 128 27 %, its loads of rows being
              half of all
    in order  128 x 128 with 2 programs an SM; for N of 8192 and more 128 x 256
    """
    if call.fp8:
        return _fp8_tiles(call, caps, gated)
    if call.dtype == torch.float32:
        return GroupedTiles(block_n=32, block_k=32, transposed=call.block < 64, num_warps=8, num_stages=2)
    if caps.arch.startswith("gfx") or caps.arch == "sm_80":  # less shared memory, and no descriptors in hardware
        return GroupedTiles(block_n=64, block_k=64, transposed=call.block < 64, num_warps=4, num_stages=2)
    # Tiles of 128 rows of gate and up, if no two pairs have the same expert.
    tiles = call.pairs * cdiv(2 * call.N, 128)
    one_round = gated and caps.sms < tiles <= 2 * caps.sms
    if call.block == 16 and (call.pairs >= MANY_PAIRS or one_round):
        return GroupedTiles(block_n=128, block_k=128, transposed=True, per_sm=2, num_warps=4, num_stages=3)
    if call.block < 64:
        if gated:
            return GroupedTiles(block_n=128, block_k=128, transposed=True, num_warps=4, num_stages=4)
        if call.K <= SHORT_K:
            return GroupedTiles(block_n=64, block_k=128, transposed=True, per_sm=3, num_warps=4)
        return GroupedTiles(block_n=64, block_k=128, transposed=True, per_sm=2, num_warps=4, num_stages=4)
    if call.gather:
        return GroupedTiles(num_stages=4)
    if call.N * (2 if gated else 1) >= 8192:
        return GroupedTiles()
    return GroupedTiles(block_n=128, per_sm=2, num_warps=4)


def fixed_tiles_for(op: str, call: GroupedCall, caps: Capabilities, *, gated: bool) -> FixedTiles:
    """64 rows of the weight by the pairs of a tile; if gated 64 of gate's and as many of up's.

    Of a gated fp8 weight 128 of each, since results in fp8 have a scale for 128 columns. Not measured.

    ValueError for weights without an invariant design.
    """
    if call.four_bit or call.channel_fp8 or not call.fp8 and call.dtype not in HALVES:
        form = "4 bits" if call.four_bit else "fp8 without blocks" if call.channel_fp8 else str(call.dtype)
        raise ValueError(f"{op}: invariant=True with a weight of {form}; pass bfloat16, float16, or fp8 in blocks")
    rows = 128 if call.fp8 and gated else 64
    few = caps.arch.startswith("gfx") or caps.arch == "sm_80"
    return FixedTiles(
        block_n=rows * (2 if gated else 1), block_k=128 if call.fp8 else 64, num_stages=2 if few else 3 if gated else 4
    )


def four_bit_tiles_for(call: GroupedCall, caps: Capabilities, *, gated: bool) -> FourBitTiles:
    """64 rows of the weight by the pairs of a tile, if gated of gate and of up, in steps of two blocks.

    MXFP4 of gpt-oss-120b on one H200, 1 and 32 tokens: gated 36 and 398 us, the second GEMM 18 and 195; in steps of one block
    48 and 484, 23 and 233. Few pairs, gated: 32 rows of gate and of up in one product, for twice as many programs, 33 us.
    """
    if caps.arch not in ("sm_90", "sm_100", "sm_103"):
        return FourBitTiles(block_n=128 if gated else 64, block_k=BLOCK, num_stages=2)
    if gated and call.pairs <= FEW_GATED_PAIRS:
        return FourBitTiles(block_n=64, transposed=False)
    return FourBitTiles(block_n=128 if gated else 64, per_sm=2 if gated and call.block > 16 else 3)


def _fp8_tiles(call: GroupedCall, caps: Capabilities, gated: bool) -> GroupedTiles:
    """The fastest of a sweep on one H200 (Qwen3-30B-A3B, all experts), in steps of 128 columns.

    A step's sums stay apart until they are scaled, so gate and up take turns. A gated tile has 128 results, which are under one
    scale where they are written in fp8.

    up to 32  pairs a tile: two programs an SM of 3 stages, the second GEMM's of 128 rows: 8 tokens 47.9 and 24.6 us, with one
              program and with 64 rows 49.9 and 28.7. Of one token these are faster: 13.5 and 6.1 us. The second GEMM has 5
              stages: of 64 experts and 8, 32, 128 tokens 12.9, 26.5, 29.6 us, with 3 12.9, 27.5, 33.8, and with 3 and loops
              that are not flattened 13.3, 28.6, 32.2 (benchmarks/lab/h200-fp8-grouped-flattened.json). Of few pairs gated
              ones too take two programs where one an SM would take two to four rounds, two tokens of MiniMax-M2 41.2 us,
              otherwise 48.6; and second ones of K up to SHORT_FP8_K and more tiles of 128 rows than SMs take these by three
              programs of 3 stages, 5 tokens of Qwen3-Next 19.2 us, otherwise 22.9 (h200-regret-unseen/w1-sixty.json)
    64        pairs a tile: the second GEMM by two programs of 128 rows, of Ernie-4.5-300B's 200 tokens 470 us, of 64 rows 604
    more      gated one program of 8 warps, 334 us for 4096 tokens; with a result of 16 bits, by a flattened loop, in 4 stages:
              314 us, with 3, of which 100 registers spill, 759. Else two programs of 64 rows of the weight, 191 us, one of
              128 rows 206. No program of a pair waits for the other one's barriers: with one, tensor cores idle while it scales
    """
    if not caps.arch.startswith("sm_"):
        return GroupedTiles(
            block_n=256 if gated else 64, block_k=64, transposed=call.block < 64, num_warps=8, num_stages=2
        )
    if call.block < 64:
        few = {"block_k": 128, "transposed": True, "num_warps": 4}
        tiles = call.pairs * cdiv(call.N, 128)  # at most, of 128 rows
        if call.pairs >= TWO_PROGRAMS or (gated and caps.sms < tiles <= 4 * caps.sms):
            return GroupedTiles(block_n=256 if gated else 128, per_sm=2, num_stages=3 if gated else 5, **few)
        if not gated and call.K <= SHORT_FP8_K and tiles > caps.sms:
            return GroupedTiles(block_n=128, per_sm=3, num_stages=3, **few)
        return GroupedTiles(block_n=256 if gated else 64, per_sm=1 if gated else 3, num_stages=5, **few)
    if gated:
        return GroupedTiles(
            block_n=256, block_k=128, num_warps=8, num_stages=4 if call.block_fp8 and not call.written else 3
        )
    # Of 128 pairs a tile 128 rows would spill: four times the time.
    block_n = 128 if call.block == 64 else 64
    return GroupedTiles(block_n=block_n, block_k=128, per_sm=2, columns=4096, num_warps=4, num_stages=3)


def holds_scales(design: Tiles) -> bool:
    """True if a gated tile's results are whole groups of columns under a scale of fp8 rows."""
    return design.block_n % (2 * COLUMNS.value) == 0


def four_bit_tiles(base: FourBitTiles, gated: bool) -> Iterator[FourBitTiles]:
    """Tiles far apart, besides the default ``base``."""
    for block_n, per_sm in ((64, 2), (64, 4), (128, 2), (128, 3)):
        yield replace(base, block_n=block_n * (2 if gated else 1), per_sm=per_sm)


def tiles(
    base: GroupedTiles, call: GroupedCall, caps: Capabilities, quick: bool, gated: bool
) -> Iterator[GroupedTiles]:
    """Tiles of weights of 8, 16 or 32 bits far apart, besides the default ``base``."""
    if not caps.arch.startswith("sm_"):
        return  # the default and its neighbours
    if call.dtype == torch.float32:
        yield from (replace(base, block_n=n, num_stages=stages) for n in (32, 64, 128) for stages in (2, 3))
        return
    few = call.block <= 32
    if call.fp8:
        sizes = [size for size in (FEW_FP8 if few else MANY_FP8) if gated == (size[0] == 256)]
    else:
        sizes = (QUICK_FEW if few else QUICK_MANY) if quick else FEW if few else MANY
    for block_n, block_k, num_warps, per_sm in sizes:
        nbytes = 1 if call.fp8 else call.dtype.itemsize
        deepest = STAGES_BYTES // per_sm // ((call.block + block_n) * block_k * nbytes)
        for stages in sorted({min(3, deepest), min(5, deepest)} - {0, 1}):
            yield replace(
                base,
                block_n=block_n,
                block_k=block_k,
                transposed=few,
                num_warps=num_warps,
                per_sm=per_sm,
                num_stages=stages,
            )

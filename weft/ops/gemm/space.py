"""Search space of GEMM designs: persistent tiles, small-M tiles, and algorithms of cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.small_m_rule import MAX_PARTIALS, MAX_PARTIALS_LEFT, SmallM
from weft.ops.gemm.tile import Tile
from weft.runtime import cublaslt
from weft.runtime.arithmetic import cdiv
from weft.runtime.cublaslt import Algorithm

if TYPE_CHECKING:
    from weft.ops.gemm.gemm_op import GemmCall
    from weft.runtime.capabilities import Capabilities

# Shared memory of an SM of sm_90 and sm_100, minus Triton's use besides the operands' stages. The compiler would find excess
# too, after seconds.
STAGES_BYTES = 220 << 10
# block_m, block_n, block_k, num_warps, num_stages for 16-bit floats on sm_90: wgmma shapes that keep the tensor cores busy.
LARGE_TILES = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 128, 128, 8, 3), (64, 256, 64, 4, 4), (64, 128, 64, 4, 5), (128, 64, 64, 4, 5),
)  # fmt: skip
QUICK_TILES = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4))
# block_n, block_k for few rows: bound by reading B.
NARROW_TILES = ((32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
QUICK_NARROW = ((32, 128), (32, 256), (64, 128))
NARROW_ROWS = 64
# block_n, block_k of small-M designs: a tensor instruction has 64 rows of the weight, or 128.
SMALL_M_TILES = ((64, 64), (64, 128), (128, 64))
# The same of a quantized weight, in whole groups of columns.
QUANTIZED_TILES = ((64, 128), (128, 128))
# cuBLAS algorithms that won for large GEMMs on H200, from its heuristics for some shape or their neighbours: (tile, cluster,
# custom, swizzle).
KNOWN_ALGORITHMS = tuple(
    Algorithm(tile=tile, cluster=cluster, custom=custom, swizzle=swizzle)
    for tile, cluster, custom, swizzle in (
        (20, 3, 1, 0), (20, 5, 4, 1), (23, 3, 4, 0), (24, 5, 7, 0), (29, 3, 1, 0), (29, 2, 9, 0), (30, 2, 2, 1),
        (30, 3, 8, 1), (30, 5, 2, 0), (30, 5, 4, 0), (30, 5, 8, 0), (30, 3, 4, 0), (135, 3, 0, 0), (165, 5, 2, 0),
        (184, 5, 2, 0), (184, 5, 2, 1), (197, 5, 2, 0), (201, 3, 2, 1), (201, 5, 2, 0), (247, 2, 4, 1), (247, 5, 8, 0),
        (248, 5, 7, 0),
    )
)  # fmt: skip


def tiles(base: Tile, rows: int, dtype: torch.dtype, caps: Capabilities, quick: bool) -> Iterator[Tile]:
    """Tiles for panels of ``rows`` rows, besides the default ``base``."""
    if not caps.arch.startswith("sm_"):
        return  # the default and its neighbours
    if dtype == torch.float32:
        yield from (replace(base, block_n=n, num_stages=stages) for n in (32, 64, 128) for stages in (2, 3))
        return
    for block_m, block_n, block_k, num_warps, num_stages in _sizes(rows, quick):
        yield replace(
            base, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
        )


def _sizes(rows: int, quick: bool) -> Iterator[tuple[int, int, int, int, int]]:
    if rows > NARROW_ROWS:
        yield from QUICK_TILES if quick else LARGE_TILES
        return
    block_m = next(size for size in (16, 32, 64) if size >= rows)
    for block_n, block_k in QUICK_NARROW if quick else NARROW_TILES:
        deepest = STAGES_BYTES // ((block_m + block_n) * block_k * 2)
        for stages in sorted({min(4, deepest), min(7, deepest)}):
            yield block_m, block_n, block_k, 4, stages


def algorithms(call: GemmCall, quick: bool) -> Iterator[Cublas]:
    """cuBLAS's own choice, and the algorithms that its heuristics name or that won elsewhere."""
    yield Cublas()
    named = cublaslt.algorithms(call.M, call.N, call.K, call.dtype)
    for algorithm in (*named, *(KNOWN_ALGORITHMS if named and not quick else ())):
        yield Cublas(algorithm=algorithm)


def small_m_tiles(base: SmallM, call: GemmCall, caps: Capabilities, gated: bool, quick: bool) -> Iterator[SmallM]:
    """Small-M designs besides the default ``base``: tiles, stages, and numbers of split-K partials."""
    most = MAX_PARTIALS_LEFT if call.partials else MAX_PARTIALS
    for block_n, block_k in QUANTIZED_TILES if call.quantized else SMALL_M_TILES:
        stage = (base.block_m + block_n * (2 if gated else 1)) * block_k * 2
        filled = max(1, caps.sms // cdiv(call.N, block_n))
        for stages in (4, min(7, STAGES_BYTES // stage)):
            for partials in sorted({1, min(filled, most), min(2 * filled, most)}):
                if not quick or stages == 4:
                    yield replace(base, block_n=block_n, block_k=block_k, num_stages=stages, partials=partials)

"""GEMMs of one rank, and their overlap with the gather or the sum of rows: µs by design.

M rows of the whole GEMM, N and K of one rank's, as in ``weft bench``. item: bytes of an element of the rows; weight: of a
weight, 0.5 in four bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.costs import pushes
from weft.costs.fitted import FourBit, Gemms
from weft.costs.gpu import Gpu
from weft.runtime.arithmetic import cdiv, next_power_of_2

# Rows and columns of tiles that a GEMM may use.
TILES = ((128, 256), (128, 128), (64, 128))
# Tiles of cuBLAS's GEMM with scales of blocks (benchmarks/lab/h200-fp8-layers.json names its kernel).
BLOCK_TILES = ((128, 128),)
# Rows up to which the weights decide; rows from which two ranks' pieces of peers' rows are cut in two.
FEW_ROWS, LONG_ROWS = 128, 4096
# Rows of the whole GEMM up to which overlap saves less time than the smaller GEMMs lose, for what a layer or a team of
# several nodes takes for all of its GEMMs. Four H200s, AG-GEMM 256x12800x5120: 77 us, overlapped 153
# (lab/h200-x4-matmul.json@4c5a438).
SEQUENTIAL_ROWS = 512
# Bytes of a short row, and of each of SEQUENTIAL_ROWS, which more short rows may have in all. Rows that are gathered count as
# long ones: more short ones were faster overlapped (benchmarks/results/h200-x2-fp8-prompts).
SHORT, LONG = 4 << 10, 16 << 10
# Start of a copy of scales, in front of the flag.
SCALES_COPY = 2.2
# Kernel that transposes rows' scales of blocks: before they are gathered in sequence, and again for cuBLAS.
TRANSPOSED = 1.5
# An element of rows that torch.roll turns, which divides 64-bit integers for each: by six prompts of Qwen3-32B and 8B in fp8 on
# two H200s, whose MLPs turned rows; they are predicted 3 to 11 % too short without it (benchmarks/results/h200-x2-fp8-prompts).
TURNED = 6e-6
# Most rows of a tile of a GEMM that converts a weight in 4 bits, and most rows of a tile of 128 columns, in place of 64. A tile
# reads its rows from the L2, at this rate over the memory's. One H200, MXFP4 25600x5120: 16, 64, 128 rows 39, 60, 119 us
# (benchmarks/lab/h200-four-bit-gemm.json).
TILE_ROWS, WIDE_ROWS, L2_RATE = 128, 64, 1.45
# Programs that share a tile of such a weight write their sums, and a kernel adds them up, µs.
ADDED = 3.0


def sequential_rows(world_size: int) -> int:
    """Most rows of all ranks, of any length, that a plan may multiply in sequence with a collective.

    With more rows the messages of a few MB would keep some 80 MB of the heap.
    """
    return SEQUENTIAL_ROWS * (2 if world_size == 2 else 1)


def follows(rows: int, row_bytes: int, world_size: int) -> bool:
    """True if a plan may have a collective of all ranks' ``rows`` in sequence with a GEMM.

    Short rows may be more: 3,670 of 3 KiB on two H200s take 60 us in sequence, 87 overlapped
    (benchmarks/lab/h200-regret-unseen/w2.json).
    """
    most = sequential_rows(world_size)
    return rows <= most or (row_bytes <= SHORT and rows * row_bytes <= most * LONG)


class Size(NamedTuple):
    """One GEMM.

    fp8          rows and weights are in fp8, which tensor cores multiply twice as fast; blocks: with scales of blocks
    local_first  all ranks' rows begin with this rank's, as of the ops with a collective
    fp8_wire     sums travel in fp8
    """

    M: int
    N: int
    K: int
    item: int = 2
    weight: float = 2.0
    fp8: bool = False
    blocks: bool = False
    local_first: bool = False
    fp8_wire: bool = False

    @property
    def row(self) -> int:
        """Bytes of an element of the rows that are multiplied."""
        return 1 if self.fp8 else self.item


def gemm(gpu: Gpu, fitted: Gemms, size: Size) -> float:
    """A GEMM [M, K] @ [N, K].T of one rank."""
    M, N, K = size[:3]
    weights = N * K * size.weight
    moved = M * K * size.row + M * N * size.item + weights
    if M <= FEW_ROWS:
        arithmetic = 2 * max(16, M) * N * K / gpu.flops
        read = (moved + fitted.slow * weights) / gpu.memory
        return gpu.launch + fitted.few + read + fitted.rows * arithmetic
    waves, each = tiling(gpu, fitted, size)
    idle = math.ceil(waves) - waves
    work = (waves + fitted.waves * idle) * each * slowed(gpu, fitted, size)
    return gpu.launch + fitted.begin + max(work, moved / gpu.memory)


def four_bit(gpu: Gpu, fitted: Gemms, of: FourBit, size: Size) -> float:
    """``gemm`` of a weight in 4 bits, converted by the GEMM or by a kernel before it: the faster of both."""
    M, N, K = size[:3]
    before = widened(gpu, of, N * K * size.weight, N * K) + gemm(gpu, fitted, size._replace(weight=float(size.item)))
    rows = min(TILE_ROWS, max(16, next_power_of_2(M)))
    converted = N * K / (of.convert * gpu.sms)
    read = cdiv(N, 128 if rows <= WIDE_ROWS else 64) * rows * K * size.item / (L2_RATE * gpu.memory)
    # Few columns: programs share a tile.
    added = ADDED if cdiv(N, 64) < gpu.sms and rows <= WIDE_ROWS else 0.0
    return min(before, gpu.launch + fitted.few + added + cdiv(M, rows) * (converted + read))


def widened(gpu: Gpu, of: FourBit, nbytes: float, numbers: float) -> float:
    """Kernel that writes a weight in 16 bits. nbytes: of the ``numbers`` in 4 bits."""
    return gpu.launch + (nbytes + 2 * numbers) / (of.widen * gpu.memory)


def slowed(gpu: Gpu, fitted: Gemms, size: Size) -> float:
    """Factor of a long GEMM's tiles: power limits the clocks."""
    time = 2 * size.M * size.N * size.K / gpu.flops
    return 1 + fitted.power * time**2 / (time**2 + fitted.power_us**2)


def tiling(gpu: Gpu, fitted: Gemms, size: Size) -> tuple[float, float]:
    """(waves of tiles on all SMs, µs of one) with which a GEMM alone ends first."""
    M, N, K = size[:3]
    mac = 2 * gpu.sms / gpu.flops / (2 if size.fp8 else 1)
    best, least = (0.0, 0.0), math.inf
    for rows, columns in BLOCK_TILES if size.blocks and M > FEW_ROWS else TILES:
        waves = cdiv(M, rows) * cdiv(N, columns) / gpu.sms
        each = rows * columns * K * mac * fitted.pace + fitted.tile
        time = (waves + fitted.waves * (math.ceil(waves) - waves)) * each
        if time < least:
            best, least = (waves, each), time
    return best


def ag_gemm(gpu: Gpu, fitted: Gemms, of_pushes: pushes.Pushes, size: Size, world_size: int) -> dict[str, float]:
    """All-gather of A [M, K], and its product with N rows of this rank."""
    rows = size.M * size.K * size.row
    gather = min(pushes.exchange(gpu, of_pushes, rows, world_size).values())
    scales = min(pushes.exchange(gpu, of_pushes, rows / 32, world_size).values()) if size.fp8 else 0.0
    scales += 2 * TRANSPOSED if size.blocks else 0.0
    gathered = fitted.after * gather + scales + _turned(size, size.M * size.K)
    return {
        "pipelined": _gathering(gpu, fitted, size, world_size),
        "sequential": gathered + gemm(gpu, fitted, size) + fitted.between,
    }


def gemm_rs(gpu: Gpu, fitted: Gemms, of_pushes: pushes.Pushes, size: Size, world_size: int) -> dict[str, float]:
    """Product with K columns of this rank, and the sum over the ranks, scattered by rows."""
    if size.fp8_wire:
        return {"pipelined": _scattering(gpu, fitted, size, world_size)}
    sums = size.M * size.N * size.item
    scatter = min(pushes.exchange(gpu, of_pushes, sums, world_size, adds=True).values())
    scattered = fitted.after * scatter + _turned(size, size.M * size.N)
    return {
        "pipelined": _scattering(gpu, fitted, size, world_size),
        "sequential": gemm(gpu, fitted, size) + scattered + fitted.between,
        "fused": _fused(gpu, fitted, size, sums * (world_size - 1) / world_size),
    }


def gemm_ar(gpu: Gpu, fitted: Gemms, of_pushes: pushes.Pushes, size: Size, world_size: int) -> dict[str, float]:
    """Product with K columns of this rank, and the sum over the ranks, on every rank."""
    sums = size.M * size.N * size.item
    if size.fp8_wire:
        reduced = min(pushes.fp8_all_reduce(gpu, of_pushes, sums, world_size).values())
        return {"sequential": gemm(gpu, fitted, size) + fitted.after * reduced}
    reduced = min(pushes.all_reduce(gpu, of_pushes, sums, world_size).values())
    back = min(pushes.exchange(gpu, of_pushes, sums, world_size).values())
    return {
        # The sums of the last rows go back alone.
        "pipelined": _scattering(gpu, fitted, size, world_size) + gpu.copy + back / 2,
        "sequential": gemm(gpu, fitted, size) + fitted.after * reduced,
        "fused": _fused(gpu, fitted, size, 2 * sums * (world_size - 1) / world_size),
    }


def _turned(size: Size, elements: float) -> float:
    """Kernel between a GEMM and a collective that moves this rank's rows to the front, or back."""
    return TURNED * elements if size.local_first else 0.0


def _fused(gpu: Gpu, fitted: Gemms, size: Size, sent: float) -> float:
    """Kernel that computes tiles and sends or awaits rows: the longer of both, and the first or last tile."""
    waves, each = tiling(gpu, fitted, size)
    whole = math.ceil(waves)
    weights = size.N * size.K * size.weight / gpu.memory
    work = max(whole * each * fitted.triton * slowed(gpu, fitted, size), weights)
    return fitted.fused + max(work, sent / gpu.stores) + sent / gpu.stores / (whole + 1)


def _gathering(gpu: Gpu, fitted: Gemms, size: Size, world_size: int) -> float:
    """GEMM of the own rows, then of each peer's as they arrive."""
    rows = size.M // world_size
    nbytes = rows * size.K * size.row
    work = slowed(gpu, fitted, size) * _work(gpu, fitted, size, rows)
    clock, landed = work, 0.0
    begin = gpu.copy + (SCALES_COPY if size.fp8 else 0.0)
    for _ in range(world_size - 1):
        landed += begin + nbytes / gpu.link
        clock = max(clock, landed) + work
    return fitted.call + clock + fitted.beside * landed


def _scattering(gpu: Gpu, fitted: Gemms, size: Size, world_size: int) -> float:
    """GEMMs of peers' rows, each piece sent as it is ready, then of the own rows; then the sums."""
    rows = size.M // world_size
    chunks = 2 if world_size == 2 and size.M >= LONG_ROWS else 1
    nbytes, slower = rows * size.N * size.item, slowed(gpu, fitted, size)
    added = (world_size + 1) * nbytes / (fitted.add * gpu.memory)
    rounding = 0.0
    if size.fp8_wire:
        # A kernel after each GEMM reads its rows, and writes them in fp8. Not measured.
        rounding = gpu.launch + (1 + pushes.FP8_SHARE) * nbytes / chunks / gpu.memory
        nbytes *= pushes.FP8_SHARE
    work, clock, sent = slower * _work(gpu, fitted, size, cdiv(rows, chunks)), 0.0, 0.0
    for _ in range(chunks * (world_size - 1)):
        clock += work + rounding
        sent = max(clock, sent) + gpu.copy + nbytes / chunks / gpu.link
    clock += slower * _work(gpu, fitted, size, rows)
    beside = fitted.beside * (world_size - 1) * (gpu.copy + nbytes / gpu.link)
    # No longer than GEMMs of twice the time would take, which hid the copies.
    beside += min(fitted.sums * (world_size - 1) * nbytes / gpu.link, clock / 2)
    return fitted.call + fitted.scatter + max(clock, sent) + beside + added


def _work(gpu: Gpu, fitted: Gemms, size: Size, rows: int) -> float:
    """A piece's share of all SMs, and a part of its last wave: the next piece fills the rest."""
    waves, each = tiling(gpu, fitted, size._replace(M=rows))
    lost = fitted.rest * (math.ceil(waves) - waves)
    return max((waves + lost) * each, size.N * size.K * size.weight / gpu.memory)

"""GEMMs of one rank, and their overlap with the gather or the sum of rows: µs by design.

M rows of the whole GEMM, N and K of one rank's, as in ``weft bench``. item: bytes of an element of the rows; weight: of a
weight, 0.5 in four bits.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.costs import pushes
from weft.costs.fitted import Gemms
from weft.costs.gpu import Gpu
from weft.runtime.arithmetic import cdiv

# Tiles that a GEMM may use, with the number of halvings from 128 x 256.
TILES = ((128, 256, 0), (128, 128, 1), (64, 128, 2))
CHUNKS = (1, 2, 4)
# Rows up to which the weights decide.
FEW_ROWS = 128


class Size(NamedTuple):
    """One GEMM. fp8: on tensor cores twice as fast."""

    M: int
    N: int
    K: int
    item: int = 2
    weight: float = 2.0
    fp8: bool = False


def gemm(gpu: Gpu, fitted: Gemms, size: Size) -> float:
    """A GEMM [M, K] @ [N, K].T of one rank."""
    M, N, K = size[:3]
    moved = (M * K + M * N) * size.item + N * K * size.weight
    if M <= FEW_ROWS:
        arithmetic = 2 * max(16, M) * N * K / gpu.flops
        return gpu.launch + fitted.few + moved / gpu.memory + fitted.rows * arithmetic
    tiles, each = tiling(gpu, fitted, size)
    return gpu.launch + max(cdiv(tiles, gpu.sms) * each, moved / gpu.memory)


def tiling(gpu: Gpu, fitted: Gemms, size: Size) -> tuple[int, float]:
    """(number of tiles, µs of one) with which a GEMM alone ends first."""
    M, N, K = size[:3]
    mac = 2 * gpu.sms / gpu.flops / (2 if size.fp8 else 1)
    best = None
    for rows, columns, halvings in TILES:
        tiles = cdiv(M, rows) * cdiv(N, columns)
        each = rows * columns * K * mac * fitted.smaller**halvings + fitted.tile
        if best is None or cdiv(tiles, gpu.sms) * each < cdiv(best[0], gpu.sms) * best[1]:
            best = tiles, each
    return best


def ag_gemm(gpu: Gpu, fitted: Gemms, of_pushes: pushes.Pushes, size: Size, world_size: int) -> dict[str, float]:
    """All-gather of A [M, K], and its product with N rows of this rank."""
    rows = size.M * size.K * (1 if size.fp8 else size.item)
    gather = min(pushes.exchange(gpu, of_pushes, rows, world_size).values())
    return {
        "sequential": gather + gemm(gpu, fitted, size) + fitted.between,
        "pipelined": min(_gathering(gpu, fitted, size, world_size, chunks) for chunks in CHUNKS),
        "fused": _fused(gpu, fitted, size, rows * (world_size - 1) / world_size),
    }


def gemm_rs(gpu: Gpu, fitted: Gemms, of_pushes: pushes.Pushes, size: Size, world_size: int) -> dict[str, float]:
    """Product with K columns of this rank, and the sum over the ranks, scattered by rows."""
    sums = size.M * size.N * size.item
    scatter = min(pushes.exchange(gpu, of_pushes, sums, world_size, adds=True).values())
    return {
        "sequential": gemm(gpu, fitted, size) + scatter + fitted.between,
        "pipelined": min(_scattering(gpu, fitted, size, world_size, chunks) for chunks in CHUNKS),
        "fused": _fused(gpu, fitted, size, sums * (world_size - 1) / world_size),
    }


def gemm_ar(gpu: Gpu, fitted: Gemms, of_pushes: pushes.Pushes, size: Size, world_size: int) -> dict[str, float]:
    """Product with K columns of this rank, and the sum over the ranks, on every rank."""
    sums = size.M * size.N * size.item
    reduced = min(pushes.all_reduce(gpu, of_pushes, sums, world_size).values())
    back = min(pushes.exchange(gpu, of_pushes, sums, world_size).values())
    return {
        "sequential": gemm(gpu, fitted, size) + reduced,
        # The sums of the last rows go back alone.
        "pipelined": min(_scattering(gpu, fitted, size, world_size, chunks) + gpu.copy + back / 2 for chunks in CHUNKS),
        "fused": _fused(gpu, fitted, size, 2 * sums * (world_size - 1) / world_size),
    }


def _fused(gpu: Gpu, fitted: Gemms, size: Size, sent: float) -> float:
    """Kernel that computes tiles and sends or awaits rows: the longer of both, and the first or last tile."""
    tiles, each = tiling(gpu, fitted, size)
    waves = cdiv(tiles, gpu.sms)
    return fitted.fused + max(waves * each * fitted.triton, sent / gpu.stores) + sent / gpu.stores / (waves + 1)


def _gathering(gpu: Gpu, fitted: Gemms, size: Size, world_size: int, chunks: int) -> float:
    """GEMM of the own rows, then of each piece as it arrives."""
    rows = size.M // world_size
    nbytes = rows * size.K * (1 if size.fp8 else size.item) / chunks
    clock, landed = _work(gpu, fitted, size, rows), 0.0
    for _ in range(chunks * (world_size - 1)):
        landed += gpu.copy + nbytes / gpu.link
        clock = max(clock, landed) + _work(gpu, fitted, size, cdiv(rows, chunks))
    return fitted.call + clock + _rest(gpu, fitted, size, cdiv(rows, chunks))


def _scattering(gpu: Gpu, fitted: Gemms, size: Size, world_size: int, chunks: int) -> float:
    """GEMMs of peers' rows, each piece sent as it is ready, then of the own rows; then the sums."""
    rows = size.M // world_size
    nbytes = rows * size.N * size.item
    clock = sent = 0.0
    for _ in range(chunks * (world_size - 1)):
        clock += _work(gpu, fitted, size, cdiv(rows, chunks))
        sent = max(clock, sent) + gpu.copy + nbytes / chunks / gpu.link
    clock += _work(gpu, fitted, size, rows)
    added = (world_size + 1) * nbytes / (fitted.add * gpu.memory)
    return fitted.call + max(clock + _rest(gpu, fitted, size, rows), sent) + added


def _work(gpu: Gpu, fitted: Gemms, size: Size, rows: int) -> float:
    """A piece's share of all SMs: pieces on several streams fill each other's last wave."""
    tiles, each = tiling(gpu, fitted, size._replace(M=rows))
    read = size.N * size.K * size.weight / gpu.memory
    return max(tiles * each / gpu.sms, read)


def _rest(gpu: Gpu, fitted: Gemms, size: Size, rows: int) -> float:
    """Time that the last wave of the last piece leaves unused."""
    tiles, each = tiling(gpu, fitted, size._replace(M=rows))
    return (cdiv(tiles, gpu.sms) - tiles / gpu.sms) * each / 2

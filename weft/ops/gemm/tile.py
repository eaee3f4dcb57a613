"""Output tile of the persistent GEMM kernels: sizes, default for a shape, launch constants."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from weft.kernels.gemm_tile import Block
from weft.ops.knobs import counts, design_type, halved, knob, powers, stepped
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import Capabilities


@design_type
class Tile:
    """Output tile and its compiler options.

    block_m, block_n, block_k  rows, columns and step along K: powers of two, at least 16
    group                      tile rows that reuse the same columns of B in the L2
    num_warps, num_stages      compiler options
    """

    block_m: int = knob(legal=powers(16))
    block_n: int = knob(legal=powers(16))
    block_k: int = knob(legal=powers(16), near=halved())
    group: int = knob(8, counts(), halved())
    num_warps: int = knob(4, near=halved(2, 8))
    num_stages: int = knob(3, near=stepped())

    def block(self, descriptors: bool, piece: int = 1) -> Block:
        """Kernel argument ``block``. piece: elements that are sent in each step along K (``Block``)."""
        return _block(self.block_m, self.block_n, self.block_k if descriptors else _POINTER_BLOCK_K, descriptors, piece)

    def options(self, descriptors: bool, arch: str) -> dict[str, Any]:
        """Compiler options of a GEMM kernel on a GPU of ``arch``."""
        num_warps = self.num_warps
        if not descriptors:
            num_warps = max(num_warps, min(self.block_m * self.block_n // 2048, 8))
        # One program an SM: without the bound ptxas spills with small tiles, to leave room for more programs.
        bound = {"maxnreg": 255} if arch.startswith("sm_") else {}
        return {"num_warps": num_warps, "num_stages": self.num_stages, **bound}


# Without descriptors elements are loaded through registers, which the accumulator fills: so a thin slice, over more
# threads. The tile itself stays the same: a peer's operands may be aligned otherwise, and both must divide the output alike.
_POINTER_BLOCK_K = 16


@functools.lru_cache
def _block(m: int, n: int, k: int, descriptors: bool, piece: int) -> Block:
    # Few registers for a split tile's partial sums, so that all their loads are in flight.
    join_rows = min(m, max(1, 4096 // n))
    return Block(*map(tl.constexpr, (m, n, k, descriptors, join_rows, min(piece, m * n))))


def default_tile(rows: int, N: int, dtype: torch.dtype, caps: Capabilities, panels: int = 1) -> Tile:
    """Default tile for ``panels`` panels of ``rows`` rows and N columns (weft.kernels.tile_schedule).

    K is no argument: ranks whose shares of K differ must still cut the output into the same tiles.
    """
    if dtype == torch.float32:
        # Plain FMAs (input_precision "ieee"): the accumulator shares the registers with both operands, of which 64 x 64 on
        # four warps takes all and spills.
        block_m = _fit(rows, 16, 64)
        return Tile(block_m=block_m, block_n=64, block_k=16, num_warps=8 if block_m == 64 else 4, num_stages=2)
    if caps.arch.startswith("gfx"):
        # 64 KiB of LDS for both operands; one stage waits in registers.
        block_m = _fit(rows, 16, 128)
        return Tile(block_m=block_m, block_n=128, block_k=64, num_warps=8 if block_m == 128 else 4, num_stages=2)
    if rows <= 64:
        # Bound by reading B: narrow tiles give every SM a share of it.
        block_n = 32 if panels * N <= 32 * caps.sms else 64
        return Tile(block_m=_fit(rows, 16, 64), block_n=block_n, block_k=128 if _is_datacentre(caps.arch) else 32)
    if not _is_datacentre(caps.arch):
        return Tile(block_m=128, block_n=128, block_k=32, num_warps=8)
    if panels * cdiv(rows, 128) * cdiv(N, 256) < caps.sms:
        return Tile(block_m=128, block_n=128, block_k=64, num_warps=4)
    return Tile(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)


def splits_by_default(K: int) -> bool:
    """True if tiles of the last round are split along K.

    Not for a small K, where joining a tile takes as long as a third of it (K=2048, 28 tiles split in 4, H200: 3 µs slower).
    """
    return K >= 4096


def _fit(size: int, low: int, high: int) -> int:
    """Power of two in low .. high that covers ``size``, or the nearest."""
    return max(low, min(high, next_power_of_2(size)))


def _is_datacentre(arch: str) -> bool:
    """True for sm_90, sm_100, sm_103: TMA (not in sm_8x), 227 KiB of shared memory (not in sm_12x)."""
    return int(arch.removeprefix("sm_")) // 10 in (9, 10)

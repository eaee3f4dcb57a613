"""How a matrix product is computed: ``GemmConfig``, and which one a call gets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from weft.ops.dispatch import LIBRARY_ROWS, choose_matmul
from weft.plan import table as tuned
from weft.plan.memo import remembered
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.codec import exchangeable
from weft.transport.copy_channel import MAX_CHUNKS

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

DESIGNS = ("fused", "segments", "library")
# The fields of GemmConfig that mean something to segments, and those that mean nothing to one kernel.
OF_SEGMENTS = ("chunks", "lanes", "span", "begin_first", "accumulate", "own_pieces")
NOT_OF_FUSED = OF_SEGMENTS[1:]


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """One output tile and how it is computed.

    block_m, block_n, block_k  powers of two, at least 16
    group     tile rows that share an L2's worth of B
    num_warps, num_stages      of the compiler
    chunks    at most MAX_CHUNKS: signals per shard (all_gather_matmul), library GEMMs per rank's rows (segments), or blocks of
              rows, each all-reduced under the GEMMs of the next (matmul_all_reduce, segments)
    split     whether tiles that do not fill a round of programs are split along K (weft.kernels.tile_schedule)
    flatten   whether a tile's first loads go out under the last one's epilogue (all_gather_matmul)
    piece     elements of a finished tile that go to its owner in each step of the next tile (a power of two): spread over
              the GEMM, since all programs finish tiles at once and the link would stand still in between
    lanes     streams that library GEMMs take in turn (segments)
    span      ranks whose rows may go into one library GEMM where they lie one after the other (segments, chunks=1)
    begin_first  whether the first GEMM waits for begin_kernel, which it may else keep from an SM (all_gather_matmul, segments)
    accumulate  whether the GEMM of a rank's own rows adds to what its only peer has sent, in place of a kernel behind it
              (matmul_reduce_scatter, segments, two ranks)
    own_pieces  library GEMMs of what a rank has itself of a chunk: the sums of one are added up under the next
              (matmul_reduce_scatter, segments, not with accumulate)
    design    "fused": one kernel; "segments": a library GEMM for each rank's rows (pipelined.py); "library": the
              library's GEMM and weft's collective, one after the other
    """

    block_m: int
    block_n: int
    block_k: int
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3
    chunks: int = 1
    split: bool = True
    flatten: bool = False
    piece: int = 2048
    lanes: int = 2
    span: int = 1
    begin_first: bool = False
    accumulate: bool = False
    own_pieces: int = 1
    design: str = "fused"

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} is not a power of two of at least 16")
        if self.piece < 1 or self.piece & (self.piece - 1):
            raise ValueError(f"piece={self.piece} is not a power of two")
        if self.design not in DESIGNS:
            raise ValueError(f"design={self.design!r} is not one of {', '.join(map(repr, DESIGNS))}")
        for name in ("group", "lanes", "span", "own_pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; pass 1 or more")
        if self.span > 1 and self.chunks > 1 and self.design == "segments":
            raise ValueError(f"span={self.span} joins what chunks={self.chunks} cuts; pass 1 for one of them")
        if self.own_pieces > 1 and self.accumulate:
            raise ValueError(
                f"own_pieces={self.own_pieces} is for sums behind a GEMM, which accumulate=True has none of; pass 1"
            )
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks={self.chunks} is not in 1 .. {MAX_CHUNKS}, the signals that a shard has")

    def in_use(self) -> dict[str, Any]:
        """The fields that mean something to the design, without it."""
        names = [field.name for field in fields(self) if field.name != "design"]
        if self.design == "library":
            names = []
        elif self.design == "segments":
            names = [name for name in names if name in OF_SEGMENTS]
        else:
            names = [name for name in names if name not in NOT_OF_FUSED]
        return {name: getattr(self, name) for name in names}


def config_for(rows: int, N: int, dtype: torch.dtype, caps: Capabilities, panels: int = 1) -> GemmConfig:
    """The tile sizes for ``panels`` panels of ``rows`` rows and N columns (weft.kernels.tile_schedule).

    K is no argument: ranks whose shares of K differ must still cut the output into the same tiles.
    """
    if caps.is_simulated:
        # A tile costs the simulator milliseconds whatever its size: about four, so that there is a schedule to see.
        block_n = _fit(cdiv(N, max(1, 4 // panels)), 16, 256)
        return GemmConfig(block_m=_fit(rows, 16, 64), block_n=block_n, block_k=128, group=2)
    if dtype == torch.float32:
        # Plain FMAs (input_precision "ieee"): the accumulator shares the registers with both operands, of which 64 x 64 on
        # four warps takes all and spills.
        block_m = _fit(rows, 16, 64)
        return GemmConfig(block_m=block_m, block_n=64, block_k=16, num_warps=8 if block_m == 64 else 4, num_stages=2)
    if caps.arch.startswith("gfx"):
        # 64 KiB of LDS for both operands; one stage waits in registers.
        block_m = _fit(rows, 16, 128)
        return GemmConfig(block_m=block_m, block_n=128, block_k=64, num_warps=8 if block_m == 128 else 4, num_stages=2)
    if rows <= 64:
        # Bound by reading B: narrow tiles give every SM a part of it.
        block_n = 32 if panels * N <= 32 * caps.sms else 64
        return GemmConfig(block_m=_fit(rows, 16, 64), block_n=block_n, block_k=128 if _is_datacentre(caps.arch) else 32)
    if not _is_datacentre(caps.arch):
        return GemmConfig(block_m=128, block_n=128, block_k=32, num_warps=8)
    if panels * cdiv(rows, 128) * cdiv(N, 256) < caps.sms:
        return GemmConfig(block_m=128, block_n=128, block_k=64, num_warps=4)
    return GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)


@remembered
def configured(
    op: str, M: int, N: int, K: int, dtype: torch.dtype, world_size: int, caps: Capabilities, own_first: bool = False
) -> GemmConfig:
    """The config of one call of ``op``: of the row that was tuned for it, else the default. M: rows of the whole product."""
    found = row_for(op, M, N, K, dtype, world_size, caps, own_first)
    return found.row.as_config(GemmConfig) if found else default_config(op, M, N, K, dtype, world_size, caps)


def row_for(
    op: str, M: int, N: int, K: int, dtype: torch.dtype, world_size: int, caps: Capabilities, own_first: bool = False
) -> tuned.Found | None:
    """The row that decides one call, if one does. Rows above LIBRARY_ROWS say nothing of an overlapped product below it, and
    an algorithm of the library is no config.

    With own_first a row of that order comes before, in its own bucket only: where another config is faster than the one for
    the order of the ranks.
    """
    if own_first:
        found = tuned.find(f"{op}+own_first", (M, N, K), dtype, world_size, caps)
        if found and found.exact:
            return found
    found = tuned.find(op, (M, N, K), dtype, world_size, caps)
    if found is None or found.row.is_algorithm:
        return None
    return None if op != "matmul" and M <= LIBRARY_ROWS < found.row.shape[0] else found


def default_config(
    op: str, M: int, N: int, K: int, dtype: torch.dtype, world_size: int, caps: Capabilities
) -> GemmConfig:
    """What a call of ``op`` gets where nothing was tuned, of the design that dispatch chooses."""
    panels = 1 if op in ("matmul", "matmul_all_reduce") else world_size
    config = config_for(M // panels, N, dtype, caps, panels)
    decision = choose_matmul(op, M, N, K, dtype, world_size, caps)
    # Putting a tile together costs what a third of a short one takes: K=2048, 28 tiles split in 4: 3 µs slower.
    split = caps.is_simulated or K >= 4096
    piece = 1024 if K // config.block_k >= 32 else 2048
    if decision.design == "segments":
        config = replace(config, **segments_for(op, M, N, K, world_size))
    elif op == "matmul_all_reduce" and world_size == 3 and (config.block_m, config.block_n) == (128, 128):
        # What two slots and two peers take beside 128 accumulators a thread is spilled under Triton 3.6.
        config = replace(config, num_warps=8)
    return replace(config, design=decision.design, split=split, piece=piece)


def segments_for(op: str, M: int, N: int, K: int, world_size: int) -> dict[str, Any]:
    """The fields of ``GemmConfig`` that say how library GEMMs are cut and take turns, as measured on two and four H200s
    (docs/decisions.md, "Overlapped GEMMs"); four stand for more."""
    if op == "all_gather_matmul":
        if world_size == 2:
            return {"lanes": 2, "chunks": 2 if N >= 8192 and M // world_size >= 1024 else 1}
        # Two ranks' rows in one GEMM keep the SMs busier, where N makes it long enough to hide the next ranks' rows.
        return {"lanes": 2, "span": 2 if N >= 8192 else 1}
    if op == "matmul_all_reduce":
        # Ranks that differ in K must cut the rows alike.
        return {"lanes": 1 if K >= 4096 else 2, "chunks": 2}
    if world_size == 2 and M >= 4096:
        return {"lanes": 1, "chunks": 2, "accumulate": True}
    cut: dict[str, Any] = {"lanes": 1, "span": 2 if world_size > 2 and K >= 4096 else 1}
    if world_size > 2:
        if M >= 8192 or (M >= 4096 and K >= 4096):
            cut["lanes"] = 2
        elif K < 4096:
            cut["own_pieces"] = 2
    return cut


def _fit(size: int, low: int, high: int) -> int:
    """The power of two in low .. high that covers ``size`` or comes nearest."""
    return max(low, min(high, next_power_of_2(size)))


def _is_datacentre(arch: str) -> bool:
    """sm_90, sm_100, sm_103: TMA and 227 KiB of shared memory. sm_8x lacks the one, sm_12x the other."""
    return int(arch.removeprefix("sm_")) // 10 in (9, 10)

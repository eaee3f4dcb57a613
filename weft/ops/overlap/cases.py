"""Cases of the overlapped GEMMs: designs on small tiles for simulated ranks and full ones for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.ops.case import BF16, FP16, FP32, Case
from weft.ops.gemm.gemm_cases import SMALL, WIDE
from weft.ops.gemm.tile import Tile
from weft.ops.overlap.sequential import Overlapped

WORLD_SIZES, GPU_WORLD_SIZES, LARGE_WORLD_SIZES = (2, 3, 4, 8), (2, 3, 4, 8), (2, 4, 8)
LOCAL_FIRST = (("local_first", True),)
FP8_WIRE = (("fp8_wire", True),)
BLOCK, CHANNEL = (("block_fp8", True),), (("channel_fp8", True),)


def tile(block_m: int, block_n: int, block_k: int, **more: int) -> Tile:
    return Tile(block_m=block_m, block_n=block_n, block_k=block_k, **more)


# A tile of full size, with more than the default number of stages.
FULL_4 = tile(128, 256, 64, num_warps=8, num_stages=4)


class Table:
    """Cases of one op, by its designs."""

    def __init__(self, op: Overlapped) -> None:
        self.op = op

    def case(self, w: int, dtype: torch.dtype, sizes: tuple[int, int, int], design: Any = "auto", **more: Any) -> Case:
        return Case(op=self.op.name, world_size=w, dtype=dtype, sizes=sizes, design=design, **more)

    def fused(self, tile: Tile, **fields: Any) -> Any:
        return self.op.designs["fused"](tile=tile, **fields)

    def each(self) -> Iterator[Any]:
        """A design of each kind."""
        if "fused" in self.op.designs:
            yield self.fused(tile(64, 128, 64))
        yield from (self.pipelined(), "sequential")

    def pipelined(self, *, chunks: int = 1, streams: int = 2, **fields: Any) -> Any:
        return self.op.designs["pipelined"](chunks=chunks, streams=streams, **fields)


def overlap_cases(op: Overlapped, span: int) -> Iterator[Case]:
    """Cases of every overlapped op. span: of a pipelined design."""
    made = Table(op)
    for w in WORLD_SIZES:
        yield made.case(w, BF16, (w * 4, 48, 64))
        # Rows of K elements that do not begin on 16 bytes.
        yield made.case(w, FP16, (w, 33, 21))
        if w != 8:
            yield made.case(w, FP32, (w * 7, 40, 36))
    if "fused" in op.designs:
        # Several tile rows a panel, the last short; groups that do not divide them.
        yield made.case(2, BF16, (2 * 41, 40, 72), made.fused(SMALL))
        yield made.case(4, BF16, (4 * 33, 70, 48), made.fused(WIDE))
        # Tiles with several split-K partials, and none split; a tile sent in many pieces, and in one.
        yield made.case(2, BF16, (2 * 40, 72, 150), made.fused(tile(16, 16, 16), piece=32))
        yield made.case(2, BF16, (2 * 20, 40, 90), made.fused(tile(16, 16, 16), piece=256, split=False))
    yield made.case(2, BF16, (2 * 12, 24, 20), layout="transposed")
    yield made.case(3, BF16, (3 * 5, 24, 32), layout="offset")
    for w in WORLD_SIZES:
        yield made.case(w, BF16, (w * 20, 40, 48), made.pipelined())
        yield made.case(w, BF16, (w * 19, 40, 48), made.pipelined(chunks=3, streams=3))
        yield made.case(w, FP16, (w, 33, 21), made.pipelined(), layout="transposed")
        yield made.case(w, BF16, (w * 3, 40, 24), "sequential")
        yield made.case(w, BF16, (w * 20, 40, 48), made.pipelined(span=span))
    yield made.case(1, BF16, (20, 24, 40))


def local_first_cases(op: Overlapped) -> Iterator[Case]:
    """Cases of every design with rows in local-first order, and of runs of several ranks' rows."""
    made = Table(op)
    for w in WORLD_SIZES:
        if "fused" in op.designs:
            yield made.case(w, BF16, (w * 20, 40, 48), made.fused(SMALL), fields=LOCAL_FIRST)
        yield made.case(w, FP32, (w * 5, 40, 36), made.pipelined(span=2, streams=1), fields=LOCAL_FIRST)
        yield made.case(w, BF16, (w * 19, 40, 48), made.pipelined(span=8), fields=LOCAL_FIRST)
        yield made.case(w, BF16, (w * 19, 40, 48), made.pipelined(chunks=3), fields=LOCAL_FIRST)
        yield made.case(w, FP16, (w * 3, 33, 21), "sequential", layout="transposed", fields=LOCAL_FIRST)
    yield made.case(1, BF16, (20, 24, 40), fields=LOCAL_FIRST)


def fp8_cases(op: Overlapped) -> Iterator[Case]:
    """Cases of fp8 weights: by the small-M kernel and by cuBLAS, rows not in fours, short groups."""
    made = Table(op)
    for w in (2, 3, 4):
        yield made.case(w, BF16, (w * 5, 48, 144), fields=BLOCK)
        yield made.case(w, BF16, (w * 5, 48, 144), made.pipelined(), fields=BLOCK)
        yield made.case(w, BF16, (w, 40, 272), made.pipelined(), fields=CHANNEL)
        yield made.case(w, FP16, (w * 11, 40, 272), made.pipelined(chunks=3, streams=3), fields=CHANNEL)
        yield made.case(w, BF16, (w * 9, 24, 272), made.pipelined(span=2), fields=BLOCK)
    yield made.case(2, BF16, (2 * 133, 16, 512), made.pipelined(), fields=BLOCK)
    yield made.case(2, BF16, (2 * 133, 16, 256), made.pipelined(streams=1), fields=CHANNEL)
    yield made.case(1, BF16, (20, 48, 144), fields=BLOCK)


def fp8_wire_cases(op: Overlapped) -> Iterator[Case]:
    """Cases of sums that travel in fp8: 16-bit and fp8 weights, ragged groups, a piece and several."""
    made = Table(op)
    for w in WORLD_SIZES:
        yield made.case(w, BF16, (w * 5, 320, 64), fields=FP8_WIRE)
    for w in (2, 3, 4):
        yield made.case(w, FP16, (w * 5, 48, 144), fields=(*BLOCK, *FP8_WIRE))
        if "pipelined" in op.designs_in_fp8:
            for design in (
                made.pipelined(chunks=3, fp8_wire=True),
                made.pipelined(span=2, fp8_wire=True),
                made.pipelined(streams=1, local_pieces=2, fp8_wire=True),
            ):
                yield made.case(w, BF16, (w * 19, 200, 48), design, fields=FP8_WIRE)
            yield made.case(w, BF16, (w * 9, 24, 272), fields=(*CHANNEL, *LOCAL_FIRST, *FP8_WIRE))


def fp8_local_first_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    for w in (2, 3):
        yield made.case(w, BF16, (w * 5, 48, 144), fields=(*CHANNEL, *LOCAL_FIRST))
        yield made.case(w, BF16, (w * 9, 24, 272), made.pipelined(chunks=2), fields=(*BLOCK, *LOCAL_FIRST))


def all_gather_matmul_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    yield from overlap_cases(op, span=3)
    yield from local_first_cases(op)
    yield from fp8_cases(op)
    yield from fp8_local_first_cases(op)
    yield made.case(3, BF16, (36, 24, 32), made.pipelined(begin_first=True))


def matmul_reduce_scatter_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    yield from overlap_cases(op, span=2)
    yield from local_first_cases(op)
    yield from fp8_cases(op)
    yield from fp8_local_first_cases(op)
    yield from fp8_wire_cases(op)
    yield made.case(2, BF16, (2 * 9, 24, 144), made.pipelined(chunks=2, accumulate=True), fields=BLOCK)
    yield made.case(3, BF16, (3 * 11, 24, 144), made.pipelined(chunks=2, local_pieces=2), fields=CHANNEL)
    for w in WORLD_SIZES:
        yield made.case(w, BF16, (w * 19, 40, 48), made.pipelined(local_pieces=2))
        yield made.case(w, BF16, (w * 19, 40, 48), made.pipelined(chunks=3, streams=1, local_pieces=2))
        yield made.case(w, BF16, (w * 19, 40, 48), made.pipelined(span=2, local_pieces=32))
    yield made.case(2, BF16, (40, 40, 48), made.pipelined(accumulate=True))
    yield made.case(2, BF16, (38, 33, 21), made.pipelined(chunks=3, accumulate=True))


def matmul_all_reduce_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    yield from overlap_cases(op, span=2)
    yield from fp8_cases(op)
    yield from fp8_wire_cases(op)
    for w in (2, 3):
        yield made.case(w, BF16, (1, 16, 144), fields=BLOCK)
        yield made.case(w, BF16, (w - 1, 40, 272), made.pipelined(chunks=2), fields=CHANNEL)
        yield made.case(w, BF16, (w * 10 - 1, 24, 144), made.pipelined(chunks=4), fields=BLOCK)
    for w in (2, 3, 4):
        # Fewer tiles than ranks, and a number of rows that no world size divides.
        yield made.case(w, BF16, (1, 16, 40))
        yield made.case(w, BF16, (19, 50, 24), made.fused(SMALL))
    for w in WORLD_SIZES:
        # Blocks of one row per rank; the last has one row or three, so none for some ranks.
        yield made.case(w, FP32, (w * 8, 24, 40), made.pipelined(chunks=8, streams=1))
        yield made.case(w, BF16, (w * (w + 1) + 1, 24, 40), made.pipelined(chunks=min(w + 1, 8)))
        # Ranks with more rows than the rest, and with none.
        yield made.case(w, BF16, (w * 9 - 1, 40, 24), made.pipelined(chunks=4))
        yield made.case(w, BF16, (w - 1, 40, 24), made.pipelined(chunks=2))
    for w in (1, 2, 4, 8):
        yield made.case(w, BF16, (5, 40, 256 // w), fields=(("invariant", True),))


# --- on GPUs: a small call of each design, then many tiles a program and several chunks a shard -------------------------


def large_overlap_cases(op: Overlapped) -> Iterator[Case]:
    """Large cases of every overlapped op: each design, and the plan of the shape."""
    made = Table(op)
    for w in GPU_WORLD_SIZES:
        for design in made.each():
            yield made.case(w, BF16, (w * 128, 776, 520), design)
    for w in LARGE_WORLD_SIZES:
        yield made.case(w, BF16, (2048, 1280, 1024))
        yield made.case(w, FP16, (w * 1000, 520, 2048))
        yield made.case(w, BF16, (w * 130, 700, 333))
        yield made.case(w, BF16, (w * 16, 5120, 640))
        yield made.case(w, FP32, (w * 100, 300, 200))
        yield made.case(w, BF16, (1024, 5120, 2000), "sequential")
        for fields in (BLOCK, CHANNEL):
            yield made.case(w, BF16, (1024, 5120, 2048), "sequential", fields=fields)
            for rows in (w * 16, w * 501, 4096):
                yield made.case(w, BF16, (rows, 5120, 2048), fields=fields)
            # Scales of 45 groups: cuBLAS reads scales of blocks in fours.
            yield made.case(w, BF16, (w * 1000, 1280, 5760), made.pipelined(chunks=3), fields=fields)
            yield made.case(w, BF16, (2048, 1280, 5120), made.pipelined(span=2, streams=1), fields=fields)
        if "fused" in op.designs:
            # Tiles that are split on 132 SMs.
            for design in (made.fused(FULL_4), made.fused(FULL_4, split=False, piece=512)):
                yield made.case(w, BF16, (1024, 5120, 2000), design)


def large_local_first_cases(op: Overlapped, N: int, K: int) -> Iterator[Case]:
    made = Table(op)
    for w in GPU_WORLD_SIZES:
        for design in made.each():
            yield made.case(w, BF16, (w * 128, 776, 520), design, fields=LOCAL_FIRST)
    for w in LARGE_WORLD_SIZES:
        for rows in (w * 16, w * 256, w * 1000):
            yield made.case(w, BF16, (rows, N, K), fields=LOCAL_FIRST)


def large_all_gather_matmul_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    yield from large_overlap_cases(op)
    yield from large_local_first_cases(op, 12800, 1024)
    for w in LARGE_WORLD_SIZES:
        yield made.case(w, BF16, (w * 2048, 1280, 5120))
        for design in (made.pipelined(), made.pipelined(chunks=2, streams=4, begin_first=True), made.pipelined(span=3)):
            yield made.case(w, BF16, (1024, 5120, 2000), design)
        for design in (made.pipelined(span=3), made.pipelined(chunks=2)):
            yield made.case(w, BF16, (1024, 5120, 2000), design, fields=LOCAL_FIRST)


def large_matmul_reduce_scatter_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    yield from large_overlap_cases(op)
    yield from large_local_first_cases(op, 5120, 640)
    for w in LARGE_WORLD_SIZES:
        for design in (
            made.pipelined(),
            made.pipelined(span=2),
            made.pipelined(chunks=2, streams=1),
            made.pipelined(span=2, streams=1, local_pieces=2),
        ):
            yield made.case(w, BF16, (1024, 5120, 2000), design)
        for design in (made.fused(FULL_4), made.pipelined(span=2, streams=1), made.pipelined(chunks=2, local_pieces=3)):
            yield made.case(w, BF16, (1024, 5120, 2000), design, fields=LOCAL_FIRST)
    yield made.case(2, BF16, (1024, 5120, 2000), made.pipelined(chunks=2, accumulate=True))
    yield from large_fp8_wire_cases(op)


def large_fp8_wire_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    for w in LARGE_WORLD_SIZES:
        yield made.case(w, BF16, (w * 130, 700, 336), fields=FP8_WIRE)
        yield made.case(w, BF16, (4096, 5120, 2048), fields=FP8_WIRE)
        yield made.case(w, BF16, (4096, 5120, 2048), fields=(*BLOCK, *FP8_WIRE))


def large_matmul_all_reduce_cases(op: Overlapped) -> Iterator[Case]:
    made = Table(op)
    yield from large_overlap_cases(op)
    yield from large_fp8_wire_cases(op)
    for w in GPU_WORLD_SIZES:
        yield made.case(w, BF16, (w * 96 - 1, 520, 264), made.pipelined(chunks=3, streams=1))
    for w in LARGE_WORLD_SIZES:
        yield made.case(w, BF16, (1, 5120, 1600))
        for design in (
            made.pipelined(chunks=2, streams=4),
            made.pipelined(chunks=3, streams=1),
            made.pipelined(span=2, streams=1),
        ):
            yield made.case(w, BF16, (1024, 5120, 2000), design)

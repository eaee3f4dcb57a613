"""Cases of the collectives.

A one-shot tile is 256 elements of two bytes or 128 of four; a two-shot tile is W times that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weft.ops.case import BF16, FP16, FP32, Case
from weft.ops.collectives.collective import Collective, OneShot, Push, TwoShot
from weft.ops.collectives.copy_engine import CopyEngine
from weft.transport.plans import PushPlan

# World sizes of the cases: every kind of data and layout runs with two sizes only.
WORLD_SIZES, TWO_SIZES = (1, 2, 3, 4, 8), (2, 4)
GPU_WORLD_SIZES = (2, 3, 4, 8)
WIDE = PushPlan(transport="lamport", row_bytes=2048, num_warps=2)
KEYED = PushPlan(transport="keyed", row_bytes=2048, num_warps=4)
# One program an SM, so that each has several tiles.
FEW, FEW_KEYED = (
    PushPlan(transport=transport, row_bytes=512, num_warps=1, programs_per_sm=1) for transport in ("lamport", "keyed")
)
FEW_FP8 = PushPlan(transport="fp8", row_bytes=512, num_warps=1, programs_per_sm=1)
SHOTS = ("one_shot", "two_shot")
PIECES = ((1,), (5, 1, 1), (1,) * 8)


def all_reduce_cases(op: Collective) -> Iterator[Case]:
    for w in WORLD_SIZES:
        for dtype in (FP16, BF16, FP32):
            yield op.case(w, dtype, (3, 5, 77), design="one_shot")
            yield op.case(w, dtype, (w * 700 + 1,), design="two_shot")
        yield op.case(w, BF16, (5000,), design=TwoShot(push=WIDE))
        yield op.case(w, BF16, (w * 700 + 1,), design="copy_engine")
    for w in TWO_SIZES:
        for shot in SHOTS:
            for shape in ((), (1,), (0, 4), (7,), (512,), (16, 512)):
                yield op.case(w, BF16, shape, design=shot)
            for dtype in (FP16, FP32):
                yield op.case(w, dtype, (2, 999), design=shot, data="special")
                yield op.case(w, dtype, (1500,), design=shot, data="subnormal")
            for layout in ("transposed", "offset"):
                yield op.case(w, BF16, (33, 48), design=shot, layout=layout)
        yield op.case(w, BF16, (2, 999), design=TwoShot(push=WIDE), data="special")
        yield op.case(w, FP16, (40, 50))
        for dtype, shape in ((BF16, (5, 48)), (FP16, (3, 640))):
            yield op.case(w, dtype, shape, design="one_shot", partials=3)
        yield from copied_cases(op, w)
        for shape, dtype in (((9,), BF16), ((w * 2500 + 3,), FP16), ((40, 77), FP32)):
            for design in ("multimem_one_shot", "multimem_two_shot"):
                yield op.case(w, dtype, shape, design=design)
    yield op.case(3, BF16, (3000,), design=OneShot(push=FEW))
    for w in (1, 2, 4, 8):
        yield op.case(w, BF16, (5, 77), invariant=True)
    yield from fp8_wire_cases(op)


def fp8_wire_cases(op: Collective) -> Iterator[Case]:
    """Cases of rows that travel in fp8: ragged groups, whole ones, several tiles of a program."""
    for w in WORLD_SIZES:
        for shot in SHOTS:
            yield op.case(w, BF16, (3, 300), design=shot, fp8_wire=True)
        yield op.case(w, FP16, (2, 3, 640), fp8_wire=True)
    for w in TWO_SIZES:
        for shot in SHOTS:
            for shape in ((), (1,), (0, 4), (7,), (9, 130)):
                yield op.case(w, BF16, shape, design=shot, fp8_wire=True)
            for data in ("special", "subnormal"):
                for dtype in (FP16, BF16):
                    yield op.case(w, dtype, (2, 999), design=shot, data=data, fp8_wire=True)
            for layout in ("transposed", "offset"):
                yield op.case(w, BF16, (33, 48), design=shot, layout=layout, fp8_wire=True)
    for w, design in ((3, OneShot(push=FEW_FP8)), (2, OneShot(push=FEW_FP8)), (4, TwoShot(push=FEW_FP8))):
        yield op.case(w, BF16, (24, 1280), design=design, fp8_wire=True)


def reduce_scatter_cases(op: Collective) -> Iterator[Case]:
    for w in WORLD_SIZES:
        for dtype in (FP16, BF16, FP32):
            yield op.case(w, dtype, (w * 3, 211))
    for w in TWO_SIZES:
        yield op.case(w, BF16, (w, 3000), design=Push(push=WIDE))
        yield op.case(w, BF16, (w, 999), data="special")
    yield op.case(3, BF16, (3, 3000), design=Push(push=FEW))
    yield from parts_cases(op)


def moved_cases(op: Collective) -> Iterator[Case]:
    """Cases of an op that moves bits: all-gather and all-to-all."""
    for w in WORLD_SIZES:
        yield op.case(w, BF16, (w * 2, 513))
    for w in TWO_SIZES:
        for dtype, columns in ((FP16, 100), (FP32, 100), (BF16, 101)):
            yield op.case(w, dtype, (w, 3, columns), data="special")
        yield op.case(w, FP32, (w * 2, 700), data="special", design=Push(push=KEYED))
        yield op.case(w, BF16, (w * 3, 50), layout="offset")
    yield op.case(3, BF16, (3, 2000), design=Push(push=FEW_KEYED))
    yield from parts_cases(op)


def all_gather_cases(op: Collective) -> Iterator[Case]:
    yield from moved_cases(op)
    for w in TWO_SIZES:
        for dtype in (torch.int64, torch.int32, torch.int8, torch.bool):
            yield op.case(w, dtype, (5, 3))
        for dtype in (torch.int64, torch.int8, torch.bool):
            yield op.case(w, dtype, (5, 3), design="copy_engine")
    yield op.case(2, BF16, (20000,))


def all_to_all_cases(op: Collective) -> Iterator[Case]:
    yield from moved_cases(op)
    yield op.case(4, BF16, (40000,))


def parts_cases(op: Collective) -> Iterator[Case]:
    """Cases of the collectives but all-reduce, whose input or output has one part for each rank."""
    for w in WORLD_SIZES:
        yield op.case(w, BF16, (w * 2, 1600), design="copy_engine")
        yield op.case(w, FP32, (w * 3, 77), design="copy_engine")
    for w in TWO_SIZES:
        yield op.case(w, FP32, (w, 1))
        yield op.case(w, BF16, (w, 0))
        yield op.case(w, BF16, (w * 4, 130), layout="transposed")
        yield from copied_cases(op, w)


def copied_cases(op: Collective, w: int) -> Iterator[Case]:
    """Cases of every collective with the copy-engine design."""
    yield op.case(w, FP16, (w, 3, 100), data="special", design="copy_engine")
    yield op.case(w, BF16, (w, 1), design="copy_engine")
    yield op.case(w, BF16, (w, 0), design="copy_engine")
    yield op.case(w, BF16, (w * 4, 130), layout="transposed", design="copy_engine")
    yield op.case(w, BF16, (w * 3, 50), layout="offset", design="copy_engine")
    for pieces in PIECES:
        yield op.case(w, BF16, (w, 500), design=CopyEngine(pieces=pieces))
    if w == 2:
        yield op.case(w, BF16, (w, 500), design=CopyEngine(pieces=(1,), programs=2))


def rms_norm_cases(op: Collective) -> Iterator[Case]:
    """Cases of all_reduce_rms_norm: RMS scale applied or deferred; a tensor or split-K partials."""
    for deferred in ({}, {"deferred": True}):
        yield from fp8_wire_norm_cases(op, deferred)
        for w in TWO_SIZES:
            for shot in SHOTS:
                for dtype, shape in ((BF16, (5, 48)), (FP16, (2, 3, 640)), (FP32, (9, 100)), (BF16, (0, 64))):
                    yield op.case(w, dtype, shape, shot, **deferred)
                for dtype, shape in ((BF16, (5, 48)), (FP16, (3, 640))):
                    yield op.case(w, dtype, shape, shot, **deferred, partials=3)
        for w, kind, shot, shape in (
            (1, "group", "one_shot", (5, 512)), (2, "group", "one_shot", (5, 760)), (2, "static", "two_shot", (3, 72)),
            (3, "group", "two_shot", (7, 760)), (3, "token", "one_shot", (3, 296)), (4, "group", "two_shot", (9, 256)),
        ):  # fmt: skip
            for more in ({},) if deferred else ({}, {"beside": True}):
                yield op.case(w, BF16, shape, shot, **deferred, fp8_rows=kind, **more)
        for w, shot in ((2, "one_shot"), (3, "two_shot")):
            yield op.case(w, BF16, (5, 72), shot, **deferred, wide_norm=True)
        for w in (1, 3, 8):
            yield op.case(w, BF16, (5, 72), **deferred)
            yield op.case(w, FP16, (5, 72), "two_shot", **deferred)
    for w, dtype, shape, fields in (
        (1, BF16, (5, 760), {"partials": 8}), (2, FP16, (2, 3, 640), {}), (2, BF16, (5, 48), {"partials": 4}),
        (4, BF16, (3, 640), {"partials": 2, "fp8_rows": "group"}), (8, BF16, (5, 72), {"wide_norm": True}),
    ):  # fmt: skip
        yield op.case(w, dtype, shape, invariant=True, **fields)


def fp8_wire_norm_cases(op: Collective, deferred: dict[str, bool]) -> Iterator[Case]:
    """Cases of rows that travel in fp8: one part, several, a ragged one, split-K partials, fp8 rows."""
    for w in WORLD_SIZES:
        for shot in SHOTS:
            for shape, more in (((5, 48), {}), ((w + 1, 1096), {}), ((3, 640), {"partials": 3})):
                yield op.case(w, BF16, shape, shot, **deferred, **more, fp8_wire=True)
    for w, shot in ((2, "one_shot"), (4, "two_shot")):
        yield op.case(w, BF16, (5, 760), shot, **deferred, fp8_rows="group", fp8_wire=True)
        yield op.case(w, FP16, (0, 64), shot, **deferred, fp8_wire=True)
    yield op.case(2, FP16, (9, 256), **deferred, fp8_wire=True)


# --- on GPUs: for each design and dtype a call of some rounds first, which is also repeated hundreds of times (tests/gpu), then
# --- many rounds of a bounded workspace --------------------------------------------------------------------------------


def large_all_reduce_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        yield op.case(w, BF16, (16, 512), design="one_shot")
        yield op.case(w, FP32, (1001,), design="one_shot")
        yield op.case(w, BF16, (70000,), design="two_shot")
        yield op.case(w, FP16, (70000,), design=TwoShot(push=WIDE))
        yield op.case(w, BF16, (70001,), design="copy_engine")
        yield op.case(w, BF16, (16, 5120), design="one_shot", partials=3)
        for shot, dtype, shape in (("one_shot", BF16, (16, 5120)), ("two_shot", FP16, (70, 1000))):
            yield op.case(w, dtype, shape, design=shot, fp8_wire=True)
        yield op.case(w, BF16, (4096, 5120), fp8_wire=True)
        if w != 3:
            for elements in (3 << 20, (16 << 20) + 8, 128 << 20):
                yield op.case(w, BF16, (elements,))
    yield from large_copies(op, lambda w: ((160 << 20) + 5,))


def large_reduce_scatter_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        yield op.case(w, BF16, (w * 8, 1000))
        yield op.case(w, FP32, (w, 9000), design=Push(push=WIDE))
        yield op.case(w, BF16, (w * 8, 1000), design="copy_engine")
        if w != 3:
            yield op.case(w, BF16, (w, 16 << 20))
    yield from large_copies(op, lambda w: (w, (160 << 20) // w))


def large_all_gather_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        yield op.case(w, BF16, (5, 1001))
        yield op.case(w, BF16, (5, 1001), design="copy_engine")
        if w != 3:
            yield op.case(w, BF16, ((32 << 20) + 1,))
    yield from large_copies(op, lambda w: (40 << 20,))


def large_all_to_all_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        for dtype in (FP32, BF16):
            yield op.case(w, dtype, (w * 3, 800))
            yield op.case(w, dtype, (w * 3, 800), design="copy_engine")
        if w != 3:
            yield op.case(w, BF16, (w, 8 << 20))
    yield from large_copies(op, lambda w: (w, (160 << 20) // w))


def large_copies(op: Collective, shape: Callable[[int], tuple[int, ...]]) -> Iterator[Case]:
    for w in TWO_SIZES:
        yield op.case(w, BF16, shape(w), design="copy_engine")


def large_rms_norm_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        for fields in ({}, {"deferred": True}, {"partials": 3}, {"deferred": True, "partials": 3}):
            in_fp8 = {"fp8_rows": "group"}, {"fp8_rows": "group", "beside": True}
            for more in ({}, {"fp8_wire": True}, *in_fp8[: 1 if "deferred" in fields else 2]):
                yield op.case(w, BF16, (7, 5120), "one_shot", **fields, **more)
                yield op.case(w, BF16, (50, 1024), "two_shot", **fields, **more)

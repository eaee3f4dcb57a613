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
FP8_WIRE = (("fp8_wire", True),)
SHOTS = ("one_shot", "two_shot")
PIECES = ((1,), (5, 1, 1), (1,) * 8)


def all_reduce_cases(op: Collective) -> Iterator[Case]:
    for w in WORLD_SIZES:
        for dtype in (FP16, BF16, FP32):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(3, 5, 77), design="one_shot")
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(w * 700 + 1,), design="two_shot")
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5000,), design=TwoShot(push=WIDE))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 700 + 1,), design="copy_engine")
    for w in TWO_SIZES:
        for shot in SHOTS:
            for shape in ((), (1,), (0, 4), (7,), (512,), (16, 512)):
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape, design=shot)
            for dtype in (FP16, FP32):
                yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(2, 999), design=shot, data="special")
                yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(1500,), design=shot, data="subnormal")
            for layout in ("transposed", "offset"):
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(33, 48), design=shot, layout=layout)
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(2, 999), design=TwoShot(push=WIDE), data="special")
        yield Case(op=op.name, world_size=w, dtype=FP16, sizes=(40, 50))
        for dtype, shape in ((BF16, (5, 48)), (FP16, (3, 640))):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=shape, design="one_shot", fields=(("partials", 3),))
        yield from copied_cases(op, w)
        for shape, dtype in (((9,), BF16), ((w * 2500 + 3,), FP16), ((40, 77), FP32)):
            for design in ("multimem_one_shot", "multimem_two_shot"):
                yield Case(op=op.name, world_size=w, dtype=dtype, sizes=shape, design=design)
    yield Case(op=op.name, world_size=3, dtype=BF16, sizes=(3000,), design=OneShot(push=FEW))
    for w in (1, 2, 4, 8):
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5, 77), fields=(("invariant", True),))
    yield from fp8_wire_cases(op)


def fp8_wire_cases(op: Collective) -> Iterator[Case]:
    """Cases of rows that travel in fp8: ragged groups, whole ones, several tiles of a program."""
    for w in WORLD_SIZES:
        for shot in SHOTS:
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(3, 300), design=shot, fields=FP8_WIRE)
        yield Case(op=op.name, world_size=w, dtype=FP16, sizes=(2, 3, 640), fields=FP8_WIRE)
    for w in TWO_SIZES:
        for shot in SHOTS:
            for shape in ((), (1,), (0, 4), (7,), (9, 130)):
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape, design=shot, fields=FP8_WIRE)
            for data in ("special", "subnormal"):
                for dtype in (FP16, BF16):
                    yield Case(
                        op=op.name, world_size=w, dtype=dtype, sizes=(2, 999), design=shot, data=data, fields=FP8_WIRE
                    )
            for layout in ("transposed", "offset"):
                yield Case(
                    op=op.name, world_size=w, dtype=BF16, sizes=(33, 48), design=shot, layout=layout, fields=FP8_WIRE
                )
    for w, design in ((3, OneShot(push=FEW_FP8)), (2, OneShot(push=FEW_FP8)), (4, TwoShot(push=FEW_FP8))):
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(24, 1280), design=design, fields=FP8_WIRE)


def reduce_scatter_cases(op: Collective) -> Iterator[Case]:
    for w in WORLD_SIZES:
        for dtype in (FP16, BF16, FP32):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(w * 3, 211))
    for w in TWO_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 3000), design=Push(push=WIDE))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 999), data="special")
    yield Case(op=op.name, world_size=3, dtype=BF16, sizes=(3, 3000), design=Push(push=FEW))
    yield from parts_cases(op)


def moved_cases(op: Collective) -> Iterator[Case]:
    """Cases of an op that moves bits: all-gather and all-to-all."""
    for w in WORLD_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 2, 513))
    for w in TWO_SIZES:
        for dtype, columns in ((FP16, 100), (FP32, 100), (BF16, 101)):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(w, 3, columns), data="special")
        yield Case(op=op.name, world_size=w, dtype=FP32, sizes=(w * 2, 700), data="special", design=Push(push=KEYED))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 3, 50), layout="offset")
    yield Case(op=op.name, world_size=3, dtype=BF16, sizes=(3, 2000), design=Push(push=FEW_KEYED))
    yield from parts_cases(op)


def all_gather_cases(op: Collective) -> Iterator[Case]:
    yield from moved_cases(op)
    for w in TWO_SIZES:
        for dtype in (torch.int64, torch.int32, torch.int8, torch.bool):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(5, 3))
        for dtype in (torch.int64, torch.int8, torch.bool):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(5, 3), design="copy_engine")
    yield Case(op=op.name, world_size=2, dtype=BF16, sizes=(20000,))


def all_to_all_cases(op: Collective) -> Iterator[Case]:
    yield from moved_cases(op)
    yield Case(op=op.name, world_size=4, dtype=BF16, sizes=(40000,))


def parts_cases(op: Collective) -> Iterator[Case]:
    """Cases of the collectives but all-reduce, whose input or output has one part for each rank."""
    for w in WORLD_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 2, 1600), design="copy_engine")
        yield Case(op=op.name, world_size=w, dtype=FP32, sizes=(w * 3, 77), design="copy_engine")
    for w in TWO_SIZES:
        yield Case(op=op.name, world_size=w, dtype=FP32, sizes=(w, 1))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 0))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 4, 130), layout="transposed")
        yield from copied_cases(op, w)


def copied_cases(op: Collective, w: int) -> Iterator[Case]:
    """Cases of every collective with the copy-engine design."""
    yield Case(op=op.name, world_size=w, dtype=FP16, sizes=(w, 3, 100), data="special", design="copy_engine")
    yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 1), design="copy_engine")
    yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 0), design="copy_engine")
    yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 4, 130), layout="transposed", design="copy_engine")
    yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 3, 50), layout="offset", design="copy_engine")
    for pieces in PIECES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 500), design=CopyEngine(pieces=pieces))
    if w == 2:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 500), design=CopyEngine(pieces=(1,), programs=2))


def rms_norm_cases(op: Collective) -> Iterator[Case]:
    """Cases of all_reduce_rms_norm: RMS scale applied or deferred; a tensor or split-K partials."""
    for deferred in ((), (("deferred", True),)):
        yield from fp8_wire_norm_cases(op, deferred)
        for w in TWO_SIZES:
            for shot in SHOTS:
                for dtype, shape in ((BF16, (5, 48)), (FP16, (2, 3, 640)), (FP32, (9, 100)), (BF16, (0, 64))):
                    yield Case(op=op.name, world_size=w, dtype=dtype, sizes=shape, design=shot, fields=deferred)
                for dtype, shape in ((BF16, (5, 48)), (FP16, (3, 640))):
                    fields = (*deferred, ("partials", 3))
                    yield Case(op=op.name, world_size=w, dtype=dtype, sizes=shape, design=shot, fields=fields)
        for w, kind, shot, shape in (
            (1, "group", "one_shot", (5, 512)), (2, "group", "one_shot", (5, 760)), (2, "static", "two_shot", (3, 72)),
            (3, "group", "two_shot", (7, 760)), (3, "token", "one_shot", (3, 296)), (4, "group", "two_shot", (9, 256)),
        ):  # fmt: skip
            fields = (*deferred, ("fp8_rows", kind))
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape, design=shot, fields=fields)
            if not deferred:
                fields = (*fields, ("beside", True))
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape, design=shot, fields=fields)
        for w, shot in ((2, "one_shot"), (3, "two_shot")):
            fields = (*deferred, ("wide_norm", True))
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5, 72), design=shot, fields=fields)
        for w in (1, 3, 8):
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5, 72), fields=deferred)
            yield Case(op=op.name, world_size=w, dtype=FP16, sizes=(5, 72), design="two_shot", fields=deferred)
    in_tree = ("invariant", True)
    for w, dtype, shape, fields in (
        (1, BF16, (5, 760), (("partials", 8),)), (2, FP16, (2, 3, 640), ()), (2, BF16, (5, 48), (("partials", 4),)),
        (4, BF16, (3, 640), (("partials", 2), ("fp8_rows", "group"))), (8, BF16, (5, 72), (("wide_norm", True),)),
    ):  # fmt: skip
        yield Case(op=op.name, world_size=w, dtype=dtype, sizes=shape, fields=(in_tree, *fields))


def fp8_wire_norm_cases(op: Collective, deferred: tuple[tuple[str, bool], ...]) -> Iterator[Case]:
    """Cases of rows that travel in fp8: one part, several, a ragged one, split-K partials, fp8 rows."""
    for w in WORLD_SIZES:
        for shot in SHOTS:
            for shape, more in (((5, 48), ()), ((w + 1, 1096), ()), ((3, 640), (("partials", 3),))):
                fields = (*deferred, *more, *FP8_WIRE)
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape, design=shot, fields=fields)
    for w, shot in ((2, "one_shot"), (4, "two_shot")):
        fields = (*deferred, ("fp8_rows", "group"), *FP8_WIRE)
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5, 760), design=shot, fields=fields)
        yield Case(op=op.name, world_size=w, dtype=FP16, sizes=(0, 64), design=shot, fields=(*deferred, *FP8_WIRE))
    yield Case(op=op.name, world_size=2, dtype=FP16, sizes=(9, 256), fields=(*deferred, *FP8_WIRE))


# --- on GPUs: for each design and dtype a call of some rounds first, which is also repeated hundreds of times (tests/gpu), then
# --- many rounds of a bounded workspace --------------------------------------------------------------------------------


def large_all_reduce_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(16, 512), design="one_shot")
        yield Case(op=op.name, world_size=w, dtype=FP32, sizes=(1001,), design="one_shot")
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(70000,), design="two_shot")
        yield Case(op=op.name, world_size=w, dtype=FP16, sizes=(70000,), design=TwoShot(push=WIDE))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(70001,), design="copy_engine")
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(16, 5120), design="one_shot", fields=(("partials", 3),))
        for shot, dtype, shape in (("one_shot", BF16, (16, 5120)), ("two_shot", FP16, (70, 1000))):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=shape, design=shot, fields=FP8_WIRE)
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(4096, 5120), fields=FP8_WIRE)
        if w != 3:
            for elements in (3 << 20, (16 << 20) + 8, 128 << 20):
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(elements,))
    yield from large_copies(op, lambda w: ((160 << 20) + 5,))


def large_reduce_scatter_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 8, 1000))
        yield Case(op=op.name, world_size=w, dtype=FP32, sizes=(w, 9000), design=Push(push=WIDE))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w * 8, 1000), design="copy_engine")
        if w != 3:
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 16 << 20))
    yield from large_copies(op, lambda w: (w, (160 << 20) // w))


def large_all_gather_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5, 1001))
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(5, 1001), design="copy_engine")
        if w != 3:
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=((32 << 20) + 1,))
    yield from large_copies(op, lambda w: (40 << 20,))


def large_all_to_all_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        for dtype in (FP32, BF16):
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(w * 3, 800))
            yield Case(op=op.name, world_size=w, dtype=dtype, sizes=(w * 3, 800), design="copy_engine")
        if w != 3:
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(w, 8 << 20))
    yield from large_copies(op, lambda w: (w, (160 << 20) // w))


def large_copies(op: Collective, shape: Callable[[int], tuple[int, ...]]) -> Iterator[Case]:
    for w in TWO_SIZES:
        yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape(w), design="copy_engine")


def large_rms_norm_cases(op: Collective) -> Iterator[Case]:
    for w in GPU_WORLD_SIZES:
        for fields in ((), (("deferred", True),), (("partials", 3),), (("deferred", True), ("partials", 3))):
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(7, 5120), design="one_shot", fields=fields)
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(50, 1024), design="two_shot", fields=fields)
            for shot, shape in (("one_shot", (7, 5120)), ("two_shot", (50, 1024))):
                of_wire = (*fields, *FP8_WIRE)
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=shape, design=shot, fields=of_wire)
            in_fp8 = (*fields, ("fp8_rows", "group"))
            for of_rows in (in_fp8,) if ("deferred", True) in fields else (in_fp8, (*in_fp8, ("beside", True))):
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(7, 5120), design="one_shot", fields=of_rows)
                yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(50, 1024), design="two_shot", fields=of_rows)

"""Cases of the GEMMs of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.ops.case import BF16, FP16, FP32, Case
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.gemm.tile import Tile
from weft.ops.op import Op
from weft.plan.planned import AUTO

SMALL = Tile(block_m=16, block_n=16, block_k=32, group=3)
WIDE = Tile(block_m=32, block_n=32, block_k=16, group=1, num_warps=2, num_stages=2)
# One design for each kind of tile: plain or transposed, whole or in split-K partials. Every field varies.
SMALL_M = (
    SmallM(block_m=16, block_n=16, block_k=32),
    SmallM(block_m=16, block_n=32, block_k=16, partials=3, ahead=64, num_stages=2),
    SmallM(block_m=32, block_n=16, block_k=64, partials=2, transposed=True, num_warps=2),
    SmallM(block_m=64, block_n=16, block_k=16, transposed=True, ahead=128),
)


def small_m_cases(op: Op) -> Iterator[Case]:
    """Cases of each design of the small-M kernel. Rows of K elements begin on 16 bytes."""
    for design, sizes in zip(SMALL_M, ((1, 48, 96), (5, 40, 72), (33, 80, 200), (20, 136, 64)), strict=True):
        yield op.case(1, BF16, sizes, design=design)


def fp8_cases(op: Op) -> Iterator[Case]:
    """Cases of fp8 weights: by the plan, and by designs that quantize rows in the kernel and before it."""
    block, channel, norm = {"block_fp8": True}, {"channel_fp8": True}, {"deferred_norm": True}
    split = SmallM(block_m=16, block_n=32, block_k=128, partials=3, ahead=128, transposed=True)
    wide = SmallM(block_m=64, block_n=16, block_k=64, num_warps=2)
    for dtype, sizes, fields, design in (
        (BF16, (5, 48, 272), block, AUTO),
        (BF16, (9, 136, 400), block, split),
        (BF16, (5, 72, 768), block, replace(split, block_k=256, partials=2)),
        (FP16, (20, 200, 144), block, wide),
        (BF16, (5, 200, 272), block, replace(split, block_n=256, block_k=64, partials=1)),
        (BF16, (150, 144, 512), block, "cublas"),
        (BF16, (150, 144, 576), block, "cublas"),
        (FP16, (3, 40, 280), channel, AUTO),
        (BF16, (7, 80, 264), channel, replace(split, partials=2)),
        (BF16, (150, 64, 256), channel, "cublas"),
        (BF16, (9, 72, 272), block | norm, split),
        (BF16, (70, 80, 256), channel | norm, "cublas"),
    ):
        yield op.case(1, dtype, sizes, design, **fields)


def four_bit_cases(op: Op) -> Iterator[Case]:
    """Cases of 4-bit weights: by the plan, by the small-M kernel, and converted before the GEMM."""
    split = SmallM(block_m=16, block_n=32, block_k=128, partials=3, ahead=256, transposed=True)
    wide = SmallM(block_m=64, block_n=16, block_k=128, num_warps=2)
    norm = {"deferred_norm": True}
    for dtype, sizes, form, fields, design in (
        (BF16, (5, 48, 272), "mxfp4", {}, AUTO),
        (BF16, (9, 136, 400), "mxfp4", {}, split),
        (FP16, (20, 200, 144), "mxfp4", {}, wide),
        (BF16, (150, 144, 200), "mxfp4", {}, "cublas"),
        (FP16, (3, 40, 280), "int4", {}, AUTO),
        (BF16, (7, 80, 520), "int4", {}, split),
        (BF16, (150, 64, 256), "int4", {}, "cublas"),
        (BF16, (9, 72, 272), "mxfp4", norm, split),
        (BF16, (70, 80, 256), "int4", norm, replace(split, block_m=32, partials=2)),
    ):
        yield op.case(1, dtype, sizes, design, four_bit=form, **fields)


def large_quantized_cases(op: Op) -> Iterator[Case]:
    """Large cases of quantized weights: few rows by the plan, with K split, and many by cuBLAS.

    Scales of 45 groups: cuBLAS reads scales of blocks in fours. Each format of 4 bits has its dtype: the GPU suite captures one
    case of each op, design, dtype and name of a field.
    """
    for dtype, field in (
        (BF16, {"block_fp8": True}), (BF16, {"channel_fp8": True}), (BF16, {"four_bit": "mxfp4"}), (FP16, {"four_bit": "int4"}),
    ):  # fmt: skip
        yield op.case(1, dtype, (16, 5120, 6400), **field)
        yield op.case(1, dtype, (2048, 1280, 5760), "cublas", **field)


def fp8_rows_cases(op: Op) -> Iterator[Case]:
    """Cases of gated results in fp8: from a tile, from split-K partials, in 16 bits, by silu_mul."""
    whole = SmallM(block_m=16, block_n=128, block_k=128, transposed=True, num_warps=8)
    for sizes, design in (
        ((5, 200, 272), AUTO),
        ((20, 300, 144), whole),
        ((5, 136, 144), replace(whole, transposed=False, block_m=32, block_k=64)),
        ((9, 136, 400), replace(whole, block_n=32, partials=3)),
        ((9, 72, 272), replace(whole, block_n=32)),
        ((150, 144, 512), "cublas"),
    ):
        yield op.case(1, BF16, sizes, design, block_fp8=True, fp8_rows=True)


def matmul_cases(op: Op, persistent: Callable[..., object]) -> Iterator[Case]:
    """Cases of matmul. persistent: the design of the persistent kernel."""
    yield op.case(1, BF16, (20, 24, 40))
    for dtype in (FP16, BF16, FP32):
        yield op.case(1, dtype, (1, 70, 33))
        yield op.case(1, dtype, (90, 50, 96), design=persistent(tile=SMALL))
        yield op.case(1, dtype, (40, 48, 16), layout="transposed")
    yield op.case(1, BF16, (33, 33, 33), layout="offset")
    yield op.case(1, BF16, (40, 40, 90), design=persistent(tile=WIDE, split=False))
    yield op.case(1, FP16, (20, 40, 24), design="cublas")
    for dtype, sizes in ((BF16, (5, 70, 96)), (FP16, (33, 40, 256))):
        yield op.case(1, dtype, sizes, invariant=True)
    yield from small_m_cases(op)
    yield from fp8_cases(op)
    yield from four_bit_cases(op)


def silu_cases(op: Op) -> Iterator[Case]:
    for dtype in (FP16, BF16, FP32):
        yield op.case(1, dtype, (5, 40, 72))
        yield op.case(1, dtype, (3, 34, 21), layout="transposed")
    yield op.case(1, BF16, (9, 70, 96), invariant=True)
    yield op.case(1, BF16, (150, 40, 24), design="cublas")
    for dtype, design in ((FP32, "cublas"), (FP16, "small_m"), *((BF16, design) for design in SMALL_M)):
        yield op.case(1, dtype, (5, 40, 72), design, activation="gelu_tanh")
    for design in ("cublas", SMALL_M[1]):
        yield op.case(1, BF16, (5, 40, 72), design, activation="gelu_tanh", deferred_norm=True)
    yield from small_m_cases(op)
    yield from fp8_cases(op)
    yield from four_bit_cases(op)

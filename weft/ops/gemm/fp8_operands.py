"""Operands of fp8 GEMMs (weft.kernels.fp8.Fp8): checks, quantized rows, the GEMM by a design.

Rows of 16 bits are quantized as the weight's scales ask for, in a kernel before the GEMM. In the small-M kernel it took longer
at any M (H200, 5120x12800, 16 rows: 24.1 us, both kernels 23.6; 64 rows: 84 and 30). Most kernels before a
GEMM write such rows themselves. A deferred RMS scale multiplies the small-M kernel's sums; a result of cuBLAS is multiplied by
the kernel that reads it, or in ``matmul`` the rows' scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.kernels.fp8 import COLUMNS, E4M3, Fp8, RowFormat, fp8_of, quantized_rows, scales_of, spread
from weft.kernels.operands import ScaledMatrix, can_describe, rows_contiguous
from weft.ops.elementwise.silu_mul import MAX_TOKEN
from weft.ops.gemm import cublas, small_m
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.ops.registration import HALVES, check_is_tensor
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities


# Fewest columns that tl.dot multiplies in e4m3.
LEAST_COLUMNS = 32
# Columns of which K is a multiple where cuBLAS takes a weight with scales of blocks.
CUBLAS_COLUMNS = 64


def columns_of(weight: Fp8) -> int:
    """Columns of the weight under one scale."""
    return spread(weight.scales.shape[-1], weight.shape[-1])


def suits_cublas(weight: Fp8) -> bool:
    """True if cuBLAS takes the weight: blocks of 128 x 128, or a scale for each row or for all.

    A last block of half as many columns is measured: K=2880, 1919 rows, N=2880 gated, 81 us on one H200, the small-M kernel
    339 (benchmarks/lab/h200-regret-unseen/w1-sixty.json).
    """
    (N, K), whole = weight.shape, COLUMNS.value
    if K % 16 != 0 or N % 16 != 0 or not weight.is_grouped:
        return K % 16 == 0 and N % 16 == 0
    return K % CUBLAS_COLUMNS == 0 and columns_of(weight) == whole and cdiv(N, whole) == weight.scales.shape[0]


def check_matrix(
    op: str, name: str, of: torch.Tensor, dtypes: Sequence[torch.dtype], device: torch.device, gemm: str
) -> None:
    """ValueError unless ``of`` is a matrix on ``device`` of one of ``dtypes``. gemm: "an fp8", say."""
    check_is_tensor(op, name, of)
    if of.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{op}: {name}.dtype={of.dtype} is not one of {allowed}, as {gemm} GEMM takes it; convert it")
    if of.dim() != 2 or 0 in of.shape:
        raise ValueError(f"{op}: {name} has shape {tuple(of.shape)}; pass a matrix with at least one row and column")
    if of.device != device:
        raise ValueError(f"{op}: {name} is on {of.device}, not on {device}; move it")


def check_product(op: str, columns: int, N: int, K: int, gated: bool) -> None:
    """ValueError unless rows of ``columns`` fit a weight [N, K], of gate's and up's rows if gated."""
    if columns != K:
        raise ValueError(
            f"{op}: x has K={columns} columns and weight has {K}; weight is [N, K], a row for each output column"
        )
    if gated and N % 2 != 0:
        raise ValueError(f"{op}: weight has {N} rows, an odd number; pass gate's N rows, then up's N")


def check_fp8(op: str, x: ScaledMatrix, weight: Fp8, gated: bool) -> None:
    """ValueError unless the rows and the weight are matrices on one device with scales that fit them."""
    rows = x.data
    check_is_tensor(op, "weight.data", weight.data)
    for name, matrix in (("x", rows), ("weight", weight)):
        if isinstance(matrix, Fp8):
            check_matrix(op, name, matrix.data, (E4M3,), weight.device, "an fp8")
            _check_scales(op, f"{name}.scales", matrix.scales, weight.device)
        else:
            check_matrix(op, name, matrix, HALVES, weight.device, "an fp8")
    (N, K), columns = weight.shape, rows.shape[1]
    check_product(op, columns, N, K, gated)
    block = (spread(weight.scales.shape[0], N), spread(weight.scales.shape[1], K))
    if 0 in block or weight.is_grouped and block[1] < LEAST_COLUMNS:
        raise ValueError(
            f"{op}: weight.scales has shape {tuple(weight.scales.shape)} for a weight of {N} x {K}; pass "
            f"[ceil(N / r), ceil(K / c)] for blocks of r x c, powers of two up to 128 (c from {LEAST_COLUMNS} on), [{N}, 1] "
            f"or [1, 1]"
        )
    if isinstance(rows, Fp8):
        _check_scales_of_rows(op, rows, weight)
    if weight.input_scale is not None:
        _check_scales(op, "weight.input_scale", weight.input_scale, weight.device)
        if weight.input_scale.numel() != 1 or weight.is_grouped:
            raise ValueError(
                f"{op}: weight.input_scale has shape {tuple(weight.input_scale.shape)}; pass one scale, [1, 1], and "
                "no scales for blocks of the weight"
            )


def _check_scales_of_rows(op: str, rows: Fp8, weight: Fp8) -> None:
    M, wanted = rows.shape[0], scales_of(weight.shape[1]) if weight.is_grouped else 1
    if tuple(rows.scales.shape) not in ((M, wanted), *(((1, 1),) if wanted == 1 else ())):
        raise ValueError(
            f"{op}: x.scales has shape {tuple(rows.scales.shape)}; this weight, whose scales are "
            f"{tuple(weight.scales.shape)}, asks for [{M}, {wanted}]"
        )


def _check_scales(op: str, name: str, scales: torch.Tensor, device: torch.device) -> None:
    check_is_tensor(op, name, scales)
    if scales.dtype != torch.float32 or scales.dim() != 2 or scales.device != device:
        raise ValueError(
            f"{op}: {name} is {scales.dtype} {tuple(scales.shape)} on {scales.device}; pass a float32 matrix on {device}"
        )


def quantized_for(weight: Fp8, x: torch.Tensor | Fp8, caps: Capabilities) -> Fp8:
    """Rows ``x`` in e4m3, with the scales that ``weight`` asks for; rows in e4m3 as they are."""
    return x if isinstance(x, Fp8) else quantized_rows(x, weight.row_format, caps)


def by_design(
    design: Cublas | SmallM,
    x: ScaledMatrix,
    weight: Fp8,
    *,
    gated: bool = False,
    summed: bool = True,
    out: torch.Tensor | None = None,
    format: RowFormat | None = None,
) -> torch.Tensor | Fp8:
    """GEMM of checked arguments by ``design``: ``out``, or a new tensor in x's dtype, bf16 of an ``Fp8``.

    If not ``summed``, the small-M kernel's split-K partials fp32 [partials, M, N]. format: of a ``gated`` result in fp8, which
    takes a kernel for that alone where the design does not write it (``small_m.writes``).
    """
    dtype, caps = x.data.dtype if out is None else out.dtype, capabilities_of(weight.device)
    x = x._replace(data=quantized_for(weight, x.data, caps))
    if isinstance(design, SmallM):
        options = {"activation": "silu" if gated else None, "summed": summed, "dtype": dtype, "out": out}
        given = *_described(x, weight), (design := _within_scales(design, weight))
        if format is None or small_m.writes(design, weight.shape[1], format):
            return small_m.run(*given, **options, format=format)
        return quantized_rows(small_m.run(*given, **options), format, caps)
    if not gated:
        return cublas.scaled(_scaled(x), weight, dtype, out)
    product, norm = cublas.scaled(x.data, weight, dtype), x.scales or (None, 0.0)
    if format is None:
        return torch.ops.weft.silu_mul.default(product, *norm)
    if format.kind == "token" and weight.shape[0] > 2 * MAX_TOKEN:
        return quantized_rows(torch.ops.weft.silu_mul.default(product, *norm), format, caps)
    return fp8_of(*torch.ops.weft.silu_mul_fp8.default(product, *norm, *format), format)


def _within_scales(design: SmallM, weight: Fp8) -> SmallM:
    """``design`` with steps under one scale of the weight, or two: of whole groups."""
    columns = columns_of(weight)
    by_twos = design.block_k == 256 and columns == 128 and weight.shape[1] % 256 == 0
    fits = not weight.is_grouped or design.block_k <= columns or by_twos
    return design if fits else replace(design, block_k=columns)


def _described(x: ScaledMatrix, weight: Fp8) -> tuple[ScaledMatrix, Fp8]:
    """Both operands as the small-M kernel reads them."""
    rows = x.data._replace(data=described(x.data.data))
    return x._replace(data=rows), weight._replace(data=described(weight.data), scales=weight.scales.contiguous())


def _scaled(x: ScaledMatrix) -> Fp8:
    """Rows whose scales hold a deferred RMS scale too."""
    rows, norm = x
    if norm is None:
        return rows
    return rows._replace(scales=rows.scales * torch.rsqrt(norm.squares.sum(1, keepdim=True) + norm.eps))


def described(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` with rows that descriptors reach: itself, or a copy with rows on 16 bytes."""
    matrix = rows_contiguous(matrix)
    if can_describe(matrix):
        return matrix
    rows, columns = matrix.shape
    grain = 16 // matrix.element_size()
    room = matrix.new_empty((rows, -(-columns // grain) * grain))[:, :columns]
    return room.copy_(matrix)

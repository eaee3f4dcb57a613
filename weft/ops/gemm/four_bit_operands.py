"""Operands of GEMMs with a 4-bit weight (weft.kernels.four_bit.FourBit): checks, the GEMM.

Few rows go to the small-M kernel, which reads the weight in 4 bits. For many rows a kernel writes the weight in 16 bits, then
comes the op of 16-bit weights: the GEMM takes longer than that, and the tensor cores need not wait for conversions.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.kernels.four_bit import BLOCK, FourBit
from weft.kernels.four_bit_tile import dequantized
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm import small_m
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.fp8_operands import check_matrix, check_product, described
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.ops.registration import HALVES, check_is_tensor
from weft.runtime.arithmetic import cdiv


def by_design(
    design: Cublas | SmallM, x: ScaledMatrix, weight: FourBit, *, gated: bool = False, summed: bool = True
) -> torch.Tensor:
    """GEMM of checked arguments by ``design``, in x's dtype.

    If not ``summed``, the small-M kernel's split-K partials fp32 [partials, M, N].
    """
    rows, scales = x
    if isinstance(design, SmallM):
        design = design if design.block_k in (BLOCK, 2 * BLOCK) else replace(design, block_k=BLOCK)
        given = ScaledMatrix(described(rows), scales), weight, design
        return small_m.run(*given, activation="silu" if gated else None, summed=summed)
    wide = dequantized(weight, rows.dtype, capabilities_of(rows.device))
    if scales is not None:
        return torch.ops.weft.matmul_deferred_norm.default(rows, *scales, wide, "silu" if gated else None)
    return (torch.ops.weft.matmul_silu_mul if gated else torch.ops.weft.matmul).default(rows, wide)


def check_four_bit(op: str, x: torch.Tensor, weight: FourBit, gated: bool) -> None:
    """ValueError unless x and the weight are matrices on one device, with scales that fit."""
    data, scales, K, zeros = weight
    for name, of in (("weight.data", data), ("weight.scales", scales)):
        check_is_tensor(op, name, of)
    for name, of, dtypes in (
        ("x", x, HALVES),
        ("weight.data", data, (torch.uint8,)),
        ("weight.scales", scales, (torch.uint8, torch.int8, torch.float32, torch.bfloat16)),
        ("weight.zeros", zeros, (torch.uint8,)),
    ):
        if of is None:
            continue
        check_matrix(op, name, of, dtypes, data.device, "a 4-bit")
        if name == "weight.data" and not of.is_contiguous() or name != "x" and of.stride(1) != 1 < of.shape[1]:
            raise ValueError(f"{op}: {name} has strides {of.stride()}; pass {name}.contiguous()")
    N = len(data)
    check_product(op, x.shape[1], N, K, gated)
    if data.shape[1] != cdiv(K, BLOCK) * BLOCK // 2:
        raise ValueError(
            f"{op}: weight.data has shape {tuple(data.shape)} for {K} columns; pass 64 bytes for each 128 columns of a row"
        )
    if len(scales) != N or weight.group < 2:
        raise ValueError(
            f"{op}: weight.scales has shape {tuple(scales.shape)} for a weight of {N} x {K}; pass [{N}, ceil(K / g)] for "
            f"groups of g columns, a power of two from 2 to 128, or [{N}, 1]"
        )
    if zeros is not None and (weight.is_mxfp4 or zeros.shape != scales.shape):
        raise ValueError(
            f"{op}: weight.zeros has shape {tuple(zeros.shape)}; pass that of the scales, {tuple(scales.shape)}, for int4 alone"
        )

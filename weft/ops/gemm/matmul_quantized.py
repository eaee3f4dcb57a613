"""``matmul``, ``matmul_silu_mul``, ``matmul_parts`` with a weight in 8 or 4 bits, by its type."""

from __future__ import annotations

import torch

from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm.matmul_four_bit import matmul_four_bit
from weft.ops.gemm.matmul_fp8 import matmul_fp8

QUANTIZED = (Fp8, FourBit)


def matmul_quantized(
    op: str, x: ScaledMatrix, weight: Fp8 | FourBit, *, gated: bool = False, parts: bool = False
) -> torch.Tensor:
    """``op`` of unchecked arguments. parts: split-K partials where the plan leaves them."""
    of_type = matmul_fp8 if isinstance(weight, Fp8) else matmul_four_bit
    return of_type(op, x, weight, gated=gated, parts=parts)

"""``matmul``, ``matmul_silu_mul``, ``matmul_parts`` with a weight in 4 bits (FourBit)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.kernels.deferred_norm import check_scales
from weft.kernels.four_bit import FourBit
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.ops.gemm.four_bit_operands import by_design, check_four_bit
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.local_gemm import local_gemm
from weft.ops.gemm.small_m_rule import SmallM, empty_partials, partials_left
from weft.ops.local import capabilities_of
from weft.ops.op import Op, define
from weft.plan.planned import machine

if TYPE_CHECKING:
    from weft.ops.gemm.cublas import Cublas


def matmul_four_bit(
    op: str, x: ScaledMatrix, weight: FourBit, *, gated: bool = False, parts: bool = False
) -> torch.Tensor:
    """``op`` of unchecked arguments. parts: split-K partials where the plan leaves them."""
    check_four_bit(op, x.data, weight, gated)
    check_scales(op, x, weight.data)
    squares, eps = x.scales or (None, 0.0)
    return _MATMUL_FOUR_BIT.dispatch(x.data, weight, squares, eps, gated, parts)


class MatmulFourBit(Op):
    name = alias = "matmul_four_bit"

    def forward(
        self, x: torch.Tensor, weight: FourBit, squares: torch.Tensor | None, eps: float, gated: bool, parts: bool
    ) -> torch.Tensor:
        design = plan_of(x, weight, squares is not None, gated, parts)
        scales = None if squares is None else RowScales(squares.contiguous(), eps)
        return by_design(design, ScaledMatrix(x, scales), weight, gated=gated, summed=not parts)

    def fake(self, x, weight, squares, eps, gated, parts):
        left = partials_left(plan_of(x, weight, squares is not None, gated, parts), x.shape[1]) if parts else 1
        return empty_partials(x, weight.shape[0] // (2 if gated else 1), left, x.dtype)


def plan_of(x: torch.Tensor, weight: FourBit, deferred_norm: bool, gated: bool, parts: bool) -> Cublas | SmallM:
    """Design of a call, from shapes and dtypes alone."""
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    call = GemmCall(M, N, K, x.dtype, deferred_norm=deferred_norm, partials=parts, four_bit=weight.format)
    return local_gemm(gated).plan(call, machine(capabilities_of(x.device), 1)).design


_MATMUL_FOUR_BIT = define(MatmulFourBit())

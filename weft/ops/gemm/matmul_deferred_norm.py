"""GEMMs of rows with a deferred RMS scale (weft.kernels.deferred_norm).

The small-M kernel multiplies its fp32 sums by each row's factor; a result of cuBLAS is multiplied by the kernel that reads it
(silu_mul, qk_norm_rope).
"""

from __future__ import annotations

import torch

from weft.kernels.deferred_norm import normed
from weft.kernels.operands import RowScales, ScaledMatrix, can_describe, rows_contiguous
from weft.ops.gemm import cublas, small_m
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.local_gemm import local_gemm
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.ops.op import Op, define
from weft.plan.planned import machine


def product(x: ScaledMatrix, weight: torch.Tensor, *, activation: str | None = None) -> torch.Tensor:
    """``matmul``, or with an ``activation`` ``matmul_silu_mul``, of checked arguments with scales."""
    return _MATMUL_DEFERRED_NORM.dispatch(x.data, x.scales.squares, x.scales.eps, weight, activation)


class MatmulDeferredNorm(Op):
    name = alias = "matmul_deferred_norm"

    def forward(
        self, scaled: torch.Tensor, squares: torch.Tensor, eps: float, weight: torch.Tensor, activation: str | None
    ) -> torch.Tensor:
        gated = activation is not None
        scaled, weight = rows_contiguous(scaled), rows_contiguous(weight)
        (M, K), N = scaled.shape, weight.shape[0] // (2 if gated else 1)
        call = GemmCall(M, N, K, scaled.dtype, can_describe(scaled, weight), deferred_norm=True)
        design = local_gemm(gated).plan(call, machine(capabilities_of(scaled.device), 1)).design
        if isinstance(design, SmallM):
            operand = ScaledMatrix(scaled, RowScales(squares.contiguous(), eps))
            return small_m.run(operand, weight, design, activation=activation)
        if gated:
            return torch.ops.weft.silu_mul.default(cublas.run(design, scaled, weight), squares, eps, activation)
        return torch.ops.weft.matmul.default(normed(scaled, squares, eps), weight)

    def fake(self, scaled, squares, eps, weight, activation):
        return scaled.new_empty((scaled.shape[0], weight.shape[0] // (1 if activation is None else 2)))


_MATMUL_DEFERRED_NORM = define(MatmulDeferredNorm())

"""matmul_silu_mul: the first half of a gated MLP. One kernel for few rows, the library's GEMM and silu_mul for many."""

from __future__ import annotations

import torch

from weft.kernels.deferred_norm import FactoredNorm
from weft.kernels.operands import rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.gemm import cublas, matmul_deferred_norm, small_m
from weft.ops.local import capabilities_of, check_like
from weft.ops.registration import FLOATS, check_is_tensor


def matmul_silu_mul(x: torch.Tensor | FactoredNorm, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) -> [M, N], contiguous, in the dtype of both.

    x       [M, K], fp16, bf16 or fp32; or a factored norm, whose rows' factors are applied to the products (``matmul``)
    weight  [2 N, K] of x's dtype: gate's N rows, then up's

    Rows may be strided; anything else is copied first. With one kernel (few rows, where ``weft.ops.gemm.small_m`` has a config)
    all is computed in fp32 and rounded once; else the two products are rounded before silu is computed in fp32. The same
    bits from run to run; a row's bits may change with the design and config that M decides. No backward. ValueError for
    shapes, dtypes or devices that do not fit.
    """
    rows = x.scaled if isinstance(x, FactoredNorm) else x
    check_is_tensor("matmul_silu_mul", "x", rows)
    for name, matrix, dtypes in (("x", rows, FLOATS), ("weight", weight, (rows.dtype,))):
        check_like("matmul_silu_mul", name, matrix, rows.device, dtypes)
        if matrix.dim() != 2 or 0 in matrix.shape:
            raise ValueError(
                f"matmul_silu_mul: {name} has shape {tuple(matrix.shape)}; pass a matrix with at least one row and column"
            )
    if rows.shape[1] != weight.shape[1]:
        raise ValueError(
            f"matmul_silu_mul: x has K={rows.shape[1]} columns and weight has {weight.shape[1]}; weight is [2 N, K]"
        )
    if weight.shape[0] % 2 != 0:
        raise ValueError(
            f"matmul_silu_mul: weight has {weight.shape[0]} rows, an odd number; pass gate's N rows, then up's N"
        )
    if isinstance(x, FactoredNorm):
        return matmul_deferred_norm.product("matmul_silu_mul", x, weight)
    return torch.ops.weft.matmul_silu_mul.default(x, weight)


@custom_op("matmul_silu_mul", backward=False)
def _matmul_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = rows_contiguous(x), rows_contiguous(weight)
    config = small_m.chosen_for("matmul_silu_mul", x, weight, capabilities_of(x.device))
    if config is not None:
        return small_m.run(x, weight, config, True)
    return torch.ops.weft.silu_mul.default(cublas.matmul(x, weight), None, 0.0)


@_matmul_silu_mul.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))

"""GEMMs of rows whose norm is deferred (weft.kernels.deferred_norm).

The kernel of small-M GEMMs divides its fp32 sums by each row's root mean square; a result of cuBLAS is divided by the kernel
that reads it (silu_mul, qk_norm_rope).
"""

from __future__ import annotations

import torch

from weft.kernels.deferred_norm import FactoredNorm, check_squares, normed
from weft.kernels.operands import can_describe, rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.gemm import cublas, small_m, small_m_config
from weft.ops.local import capabilities_of


def product(op: str, x: FactoredNorm, weight: torch.Tensor) -> torch.Tensor:
    """``op``, "matmul" or "matmul_silu_mul", of arguments of which all but ``squares`` are checked."""
    check_squares(op, x, weight)
    return torch.ops.weft.product_of_norm.default(x.scaled, x.squares, x.eps, weight, op == "matmul_silu_mul")


@custom_op("product_of_norm", backward=False)
def _product_of_norm(
    scaled: torch.Tensor, squares: torch.Tensor, eps: float, weight: torch.Tensor, gated: bool
) -> torch.Tensor:
    scaled, weight = rows_contiguous(scaled), rows_contiguous(weight)
    (M, K), N = scaled.shape, weight.shape[0] // (2 if gated else 1)
    op, caps = "matmul_silu_mul" if gated else "matmul", capabilities_of(scaled.device)
    config, _ = small_m_config.configured(op, M, N, K, scaled.dtype, caps, factored=True)
    if config is not None and can_describe(scaled, weight):
        return small_m.run(scaled, weight, config, gated, squares=squares.contiguous(), eps=eps)
    if gated:
        return torch.ops.weft.silu_mul.default(cublas.matmul(scaled, weight), squares, eps)
    return torch.ops.weft.matmul.default(normed(scaled, squares, eps), weight)


@_product_of_norm.register_fake
def _(scaled, squares, eps, weight, gated):
    return scaled.new_empty((scaled.shape[0], weight.shape[0] // (2 if gated else 1)))

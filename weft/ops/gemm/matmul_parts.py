"""matmul_parts: a product whose split sums are left to the kernel that reads them.

Where few rows meet a weight of few rows, ``weft.ops.gemm.small_m`` splits K, so that all SMs read the weight, and a kernel of
its own adds the parts up: 1.3 us a call and its start, for a few KiB (H200). A kernel that reads them anyway may do it.
"""

from __future__ import annotations

import torch

from weft.kernels.deferred_norm import FactoredNorm, check_squares
from weft.kernels.operands import can_describe, rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.gemm import persistent, small_m, small_m_config
from weft.ops.local import capabilities_of


def matmul_parts(x: torch.Tensor | FactoredNorm, weight: torch.Tensor) -> torch.Tensor | FactoredNorm:
    """What becomes ``matmul(x, weight)`` in the kernel that reads it: fp32 [parts, M, N] where K is split, to be added up in
    this order and rounded; else that product itself, [M, N] in x's dtype; or of a factored norm where the library multiplies,
    ``x.scaled`` times the weight, whose rows' factors are still to be applied.

    x       [M, K], fp16, bf16 or fp32, or a factored norm
    weight  [N, K] of x's dtype

    Which of the three depends on shapes, dtype and device alone. No backward. ValueError as of ``matmul``.
    """
    if not isinstance(x, FactoredNorm):
        persistent.check_operands("matmul_parts", x, weight, None)
        return torch.ops.weft.matmul_parts.default(x, weight, None, 0.0)
    persistent.check_operands("matmul_parts", x.scaled, weight, None)
    check_squares("matmul_parts", x, weight)
    if config_of(x.scaled, weight, factored=True) is None:
        return FactoredNorm(torch.ops.weft.matmul.default(x.scaled, weight), x.squares, x.eps)
    return torch.ops.weft.matmul_parts.default(x.scaled, weight, x.squares, x.eps)


def config_of(x: torch.Tensor, weight: torch.Tensor, factored: bool) -> small_m_config.SkinnyConfig | None:
    """The config of a product of few rows; None: another design."""
    caps = capabilities_of(x.device)
    words = {"factored": factored, "in_parts": True}
    return small_m_config.configured("matmul", x.shape[0], *weight.shape, x.dtype, caps, **words)[0]


def split_config(x: torch.Tensor, weight: torch.Tensor, factored: bool) -> small_m_config.SkinnyConfig | None:
    """The config of a product that leaves parts; None: it does not."""
    if x.shape[1] * x.element_size() % 16 != 0:
        return None
    config = config_of(x, weight, factored)
    return config if config is not None and small_m_config.parts_of(config, x.shape[1]) > 1 else None


def _described(matrix: torch.Tensor) -> torch.Tensor:
    """Where a descriptor reaches it, copied if need be, so that the result's shape does not depend on where it lies."""
    matrix = rows_contiguous(matrix)
    return matrix if can_describe(matrix) else matrix.clone(memory_format=torch.contiguous_format)


@custom_op("matmul_parts", backward=False)
def _matmul_parts(x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float) -> torch.Tensor:
    config = split_config(x, weight, squares is not None)
    if config is not None:
        x, weight = map(_described, (x, weight))
        squares = None if squares is None else squares.contiguous()
        return small_m.run(x, weight, config, False, squares=squares, eps=eps, summed=False)
    if squares is None:
        return torch.ops.weft.matmul.default(x, weight)
    return torch.ops.weft.product_of_norm.default(x, squares, eps, weight, False)


@_matmul_parts.register_fake
def _(x, weight, squares, eps):
    (M, K), N = x.shape, weight.shape[0]
    config = split_config(x, weight, squares is not None)
    if config is None:
        return x.new_empty((M, N))
    return x.new_empty((small_m_config.parts_of(config, K), M, N), dtype=torch.float32)

"""A norm whose rows are divided by their root mean square only in, or behind, the product that follows.

normed[t, :] = hidden[t, :] * weight / sqrt(mean(hidden[t, :]^2) + eps)
normed @ w.T = ((hidden * weight) @ w.T)[t, :] / sqrt(mean(hidden[t, :]^2) + eps)

The factor of a row is the same for all its columns, so it may come after the product, in fp32, where it costs nothing;
then nobody has to have seen a whole row before the product can begin, and the programs that add up a row over the ranks
(weft.ops.all_reduce_rms_norm) need not wait for each other. The kernel of products of few rows divides its sums; the
library's product is divided by the kernel that reads it (silu_mul, qk_norm_rope). One rounding as before, of
hidden * weight in the place of normed. Those may be larger than what fp16 holds; bf16 and fp32 have the exponents.
"""

from __future__ import annotations

import torch

from weft.kernels.deferred_norm import FactoredNorm, check_squares, normed
from weft.kernels.operands import can_describe, rows_contiguous
from weft.ops import library, skinny, skinny_config
from weft.ops.custom_op import custom_op
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
    config, _ = skinny_config.configured(op, M, N, K, scaled.dtype, caps, factored=True)
    if config is not None and can_describe(scaled, weight):
        return skinny.run(scaled, weight, config, gated, squares=squares.contiguous(), eps=eps)
    if gated:
        return torch.ops.weft.silu_mul.default(library.matmul(scaled, weight), squares, eps)
    return torch.ops.weft.matmul.default(normed(scaled, squares, eps), weight)


@_product_of_norm.register_fake
def _(scaled, squares, eps, weight, gated):
    return scaled.new_empty((scaled.shape[0], weight.shape[0] // (2 if gated else 1)))

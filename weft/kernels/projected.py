"""The QKV projection of tokens as kernels take it, with what is still to be applied to it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.operands import rows_contiguous


class Projected(NamedTuple):
    """The QKV projection of tokens, as kernels take it.

    qkv      [tokens, q_heads + 2 kv_heads, D]: query heads, key heads, value heads; tokens ``stride`` elements apart. Or its
             split-K partials, fp32, partial_stride elements apart
    squares  fp32 [tokens, SQUARES], a deferred RMS scale: token t of qkv times 1 / sqrt(sum(squares[t]) + eps). SQUARES 0:
             none, and any tensor
    """

    qkv: torch.Tensor
    stride: int
    partial_stride: int
    squares: torch.Tensor
    eps: float

    @classmethod
    def of(cls, given: torch.Tensor | DeferredNorm) -> tuple[Projected, dict[str, int]]:
        """(kernel argument, its compile-time constants: the numbers of split-K partials and of squares)."""
        deferred = isinstance(given, DeferredNorm)
        qkv, squares, eps = (given.scaled, given.squares.contiguous(), given.eps) if deferred else (given, None, 0.0)
        in_partials = qkv.dim() == 3
        qkv = qkv.contiguous() if in_partials else rows_contiguous(qkv)
        argument = cls(qkv, qkv.stride(-2), qkv.stride(0) if in_partials else 0, squares if deferred else qkv, eps)
        return argument, {
            "PARTIALS": qkv.shape[0] if in_partials else 1,
            "SQUARES": squares.shape[1] if deferred else 0,
        }

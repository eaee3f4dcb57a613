"""The QKV projection of tokens as kernels take it, with what is still to be applied to it.

x = (sum of split-K partials) * deferred RMS scale + bias            in fp32; the scale and the bias where there are any
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.operands import rows_contiguous


class Projected(NamedTuple):
    """The QKV projection of tokens, as kernels take it.

    qkv      [tokens, q_heads + 2 kv_heads, D]: query heads, key heads, value heads; tokens ``stride`` elements apart. Or its
             split-K partials, fp32, partial_stride elements apart
    squares  fp32 [tokens, parts], a deferred RMS scale: token t of qkv times 1 / sqrt(sum(squares[t]) + eps). Any tensor where
             ``ProjectedSizes`` has no parts
    bias     [q_heads + 2 kv_heads, D], added after that; None: there is none
    """

    qkv: torch.Tensor
    stride: int
    partial_stride: int
    squares: torch.Tensor
    eps: float
    bias: torch.Tensor | None

    @classmethod
    def of(cls, given: torch.Tensor | DeferredNorm, bias: torch.Tensor | None) -> tuple[Projected, ProjectedSizes]:
        """(kernel argument, its compile-time constant)."""
        deferred = isinstance(given, DeferredNorm)
        qkv, squares, eps = (given.scaled, given.squares.contiguous(), given.eps) if deferred else (given, None, 0.0)
        in_partials = qkv.dim() == 3
        qkv = qkv.contiguous() if in_partials else rows_contiguous(qkv)
        partial_stride, bias = qkv.stride(0) if in_partials else 0, bias if bias is None else bias.contiguous()
        argument = cls(qkv, qkv.stride(-2), partial_stride, squares if deferred else qkv, eps, bias)
        return argument, ProjectedSizes(qkv.shape[0] if in_partials else 1, squares.shape[1] if deferred else 0)


class ProjectedSizes(NamedTuple):
    """Sizes of a ``Projected``, a compile-time constant.

    partials  split-K partials
    squares   parts of the squares; 0: no RMS scale is deferred
    """

    partials: int
    squares: int

"""RMSNorm with a deferred RMS scale, which is applied in, or after, the GEMM that follows.

normed[t, :] = hidden[t, :] * weight / sqrt(mean(hidden[t, :]^2) + eps)
normed @ w.T = ((hidden * weight) @ w.T)[t, :] / sqrt(mean(hidden[t, :]^2) + eps)

A row's scale is the same for all its columns, so it may come after the GEMM, in fp32, where it costs nothing. The GEMM can then
start before the sum of squares of a whole row is known, and the programs that reduce a row over the ranks
(weft.ops.all_reduce_rms_norm) need not wait for each other. There is one rounding as before, of hidden * weight instead of
normed. hidden * weight may exceed the range of fp16; bf16 and fp32 have the exponents.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.arguments import check_number
from weft.kernels.fp8 import Fp8
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.runtime.team.checks import check_is_tensor


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """Rows, or a GEMM of rows, whose RMS scale is still to be applied.

    ``matmul``, ``matmul_parts`` and ``matmul_silu_mul`` take it in place of normalised rows; ``silu_mul``, ``qk_norm_rope`` and
    ``decode_attention`` in place of a GEMM of such rows.

    scaled   [..., H]: hidden * the norm's weight, rounded to their dtype, or then put in fp8; or a GEMM of that
    squares  fp32 [..., parts], at least one part: their sum is the mean of each row's hidden^2
    eps      of the norm
    """

    scaled: torch.Tensor | Fp8
    squares: torch.Tensor
    eps: float

    @property
    def operand(self) -> ScaledMatrix:
        """The rows and their scales as a GEMM takes them."""
        return ScaledMatrix(self.scaled, RowScales(self.squares, self.eps))

    def normed(self) -> torch.Tensor:
        """The normalised rows, of the shape and dtype of ``scaled``; rounded twice."""
        return normed(self.scaled, self.squares, self.eps)


def normed(scaled: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    """``DeferredNorm.normed`` of its three fields, for custom ops."""
    factor = torch.rsqrt(squares.sum(dim=-1, keepdim=True) + eps)
    return (scaled.float() * factor).to(scaled.dtype)


@triton.jit
def rms_scale(squares, rows, exists, eps, SQUARES: tl.constexpr):
    """RMS scale, fp32 [n], of ``rows`` [n] of squares [M, SQUARES]; any number where not ``exists``."""
    part = tl.arange(0, triton.next_power_of_2(SQUARES))
    at = squares + (rows.to(tl.int64) * SQUARES)[:, None] + part[None, :]
    shares = tl.load(at, mask=exists[:, None] & (part < SQUARES)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(shares, axis=1) + eps)


def operand_of(x: torch.Tensor | Fp8 | DeferredNorm) -> ScaledMatrix:
    """The operand that a caller passes as ``x``: a matrix, or rows with a deferred RMS scale."""
    return x.operand if isinstance(x, DeferredNorm) else ScaledMatrix(x)


def check_scales(op: str, x: ScaledMatrix, weight: torch.Tensor) -> None:
    """ValueError unless the scales of ``x``, if any, fit its rows and lie on the device of ``weight``."""
    if x.scales is None:
        return
    rows, (given, eps) = x.data.shape[0], x.scales
    check_is_tensor(op, "squares", given)
    if type(eps) is not float:
        check_number(f"{op}: eps", eps, 0.0, sys.float_info.max, "a finite number of at least 0")
    # Kernels take 0 parts for "nothing is deferred".
    fits = given.dim() == 2 and given.shape[0] == rows and given.shape[1] > 0
    if given.dtype != torch.float32 or not fits or given.device != weight.device:
        raise ValueError(
            f"{op}: squares is {given.dtype} {tuple(given.shape)} on {given.device}; pass what all_reduce_rms_norm "
            f"returned, float32 [{rows}, parts] on {weight.device}"
        )

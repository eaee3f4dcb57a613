"""A norm whose rows are divided by their root mean square only in, or behind, the GEMM that follows.

normed[t, :] = hidden[t, :] * weight / sqrt(mean(hidden[t, :]^2) + eps)
normed @ w.T = ((hidden * weight) @ w.T)[t, :] / sqrt(mean(hidden[t, :]^2) + eps)

The factor of a row is the same for all its columns, so it may come after the GEMM, in fp32, where it costs nothing. The GEMM
can then start before the sum of squares of a whole row is known, and the programs that add up a row over the ranks
(weft.ops.all_reduce_rms_norm) need not wait for each other. One rounding as before, of hidden * weight in the place of normed.
Those may be larger than what fp16 holds; bf16 and fp32 have the exponents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """What ``matmul``, ``matmul_parts`` and ``matmul_silu_mul`` take in the place of the normed rows, and ``silu_mul`` and
    ``qk_norm_rope`` in the place of a product of them.

    scaled   [..., H]: hidden * the norm's weight, rounded to their dtype; or a product of that
    squares  fp32 [..., parts], at least one: what adds up to the mean of each row's hidden^2
    eps      of the norm
    """

    scaled: torch.Tensor
    squares: torch.Tensor
    eps: float

    def normed(self) -> torch.Tensor:
        """The normed rows after all, of the shape and dtype of ``scaled``: rounded twice."""
        return normed(self.scaled, self.squares, self.eps)


FactoredNorm = DeferredNorm  # the former name, which callers outside the attention ops still import


def normed(scaled: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    factor = torch.rsqrt(squares.sum(dim=-1, keepdim=True) + eps)
    return (scaled.float() * factor).to(scaled.dtype)


@triton.jit
def factors(squares, rows, there, eps, SQUARES: tl.constexpr):
    """[n] fp32: what the ``rows`` [n] are to be multiplied by, of squares [M, SQUARES]; any number where not ``there``."""
    part = tl.arange(0, triton.next_power_of_2(SQUARES))
    at = squares + (rows.to(tl.int64) * SQUARES)[:, None] + part[None, :]
    shares = tl.load(at, mask=there[:, None] & (part < SQUARES)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(shares, axis=1) + eps)


def check_squares(op: str, x: DeferredNorm, weight: torch.Tensor) -> None:
    rows, given = x.scaled.shape[0], x.squares
    fits = (
        given.dim() == 2 and given.shape[0] == rows and given.shape[1] > 0
    )  # no part would say "not factored" to a kernel
    if given.dtype != torch.float32 or not fits or given.device != weight.device:
        raise ValueError(
            f"{op}: squares is {given.dtype} {tuple(given.shape)} on {given.device}; pass what all_reduce_rms_norm "
            f"returned, float32 [{rows}, parts] on {weight.device}"
        )

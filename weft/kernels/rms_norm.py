"""RMSNorm of rows that a program holds."""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr):
    """1 / sqrt(squares / WIDTH + eps), of rows of WIDTH elements whose squares sum to ``squares``."""
    return tl.rsqrt(squares / WIDTH + eps)


@triton.jit
def norm(hidden, squares, weight, eps, WIDTH: tl.constexpr):
    """``hidden`` [ROWS, BLOCK] over its rows' root mean squares, times ``weight`` [BLOCK], in fp32.

    hidden holds some columns of rows of WIDTH elements, whose squares sum to ``squares`` [ROWS].
    """
    return hidden.to(tl.float32) * inverse_rms(squares, eps, WIDTH)[:, None] * weight.to(tl.float32)[None, :]


@triton.jit
def squares_of(hidden):
    """Sum of the squares of each row of ``hidden`` [ROWS, BLOCK], fp32."""
    h = hidden.to(tl.float32)
    return tl.sum(h * h, axis=1)

"""RMSNorm of rows that a program holds."""

import triton
import triton.language as tl


@triton.jit
def norm(hidden, squares, weight, eps, WIDTH: tl.constexpr):
    """``hidden`` [ROWS, BLOCK], columns of rows of WIDTH whose squares sum to ``squares`` [ROWS]: each over its row's root
    mean square, times ``weight``, in fp32."""
    return hidden.to(tl.float32) * tl.rsqrt(squares / WIDTH + eps)[:, None] * weight.to(tl.float32)[None, :]


@triton.jit
def squares_of(hidden):
    h = hidden.to(tl.float32)
    return tl.sum(h * h, axis=1)

"""RMSNorm of rows that a program holds.

INVARIANT: a row's bits depend neither on the tile that holds it nor on the parts that programs have of it. Rows are of 16 bits,
whose squares are exact in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr, INVARIANT: tl.constexpr = False):
    """1 / sqrt(squares / WIDTH + eps), of rows of WIDTH elements whose squares sum to ``squares``."""
    if INVARIANT:
        # One multiply-add: a compiler has no choice to make twice.
        return tl.rsqrt(tl.fma(squares, 1.0 / WIDTH, eps))
    else:
        return tl.rsqrt(squares / WIDTH + eps)


@triton.jit
def norm(hidden, squares, weight, eps, WIDTH: tl.constexpr, INVARIANT: tl.constexpr = False):
    """``hidden`` [ROWS, BLOCK] over its rows' root mean squares, times ``weight`` [BLOCK], in fp32.

    hidden holds some columns of rows of WIDTH elements, whose squares sum to ``squares`` [ROWS].
    """
    return hidden.to(tl.float32) * inverse_rms(squares, eps, WIDTH, INVARIANT)[:, None] * weight.to(tl.float32)[None, :]


@triton.jit
def sum_of_rows(x, INVARIANT: tl.constexpr = False):
    """Sum of each row of ``x`` [ROWS, n].

    INVARIANT  n is a power of two; neighbours are added, then neighbouring sums. Zeros after a row's end change nothing, and
               programs that hold parts of a row, each a power of two long, may add up their parts, then these sums
    """
    if INVARIANT:
        for _ in tl.static_range(16):
            if x.shape[1] > 1:
                x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
        return tl.reshape(x, (x.shape[0],))
    else:
        return tl.sum(x, axis=1)


@triton.jit
def squares_of(hidden, INVARIANT: tl.constexpr = False):
    """Sum of the squares of each row of ``hidden`` [ROWS, BLOCK], fp32."""
    h = hidden.to(tl.float32)
    return sum_of_rows(h * h, INVARIANT)

"""Parts of an attention merged by their log-sum-exp: ``merge_attention``, and the parts of ranks.

    out = sum over parts of 2 ** (log_sum[p] - largest) * mean[p], over the sum of these weights        parts in order, in fp32

A part is the attention to some of a sequence's tokens: their mean and the log of the sum of their weights.
"""

import triton
import triton.language as tl

# Log of the sum of no weights: finite, so that it can be a Lamport word like any other. Below it a part counts as empty.
EMPTY: tl.constexpr = tl.constexpr(-3e38)


@triton.jit
def no_parts(ROWS: tl.constexpr, D: tl.constexpr):
    """State of ``fold`` before the first part.

    (largest log sum [ROWS], sum of weights [ROWS], weighted sum of means [ROWS, D])
    """
    return tl.full((ROWS,), EMPTY, tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D), tl.float32)


@triton.jit
def fold(state, mean, log_sum, PER_UNIT: tl.constexpr):
    """``state`` with one part more.

    mean     [ROWS, D]; of rows whose log_sum [ROWS] is EMPTY or less it does not count, NaN included
    PER_UNIT powers of two in a unit of log_sum: 1 for logs to the base 2, log2(e) for natural ones
    """
    largest, total, acc = state
    empty = log_sum <= EMPTY
    new = tl.where(log_sum > largest, log_sum, largest)
    weight = tl.where(empty, 0.0, tl.exp2((log_sum - new) * PER_UNIT))
    rescale = tl.exp2((largest - new) * PER_UNIT)
    acc = acc * rescale[:, None] + tl.where(empty[:, None], 0.0, mean) * weight[:, None]
    return new, total * rescale + weight, acc


@triton.jit
def merged(state):
    """Mean [ROWS, D] of all parts of ``state``; zeros for rows without a token."""
    _, total, acc = state
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def kept_of(log_sum, KEPT: tl.constexpr):
    """The first KEPT of ``log_sum`` [KEPT] or [2 * KEPT]."""
    if log_sum.shape[0] == KEPT:
        return log_sum
    else:
        first, _ = tl.split(tl.permute(tl.reshape(log_sum, (2, KEPT)), (1, 0)))
        return first

"""RMSNorm of attention heads and their rotation, in the half-split order of Hugging Face checkpoints.

n = x / sqrt(mean(x^2) + eps) * weight                                  x: a head, [D]
(a, b) = halves of n;  rotated = (a cos - b sin, b cos + a sin)

Columns c and c + D/2 are partners: each is rotated with the other. A kernel holds either whole heads and their partners
(``load_heads``, ``norm_and_rotate_heads``), or the two halves of each head, each the other's partner.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.partial_sums import sum_of_partials
from weft.kernels.rms_norm import inverse_rms, squares_of


class HeadNorms(NamedTuple):
    """The RMSNorms of query heads and of key heads: weights [D] and eps."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@triton.jit
def norm_and_rotate(x, partner, scale, weight, partner_weight, cos, sin):
    """Columns ``x`` [n, C] of heads, normalised and rotated, fp32.

    partner  [n, C]: the partner of each element; partner_weight likewise
    scale    [n, 1]: 1 / RMS of each whole head
    sin      of the columns' angles, negated in the first half of a head
    """
    return x * scale * weight * cos + partner * scale * partner_weight * sin


@triton.jit
def contiguous_halves(columns, HALF: tl.constexpr):
    """``columns`` [1, 2 HALF], marked as two contiguous, aligned halves for vectorised loads."""
    return tl.max_contiguous(tl.multiple_of(columns, (1, HALF)), (1, HALF))


@triton.jit
def load_heads(heads, exists, partial_stride, weight, D: tl.constexpr, PARTIALS: tl.constexpr):
    """(heads [n, D], their partners, weight, its partners) in fp32, for ``norm_and_rotate_heads``.

    heads  pointers [n, 1] to the first elements, the sum of PARTIALS partial_stride elements apart; exists: mask [n, 1]
    """
    column = tl.arange(0, D)[None, :]
    partner = contiguous_halves((column + D // 2) % D, D // 2)
    own = sum_of_partials(heads + column, exists, partial_stride, PARTIALS)
    other = sum_of_partials(heads + partner, exists, partial_stride, PARTIALS)
    return own, other, tl.load(weight + column).to(tl.float32), tl.load(weight + partner).to(tl.float32)


@triton.jit
def load_rotation(angles, position, D: tl.constexpr):
    """(cos, sin) [1, D] of the columns' angles at ``position``; sin is negated in the first half.

    angles  fp32 [positions, D]: the cosines of D/2 angles, then their sines
    """
    HALF: tl.constexpr = D // 2
    column = tl.arange(0, D)[None, :]
    angle = angles + position.to(tl.int64) * D + contiguous_halves(column % HALF, HALF)
    return tl.load(angle), tl.load(angle + HALF) * tl.where(column < HALF, -1.0, 1.0)


@triton.jit
def norm_and_rotate_heads(heads, factor, eps, rotation, D: tl.constexpr):
    """``heads`` as loaded by ``load_heads``, times ``factor``, normalised and rotated: [n, D] fp32."""
    x, partner, weight, partner_weight = heads
    cos, sin = rotation
    x, partner = x * factor, partner * factor
    scale = inverse_rms(squares_of(x), eps, D)[:, None]
    return norm_and_rotate(x, partner, scale, weight, partner_weight, cos, sin)

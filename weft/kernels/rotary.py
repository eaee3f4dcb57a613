"""RMSNorm of attention heads and their rotation, in the half-split order of Hugging Face checkpoints.

n = x / sqrt(mean(x^2) + eps) * weight                                  x: a head, [D]; without a weight n = x
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
    """RMSNorms of query heads and of key heads: weights [D] and eps.

    Both weights None: heads are only rotated.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float

    def contiguous(self) -> "HeadNorms":
        """The same norms with contiguous weights."""
        if self.q_weight is None:
            return self
        return HeadNorms(self.q_weight.contiguous(), self.k_weight.contiguous(), self.eps)


@triton.jit
def norm_and_rotate(x, partner, scale, weight, partner_weight, cos, sin):
    """Columns ``x`` [n, C] of heads, normalised and rotated, fp32.

    partner  [n, C]: the partner of each element; and partner_weight its weight
    scale    [n, 1]: 1 / RMS of each whole head
    sin      of the columns' angles, negated in the first half of a head
    """
    return x * scale * weight * cos + partner * scale * partner_weight * sin


@triton.jit
def contiguous_halves(columns, HALF: tl.constexpr):
    """``columns`` [1, 2 HALF], marked as two contiguous, aligned halves for vectorised loads."""
    return tl.max_contiguous(tl.multiple_of(columns, (1, HALF)), (1, HALF))


@triton.jit
def load_heads(projected, heads, at, exists, weight, D: tl.constexpr, PARTIALS: tl.constexpr):
    """(heads [n, D], bias, weight) in fp32, each with its partners, for ``norm_and_rotate_heads``.

    projected  ``Projected``, of PARTIALS split-K partials
    heads, at  pointers [n, 1] to the first element of each, and their offsets in a token; exists: mask [n, 1]
    weight     of the heads' norm. Where there is none, or no bias, any values are in its place
    """
    column = tl.arange(0, D)[None, :]
    partner = contiguous_halves((column + D // 2) % D, D // 2)
    own = sum_of_partials(heads + column, exists, projected.partial_stride, PARTIALS)
    other = sum_of_partials(heads + partner, exists, projected.partial_stride, PARTIALS)
    bias, weights = (own, other), (own, other)
    if projected.bias is not None:
        bias = load_bias(projected, at + column, exists), load_bias(projected, at + partner, exists)
    if weight is not None:
        weights = tl.load(weight + column).to(tl.float32), tl.load(weight + partner).to(tl.float32)
    return (own, other), bias, weights


@triton.jit
def load_bias(projected, at, exists):
    """Elements ``at`` of the bias of a ``Projected`` that has one, fp32."""
    return tl.load(projected.bias + at, mask=exists, other=0.0).to(tl.float32)


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
def norm_and_rotate_heads(heads, factor, projected, norms, rotation, D: tl.constexpr):
    """Heads of ``load_heads`` times ``factor``, plus bias, normalised and rotated: [n, D] fp32.

    projected, norms  ``Projected`` and ``HeadNorms``, which say whether there are a bias and norms
    """
    own, bias, weights = heads
    cos, sin = rotation
    x, partner = own[0] * factor, own[1] * factor
    if projected.bias is not None:
        x, partner = x + bias[0], partner + bias[1]
    if norms.q_weight is None:
        return x * cos + partner * sin
    else:
        scale = inverse_rms(squares_of(x), norms.eps, D)[:, None]
        return norm_and_rotate(x, partner, scale, weights[0], weights[1], cos, sin)

"""mla_norm_rope: a token's row in the cache of latents, and the rotated part of its queries (MLA).

row = (latent / sqrt(mean(latent^2) + eps) * weight, rotated key)      kv: (latent, key before its rotation)
(a, b) = halves of a rotary part, or its even and its odd elements (interleaved)
rotated = (a cos - b sin, b cos + a sin)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.latent_attention import HeadRows
from weft.kernels.operands import rows_contiguous
from weft.kernels.rms_norm import inverse_rms, squares_of
from weft.ops.attention.mla_decode_attention import case_of, check_latents
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like
from weft.ops.op import INVARIANT, Op, register
from weft.ops.registration import FLOATS, check_flag, check_scalar
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

# Query heads that a program rotates at a time.
HEADS: tl.constexpr = tl.constexpr(16)


class RowSizes(NamedTuple):
    """Sizes of mla_norm_rope, a compile-time constant.

    latent, rope  elements of a latent and of a rotary part; heads: of a token's queries; page: tokens of a page
    interleaved  partners are neighbours before the rotation; after it they are always halves apart
    """

    latent: int
    rope: int
    heads: int
    page: int
    interleaved: bool


@triton.jit
def rotated_halves(rows, exists, cos, sin, SIZES: tl.constexpr):
    """Both halves [n, rope / 2] of rotary parts, in fp32. rows: pointers [n, 1] to their first elements."""
    HALF: tl.constexpr = SIZES.rope // 2
    column = tl.arange(0, HALF)[None, :]
    if SIZES.interleaved:
        first, second = rows + 2 * column, rows + 2 * column + 1
    else:
        first, second = rows + column, rows + HALF + column
    a = tl.load(first, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(second, mask=exists, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def mla_norm_rope_kernel(
    q_rope, kv, kv_stride, weight, eps, angles, positions, slots, rotated, made, cache, SIZES: tl.constexpr
):
    """Row of token t, and its queries' rotary parts    grid: (tokens,)

    q_rope       ``HeadRows`` [tokens, heads, rope]; kv: [latent + rope] of each token, tokens kv_stride elements apart
    rotated      [tokens, heads, rope]: queries rotated by positions[t], a row of ``angles``
    made         [tokens, latent + rope]: the rows of the cache
    cache        [pages, page, latent + rope]: the row at slots[t] = page * page_size + offset; -1: not written. No two tokens
                 of a call share a slot
    """
    LATENT: tl.constexpr = SIZES.latent
    ROPE: tl.constexpr = SIZES.rope
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    column, half = tl.arange(0, LATENT)[None, :], tl.arange(0, HALF)[None, :]
    wl.follow_previous_kernel()
    slot = tl.load(slots + token)
    angle = angles + tl.load(positions + token).to(tl.int64) * ROPE + half
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    source = kv + token * kv_stride
    latent = tl.load(source + column).to(tl.float32)
    latent = latent * inverse_rms(squares_of(latent), eps, LATENT)[:, None] * tl.load(weight + column).to(tl.float32)
    one = tl.arange(0, 1)[:, None]
    key, other_half = rotated_halves(source + LATENT + one, one == 0, cos, sin, SIZES)
    row = made + token * (LATENT + ROPE)
    dtype: tl.constexpr = made.dtype.element_ty
    latent, key, other_half = latent.to(dtype), key.to(dtype), other_half.to(dtype)
    tl.store(row + column, latent)
    tl.store(row + LATENT + half, key)
    tl.store(row + LATENT + HALF + half, other_half)
    if slot >= 0:
        cell = cache + slot * (LATENT + ROPE)
        tl.store(cell + column, latent)
        tl.store(cell + LATENT + half, key)
        tl.store(cell + LATENT + HALF + half, other_half)
    for first in range(0, SIZES.heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        exists = head < SIZES.heads
        heads = q_rope.rows + token * q_rope.token_stride + head.to(tl.int64) * q_rope.head_stride
        low, high = rotated_halves(heads, exists, cos, sin, SIZES)
        target = rotated + (token * SIZES.heads + head) * ROPE + half
        tl.store(target, low.to(dtype), mask=exists)
        tl.store(target + HALF, high.to(dtype), mask=exists)


def mla_norm_rope(
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rotated queries [T, H, R], rows [T, L + R]) of new tokens; the rows go into the cache, too.

    q_rope       [T, H, R], fp16, bf16 or fp32: the part of each query that is rotated
    kv           [T, L + R]: the latent before its norm, and the key before its rotation, which all heads share. Rows may be
                 strided
    weight       [L], of the RMSNorm of the latent, with ``eps``
    angles       [max_positions, R] fp32: the cosines of R/2 angles, then their sines
    positions    [T] int32 or int64, each 0 .. max_positions - 1
    slots        [T] int64: page * S + offset in the page, no two alike; -1: not written, for padding, and for tokens of a
                 sharded cache that another rank holds
    cache        [P, S, L + R], contiguous, of q_rope's dtype; written in place
    interleaved  partners of the rotation are neighbours in q_rope and kv, as in DeepSeek's checkpoints, and not halves apart.
                 Rotated parts have them halves apart in both cases: scores are the same in any order

    L is a power of two from 16 to 512, R from 16 to 64. Computed in fp32, rounded once; a token's bits depend on the token
    alone. The host reads no positions or slots: values out of range are not refused. No backward. ValueError for shapes, dtypes
    or devices that do not fit.
    """
    op = "mla_norm_rope"
    check_like(op, "q_rope", q_rope, None, FLOATS, ("T", "H", "R"))
    T, H, R = q_rope.shape
    check_like(op, "weight", weight, q_rope.device, (q_rope.dtype,), ("L",))
    check_latents(op, cache, q_rope, len(weight), R)
    if H == 0:
        raise ValueError(f"{op}: q_rope has shape {tuple(q_rope.shape)}; pass 1 or more heads")
    for name, x, shape, dtypes in (
        ("kv", kv, (T, len(weight) + R), (q_rope.dtype,)),
        ("angles", angles, ("max_positions", R), (torch.float32,)),
        ("positions", positions, (T,), (torch.int32, torch.int64)),
        ("slots", slots, (T,), (torch.int64,)),
    ):
        check_like(op, name, x, q_rope.device, dtypes, shape)
    check_scalar(op, "eps", eps)
    check_flag(op, "interleaved", interleaved)
    return MLA_NORM_ROPE.dispatch(
        MLARowArguments(q_rope, kv, weight, eps, angles, positions, slots, cache, interleaved)
    )


class MLARowArguments(NamedTuple):
    """Arguments of mla_norm_rope."""

    q_rope: torch.Tensor
    kv: torch.Tensor
    weight: torch.Tensor
    eps: float
    angles: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor
    interleaved: bool = False


class MLANormRope(Op):
    """sizes of a case: heads, 1, latent + rope, page size.

    Its fields: rope, tokens, padded, interleaved, strided.
    """

    name, alias = "mla_norm_rope", "mla-norm-rope"
    bits = INVARIANT
    no_plan = "one kernel; a program takes a token, and 16 of its heads at a time"
    mutates = ("cache",)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        (heads, _, width, page), rope, tokens = case.sizes, case.field("rope"), case.field("tokens")
        pages, generator = tokens // page + 3, torch.Generator().manual_seed(tokens)
        positions = torch.randint(50, (tokens,), generator=generator).to(draw.device)
        slots = torch.randperm(pages * page, generator=generator)[:tokens].to(draw.device)
        slots[list(case.field("padded") or ())] = -1
        q, kv = draw.own("q", (tokens, heads, 2 * rope))[..., rope:], draw.own("kv", (tokens, width))
        if case.field("strided"):
            kv = torch.cat((kv, kv), dim=1)[:, :width]
        weight, angles = 1 + draw.own("weight", (width - rope,)) / 4, draw.own("angles", (50, rope), dtype=FP32)
        return q, kv, weight, angles, positions, slots, draw.own("cache", (pages, page, width))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(rotated queries, rows, cache)"""
        q, kv, weight, angles, positions, slots, cache = by_rank[rank]
        latent, key = kv.double().split([len(weight), q.shape[2]], dim=1)
        latent = case.exact_norm(latent, weight)
        cos, sin = (half[:, None] for half in angles.double()[positions].chunk(2, dim=-1))

        def rotated(x: torch.Tensor) -> torch.Tensor:
            a, b = (x[..., 0::2], x[..., 1::2]) if case.field("interleaved") else x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        rows = torch.cat((latent, rotated(key[:, None])[:, 0]), dim=1)
        cache, written = cache.double(), slots >= 0
        cache.view(-1, cache.shape[2])[slots[written]] = rows[written]
        return rotated(q.double()), rows, cache

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[2])

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, kv, weight, *places = tensors
        interleaved = bool(case.field("interleaved"))
        return *mla_norm_rope(q, kv, weight, case.eps, *places, interleaved=interleaved), places[-1]

    def cases(self) -> Iterator[Case]:
        for sizes, dtype in (((16, 512, 64, 64), BF16), ((3, 32, 16, 16), FP32), ((20, 64, 32, 32), FP16)):
            for fields in (
                {"tokens": 1, "interleaved": True},
                {"tokens": 7, "padded": (0, 5), "strided": True},
                {"tokens": 5, "padded": (4,), "interleaved": True, "strided": True},
                {"tokens": 0},
            ):
                yield case_of(self.name, sizes, dtype, **fields)

    def large_cases(self) -> Iterator[Case]:
        for heads in (16, 128):
            padded = tuple(range(4000, 4096))
            yield case_of(self.name, (heads, 512, 64, 64), BF16, tokens=4096, padded=padded, interleaved=True)

    def forward(self, given: MLARowArguments) -> tuple[torch.Tensor, torch.Tensor]:
        rotated, rows = self.fake(given)
        if len(rows) == 0:
            return rotated, rows
        (_, heads, rope), caps = rotated.shape, capabilities_of(rows.device)
        sizes = RowSizes(len(given.weight), rope, heads, given.cache.shape[1], given.interleaved)

        options, kv = lambda: {"SIZES": sizes, **launch_options(caps)}, rows_contiguous(given.kv)
        launch = launch_on(rows.device, mla_norm_rope_kernel, sizes, options)
        launch(
            len(rows),
            HeadRows.of(given.q_rope),
            kv,
            kv.stride(0),
            given.weight.contiguous(),
            given.eps,
            given.angles.contiguous(),
            given.positions.contiguous(),
            given.slots.contiguous(),
            rotated,
            rows,
            given.cache,
        )
        return rotated, rows

    def fake(self, given: MLARowArguments) -> tuple[torch.Tensor, torch.Tensor]:
        return given.q_rope.new_empty(given.q_rope.shape), given.kv.new_empty(given.kv.shape)


MLA_NORM_ROPE = register(MLANormRope())

"""decode_attention: from the projected new token of each sequence to its attention, in one kernel.

What qk_norm_rope and paged_attention do one after the other, for a decode step. The queries of a KV head are few, so every
program that attends for them norms and rotates them itself; the new key and value are made, and written into the cache, by the
program whose part of the sequence they belong to, so nobody waits for anybody but in the join of the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.deferred_norm import FactoredNorm, check_squares, factors
from weft.kernels.online_softmax import pages_at
from weft.kernels.operands import rows_contiguous
from weft.kernels.partial_sums import sum_of_parts
from weft.ops.attention.paged_attention import (
    LOG2_E,
    AttentionConfig,
    attend_and_join,
    check_heads,
    check_tickets,
    config_for,
    constants,
    parts_of,
    scratch_of,
    splits_for,
)
from weft.ops.attention.qk_norm_rope import check_projected
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import check_scalar
from weft.runtime.capabilities import launch_options


@triton.jit
def in_halves(columns, HALF: tl.constexpr):
    """``columns`` [1, 2 HALF], each half of which goes on without a gap: for loads of more than one element."""
    return tl.max_contiguous(tl.multiple_of(columns, (1, HALF)), (1, HALF))


@triton.jit
def norm_and_rotate(own, other, scale, other_scale, cos, sin, eps, D: tl.constexpr):
    """Heads ``own`` [n, D], normed and rotated, fp32. ``other``: the same with their halves exchanged, and so other_scale;
    cos, sin [1, D]: of each column's angle, sin negative in the first half."""
    shrink = tl.rsqrt(tl.sum(own * own, axis=1) / D + eps)[:, None]
    return own * shrink * scale * cos + other * shrink * other_scale * sin


@triton.jit
def ask_for(ptr, count):
    """``count`` elements from ``ptr`` on into the L2; none if it is not positive."""
    nbytes = tl.maximum(count, 0) * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    wl.prefetch(ptr + tl.arange(0, 1), nbytes + tl.zeros([1], tl.int32))


@triton.jit(do_not_specialize=["max_pages"])
def decode_attention_kernel(
    qkv, stride, part_stride, squares, norm_eps, q_weight, k_weight, eps, angles,
    keys, values, pages, lengths, out, parts, weights, tickets, max_pages, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr, LEAST: tl.constexpr, SPLIT: tl.constexpr,
    JOINED: tl.constexpr, PARTS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """out[b, h, :] = softmax(q[b, h, :] . keys of b * scale) @ values of b        grid: (B * HEADS, splits)

    paged_attention_kernel, with q, the last key and the last value of sequence b from its projected token:

    qkv[b]    "stride" elements from token to token: HEADS * GROUP query heads, HEADS keys, HEADS values. Of PARTS summands,
              fp32 where there are several, part_stride elements apart
    squares   fp32 [B, SQUARES]: of qkv[b] times 1 / sqrt(sum(squares[b]) + norm_eps). SQUARES 0: as it is
    its place is lengths[b] - 1: the angles' row, and the cell of the cache that the program of this token's part writes
              before it attends. lengths[b] = 0: nothing is written

    signals, waits  none: each cell is written and read by one program; parts as of paged_attention_kernel
    """
    HALF: tl.constexpr = D // 2
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = pair // HEADS, pair % HEADS
    row, column = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    # A column's partner is as far into the other half.
    partner, sign = in_halves((column + HALF) % D, HALF), tl.where(column < HALF, -1.0, 1.0)
    table = pages + sequence.to(tl.int64) * max_pages
    first = split * BLOCK_N
    wl.follow_previous_kernel()
    # All at once; what the table holds behind the length is not used.
    length = tl.load(lengths + sequence)
    page = pages_at(table, first, max_pages * PAGE, BLOCK_N, WAYS, PAGE)
    token = qkv + sequence.to(tl.int64) * stride
    theirs = token + ((head * GROUP + row) * D)[:, None]
    exists = (row < GROUP)[:, None]
    own = sum_of_parts(theirs + column, exists, part_stride, PARTS)
    other = sum_of_parts(theirs + partner, exists, part_stride, PARTS)
    own_scale, other_scale = tl.load(q_weight + column).to(tl.float32), tl.load(q_weight + partner).to(tl.float32)
    # The new key and value: asked for here, so that who keeps them does not wait for memory once more.
    mine, every = token + (HEADS * GROUP + head) * D, column >= 0
    own_key = sum_of_parts(mine + column, every, part_stride, PARTS)
    other_key = sum_of_parts(mine + partner, every, part_stride, PARTS)
    own_key_scale = tl.load(k_weight + column).to(tl.float32)
    other_key_scale = tl.load(k_weight + partner).to(tl.float32)
    value = sum_of_parts(mine + HEADS * D + column, every, part_stride, PARTS)
    factor = tl.full((1,), 1.0, tl.float32)
    if SQUARES > 0:
        factor = factors(squares, sequence + tl.arange(0, 1), tl.arange(0, 1) == 0, norm_eps, SQUARES)
    length = tl.minimum(length, max_pages * PAGE)
    count = parts_of(length, splits, LEAST)
    if BLOCK_N <= PAGE:
        # Before the queries are made, which takes as long as the first keys need. Two blocks or four cost more than they save:
        # 128 x 128 tokens on 2 KV heads 10.3 and 11.4 us, 8.8 with one (of a search that no file keeps).
        in_page = ((page.to(tl.int64) * HEADS + head) * PAGE + first % PAGE) * D
        ask_for(keys + in_page, tl.minimum(length - first, BLOCK_N) * D)
        ask_for(values + in_page, tl.minimum(length - first, BLOCK_N) * D)
    if split < count:
        last = tl.maximum(length - 1, 0)
        page_of_last = tl.load(table + last // PAGE, mask=length > 0, other=0)
        angle = angles + last.to(tl.int64) * D + in_halves(column % HALF, HALF)
        cos, sin = tl.load(angle), tl.load(angle + HALF) * sign
        by = factor[:, None]
        x = norm_and_rotate(own * by, other * by, own_scale, other_scale, cos, sin, eps, D).to(out.dtype.element_ty)
        if (last // BLOCK_N % count == split) & (length > 0):
            key = norm_and_rotate(
                own_key * by, other_key * by, own_key_scale, other_key_scale, cos, sin, eps, D
            )  # fmt: skip
            cell = ((page_of_last.to(tl.int64) * HEADS + head) * PAGE + last % PAGE) * D + column
            tl.store(keys + cell, key.to(keys.dtype.element_ty))
            tl.store(values + cell, (value * by).to(values.dtype.element_ty))
            tl.debug_barrier()  # other threads of this program read them
        attend_and_join(
            x, keys, values, table, page, head, first, length, count, scale, out, parts, weights, tickets,
            HEADS, GROUP, PAGE, D, BLOCK_N, WAYS, SPLIT, JOINED,
        )  # fmt: skip


def decode_attention(
    qkv: torch.Tensor | FactoredNorm, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, angles: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor,
    scale: float | None = None, tickets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The new token of each sequence attends to all of its tokens, itself included: [B, Hq, D]. Its key and value go into the
    paged cache.

    qkv                 [B, (Hq + 2 Hkv) * D], or parts of it, or a product of a factored norm, as of ``qk_norm_rope``
    q_weight, k_weight  [D], of the RMSNorm of each head
    angles              [max_positions, D] fp32: the cosines of D/2 angles, then their sines
    keys, values        [P, Hkv, S, D], contiguous, of one dtype, which is qkv's unless that is in parts; written in place
    pages               [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths             [B] int32: tokens to attend to, the new one, the last of them, included; at most max_pages * S and
                        max_positions. 0, a padding row: nothing is written, and its result is zeros
    scale, tickets      as of ``paged_attention``

    What ``qk_norm_rope`` and ``paged_attention`` give one after the other, but for fp32 roundings: D a power of two from 16 to
    256, S one from 16 to 256. No two sequences of a call share the page of their new tokens. The same bits from run to run.
    The host reads no lengths or pages: those out of range are not refused. No backward. ValueError for shapes, dtypes or
    devices that do not fit.
    """
    op = "decode_attention"
    norm = qkv if isinstance(qkv, FactoredNorm) else None
    qkv = norm.scaled if norm else qkv
    check_projected(op, qkv, q_weight, k_weight, angles, keys, values, tokens="B")
    B, heads, D = qkv.shape[-2], keys.shape[1], keys.shape[3]
    check_heads(op, qkv.shape[-1] // D - 2 * heads, keys)
    for name, x, shape in (("pages", pages, (B, "max_pages")), ("lengths", lengths, (B,))):
        check_like(op, name, x, qkv.device, (torch.int32,))
        check_shape(op, name, x, shape)
    check_tickets(op, tickets, B * heads, qkv.device)
    check_scalar(op, "eps", eps)
    if scale is not None:
        check_scalar(op, "scale", scale)
    squares, norm_eps = None, 0.0
    if norm is not None:
        check_squares(op, norm, qkv)
        squares, norm_eps = norm.squares, norm.eps
    return torch.ops.weft.decode_attention.default(
        qkv, squares, norm_eps, q_weight, k_weight, eps, angles, keys, values, pages, lengths,
        D**-0.5 if scale is None else scale, tickets,
    )  # fmt: skip


def run(
    qkv: torch.Tensor, squares: torch.Tensor | None, norm_eps: float, q_weight: torch.Tensor, k_weight: torch.Tensor,
    eps: float, angles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor,
    lengths: torch.Tensor, scale: float, tickets: torch.Tensor | None, config: AttentionConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """``decode_attention`` of checked arguments, with a chosen config."""
    _, heads, page, D = keys.shape
    in_parts = qkv.dim() == 3
    B, q_heads = qkv.shape[-2], qkv.shape[-1] // D - 2 * heads
    out = torch.empty((B, q_heads, D), dtype=keys.dtype, device=qkv.device)
    if B == 0:
        return out
    qkv = qkv.contiguous() if in_parts else rows_contiguous(qkv)
    caps, pairs, max_pages = capabilities_of(qkv.device), B * heads, pages.shape[1]
    config = config or config_for(pairs, D, keys.dtype, caps)
    splits = splits_for(pairs, max_pages * page, config, caps.sms)
    decode_attention_kernel[(pairs, splits)](
        qkv, qkv.stride(-2), qkv.stride(0) if in_parts else 0, qkv if squares is None else squares.contiguous(), norm_eps,
        q_weight.contiguous(), k_weight.contiguous(), eps, angles.contiguous(), keys, values, pages.contiguous(),
        lengths.contiguous(), out, *scratch_of(out, pairs, splits, tickets), max_pages, scale * LOG2_E,
        **constants(config, heads=heads, group=q_heads // heads, page=page, D=D, split=splits > 1),
        PARTS=qkv.shape[0] if in_parts else 1, SQUARES=0 if squares is None else squares.shape[1],
        **launch_options(caps),
    )  # fmt: skip
    return out


@custom_op("decode_attention", mutates_args=("keys", "values", "tickets"), backward=False)
def _decode_attention(
    qkv: torch.Tensor, squares: torch.Tensor | None, norm_eps: float, q_weight: torch.Tensor, k_weight: torch.Tensor,
    eps: float, angles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor,
    lengths: torch.Tensor, scale: float, tickets: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return run(qkv, squares, norm_eps, q_weight, k_weight, eps, angles, keys, values, pages, lengths, scale, tickets)


@_decode_attention.register_fake
def _(qkv, squares, norm_eps, q_weight, k_weight, eps, angles, keys, values, pages, lengths, scale, tickets):
    _, heads, _, D = keys.shape
    return keys.new_empty((qkv.shape[-2], qkv.shape[-1] // D - 2 * heads, D))

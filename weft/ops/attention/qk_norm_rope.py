"""qk_norm_rope: from the projected tokens to attention: head norms, rotation, and the new keys and values in the cache.

x = round-free fp32 of a head [D];  n = x / sqrt(mean(x^2) + eps) * weight
(a, b) = halves of n;  rotated = (a cos - b sin, b cos + a sin)        the half-split order of Hugging Face checkpoints
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.deferred_norm import FactoredNorm, check_squares, factors
from weft.kernels.operands import rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import FLOATS, check_flag, check_is_tensor, check_scalar
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options

HEAD_DIMS = (16, 32, 64, 128, 256)
# Elements of a program's tile: 16 a thread of 4 warps, so that half a head of bf16 is loaded 16 bytes at a time.
TILE = 2048


@triton.jit(do_not_specialize=["rows"])
def qk_norm_rope_kernel(
    qkv, stride, part_stride, squares, norm_eps, q_weight, k_weight, eps, angles, positions, slots, q, keys, values, rows,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    KEPT: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Head h of token t is row t * (Q_HEADS + 2 KV_HEADS) + h of the work.        grid: (cdiv(rows, ROWS),)

    qkv[t, h, :]  "stride" elements from token to token; first Q_HEADS query heads, then keys, then values. Of PARTS
                  summands, fp32 where there are several, part_stride elements apart
    squares       fp32 [T, SQUARES]: of qkv[t] times 1 / sqrt(sum(squares[t]) + norm_eps). SQUARES 0: as it is
    queries       q[t, h, :] = rotated(n) by positions[t], with q_weight. q has KEPT heads: these, or the keys behind them too
    keys          keys[page, h, offset, :] = rotated(n), with k_weight, where slots[t] = page * PAGE + offset
    values        values[page, h, offset, :] = as they come, rounded
    slots[t] = -1: neither key nor value is written. No two tokens of a call share a slot.
    """
    HALF: tl.constexpr = D // 2
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    token, head = row // HEADS, row % HEADS
    is_query, is_value = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    turns = exists & (head < Q_HEADS + KV_HEADS)
    column = tl.arange(0, HALF)[None, :]
    wl.follow_previous_kernel()
    position = tl.load(positions + token, mask=turns, other=0).to(tl.int64)
    slot = tl.load(slots + token, mask=exists & (head >= Q_HEADS), other=-1)
    source = qkv + (token.to(tl.int64) * stride + head * D)[:, None] + column
    low = tl.load(source, mask=exists[:, None], other=0.0)
    high = tl.load(source + HALF, mask=exists[:, None], other=0.0)
    for part in tl.static_range(1, PARTS):
        summand = source + part * tl.cast(part_stride, tl.int64)
        low += tl.load(summand, mask=exists[:, None], other=0.0)
        high += tl.load(summand + HALF, mask=exists[:, None], other=0.0)
    low_scale = tl.where(is_query[:, None], tl.load(q_weight + column), tl.load(k_weight + column)).to(tl.float32)
    high_scale = tl.where(
        is_query[:, None], tl.load(q_weight + HALF + column), tl.load(k_weight + HALF + column)
    ).to(tl.float32)  # fmt: skip
    angle = angles + (position * D)[:, None] + column
    cos = tl.load(angle, mask=turns[:, None], other=0.0)
    sin = tl.load(angle + HALF, mask=turns[:, None], other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if SQUARES > 0:
        factor = factors(squares, token, exists, norm_eps, SQUARES)[:, None]
        a, b = a * factor, b * factor
        low, high = a, b
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
    a, b = a * scale * low_scale, b * scale * high_scale
    dtype: tl.constexpr = q.dtype.element_ty
    turned_low, turned_high = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)

    target = q + ((token * KEPT + head).to(tl.int64) * D)[:, None] + column
    mask = (exists & (head < KEPT))[:, None]
    tl.store(target, turned_low, mask=mask)
    tl.store(target + HALF, turned_high, mask=mask)
    kv_head = (head - Q_HEADS) % KV_HEADS
    cell = ((slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE) * D
    target = keys + cell[:, None] + column
    mask = (turns & (head >= Q_HEADS) & (slot >= 0))[:, None]
    tl.store(target, turned_low, mask=mask)
    tl.store(target + HALF, turned_high, mask=mask)
    target = values + cell[:, None] + column
    mask = (exists & is_value & (slot >= 0))[:, None]
    tl.store(target, low.to(dtype), mask=mask)
    tl.store(target + HALF, high.to(dtype), mask=mask)


def qk_norm_rope(
    qkv: torch.Tensor | FactoredNorm, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, angles: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, with_keys: bool = False,
) -> torch.Tensor:  # fmt: skip
    """q [T, Hq, D]: the queries normed and rotated; the new keys (likewise) and values go into the paged cache.

    qkv                 [T, (Hq + 2 Hkv) * D], fp16, bf16 or fp32: query heads, key heads, value heads. Rows may be strided.
                        Or fp32 [parts, T, (Hq + 2 Hkv) * D], contiguous: what is to be added up to them. Or a product of a
                        factored norm, whose rows' factors are still to be applied
    q_weight, k_weight  [D], of the RMSNorm of each head
    angles              [max_positions, D] fp32: the cosines of D/2 angles, then their sines
    positions           [T] int32 or int64, each 0 .. max_positions - 1
    slots               [T] int64: page * S + offset in the page, no two alike; -1: written nowhere
    keys, values        [P, Hkv, S, D], contiguous, of qkv's dtype, or of parts any of the three; written in place
    with_keys           the result is [T, Hq + Hkv, D]: the new keys behind the queries

    D is a power of two from 16 to 256, S any. Computed in fp32, rounded once. No host reads a position or slot: those
    out of range are not refused. No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    norm = qkv if isinstance(qkv, FactoredNorm) else None
    qkv = norm.scaled if norm else qkv
    check_projected("qk_norm_rope", qkv, q_weight, k_weight, angles, keys, values, tokens="T")
    tokens = qkv.shape[-2]
    for name, x, shape, dtypes in (
        ("positions", positions, (tokens,), (torch.int32, torch.int64)),
        ("slots", slots, (tokens,), (torch.int64,)),
    ):
        check_like("qk_norm_rope", name, x, qkv.device, dtypes)
        check_shape("qk_norm_rope", name, x, shape)
    check_scalar("qk_norm_rope", "eps", eps)
    check_flag("qk_norm_rope", "with_keys", with_keys)
    squares, norm_eps = None, 0.0
    if norm is not None:
        check_squares("qk_norm_rope", norm, qkv)
        squares, norm_eps = norm.squares, norm.eps
    return torch.ops.weft.qk_norm_rope.default(
        qkv, squares, norm_eps, q_weight, k_weight, eps, angles, positions, slots, keys, values, with_keys
    )


def check_projected(
    op: str, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, angles: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, *, tokens: str,
) -> None:  # fmt: skip
    """ValueError unless qkv [``tokens``, ...] is of the heads of that cache, whole or in parts, and the others fit them."""
    check_is_tensor(op, "qkv", qkv)
    in_parts = qkv.dim() == 3
    check_like(op, "qkv", qkv, None, (torch.float32,) if in_parts else FLOATS)
    check_like(op, "keys", keys, qkv.device, FLOATS)
    check_cache(op, keys, values, keys if in_parts else qkv)
    _, kv_heads, _, D = keys.shape
    width = qkv.shape[-1] if qkv.dim() in (2, 3) else -1
    if width % D != 0 or width <= 2 * kv_heads * D or 0 in qkv.shape[:-2]:
        raise ValueError(
            f"{op}: qkv has shape {tuple(qkv.shape)}; with keys of {tuple(keys.shape)} it must be "
            f"[{tokens}, (Hq + {2 * kv_heads}) * {D}], or 1 or more parts of that"
        )
    for name, x, shape, dtypes in (
        ("q_weight", q_weight, (D,), (keys.dtype,)),
        ("k_weight", k_weight, (D,), (keys.dtype,)),
        ("angles", angles, ("max_positions", D), (torch.float32,)),
    ):
        check_like(op, name, x, qkv.device, dtypes)
        check_shape(op, name, x, shape)


def check_cache(op: str, keys: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> None:
    """ValueError unless keys and values are a paged cache of the dtype and device of ``like``."""
    for name, x in (("keys", keys), ("values", values)):
        check_like(op, name, x, like.device, (like.dtype,))
        check_shape(op, name, x, ("pages", "kv_heads", "page_size", "head_dim") if name == "keys" else keys.shape)
        if 0 in x.shape[:3] or x.shape[3] not in HEAD_DIMS:
            raise ValueError(
                f"{op}: {name} has shape {tuple(x.shape)}; a cache has at least one page, head and slot, and a head_dim of "
                f"{', '.join(map(str, HEAD_DIMS))}"
            )
        if not x.is_contiguous():
            raise ValueError(
                f"{op}: {name} has strides {x.stride()}; a cache is used in place, so it must be contiguous"
            )


@custom_op("qk_norm_rope", mutates_args=("keys", "values"), backward=False)
def _qk_norm_rope(
    qkv: torch.Tensor, squares: torch.Tensor | None, norm_eps: float, q_weight: torch.Tensor, k_weight: torch.Tensor,
    eps: float, angles: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, with_keys: bool,
) -> torch.Tensor:  # fmt: skip
    _, kv_heads, page, D = keys.shape
    tokens, heads = qkv.shape[-2], qkv.shape[-1] // D
    kept = heads - (1 if with_keys else 2) * kv_heads
    q = torch.empty((tokens, kept, D), dtype=keys.dtype, device=qkv.device)
    if tokens > 0:
        parts = qkv.shape[0] if qkv.dim() == 3 else 1
        qkv = qkv.contiguous() if qkv.dim() == 3 else rows_contiguous(qkv)
        rows = TILE // D
        qk_norm_rope_kernel[(cdiv(tokens * heads, rows),)](
            qkv, qkv.stride(-2), tokens * heads * D, qkv if squares is None else squares.contiguous(), norm_eps,
            q_weight.contiguous(), k_weight.contiguous(), eps,
            angles.contiguous(), positions.contiguous(), slots.contiguous(), q, keys, values, tokens * heads,
            Q_HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, PAGE=page, D=D, ROWS=rows, PARTS=parts, KEPT=kept,
            SQUARES=0 if squares is None else squares.shape[1],
            **launch_options(capabilities_of(q.device)),
        )  # fmt: skip
    return q


@_qk_norm_rope.register_fake
def _(qkv, squares, norm_eps, q_weight, k_weight, eps, angles, positions, slots, keys, values, with_keys):
    _, kv_heads, _, D = keys.shape
    return keys.new_empty((qkv.shape[-2], qkv.shape[-1] // D - (1 if with_keys else 2) * kv_heads, D))

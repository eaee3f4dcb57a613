"""qk_norm_rope: head norms and rotation of projected tokens, and the write of new keys and values.

x = (sum of split-K partials) * deferred RMS scale + bias               x: a head, [D], in fp32
n = x / sqrt(mean(x^2) + eps) * weight                                  without weights n = x
(a, b) = halves of n;  rotated = (a cos - b sin, b cos + a sin)         the half-split order of Hugging Face checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.deferred_norm import DeferredNorm, check_scales, rms_scale
from weft.kernels.fp8 import E4M3
from weft.kernels.paged_cache import CacheSizes, PagedCache, as_bytes, cell_of
from weft.kernels.projected import Projected
from weft.kernels.rms_norm import inverse_rms, squares_of
from weft.kernels.rotary import HeadNorms, load_bias, norm_and_rotate
from weft.ops.attention import cases
from weft.ops.attention.fp8_cache import cache_of
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like, norm_dtypes
from weft.ops.op import INVARIANT, Op, register
from weft.ops.registration import FLOATS, HALVES, check_flag, check_is_tensor, check_scalar
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

HEAD_DIMS = (16, 32, 64, 128, 256)
# Elements of a program's tile: 16 a thread of 4 warps, so that half a head of bf16 is loaded 16 bytes at a time.
TILE = 2048


@triton.jit
def store_halves(target, low, high, mask):
    """Store both halves of heads, rounded to the dtype of ``target``, pointers to the first halves."""
    HALF: tl.constexpr = low.shape[1]
    tl.store(target, low.to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, high.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def qk_norm_rope_kernel(
    projected,
    norms,
    angles,
    positions,
    slots,
    q,
    cache,
    rows,
    SIZES: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    QKV: tl.constexpr,
    INVARIANT: tl.constexpr = False,
):
    """Head h of token t is row t * (Q_HEADS + 2 kv_heads) + h of the work.    grid: (cdiv(rows, ROWS),)

    projected  ``Projected``, and QKV its ``ProjectedSizes``; norms: ``HeadNorms``; cache, SIZES: ``PagedCache`` and its
               ``CacheSizes``
    queries    q[t, h, :] = rotated(n) by positions[t], with q_weight. q has KEPT heads: these, or also the keys after them, or
               also the values
    keys       key_pages[page, h, offset, :] = rotated(n), with k_weight, where slots[t] = page * page_size + offset
    values     value_pages[page, h, offset, :] = x of the value, rounded. Of an fp8 cache both are ``as_bytes``
    slots[t] = -1: neither key nor value is written. No two tokens of a call share a slot.
    INVARIANT  the sum of the partials is rounded to q's dtype first, and squares are added in pairs (weft.kernels.rms_norm);
               compiled without contraction: so partials and their sum give one and the same head
    """
    D: tl.constexpr = SIZES.dim
    HALF: tl.constexpr = D // 2
    KV_HEADS: tl.constexpr = SIZES.heads
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    PARTIALS: tl.constexpr = QKV.partials
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    token, head = row // HEADS, row % HEADS
    is_query, is_value = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    turns = exists & (head < Q_HEADS + KV_HEADS)
    column = tl.arange(0, HALF)[None, :]
    wl.follow_previous_kernel()
    position = tl.load(positions + token, mask=turns, other=0).to(tl.int64)
    slot = tl.load(slots + token, mask=exists & (head >= Q_HEADS), other=-1)
    source = projected.qkv + (token.to(tl.int64) * projected.stride + head * D)[:, None] + column
    low = tl.load(source, mask=exists[:, None], other=0.0)
    high = tl.load(source + HALF, mask=exists[:, None], other=0.0)
    for part in tl.static_range(1, PARTIALS):
        summand = source + part * tl.cast(projected.partial_stride, tl.int64)
        low += tl.load(summand, mask=exists[:, None], other=0.0)
        high += tl.load(summand + HALF, mask=exists[:, None], other=0.0)
    if INVARIANT:
        low, high = low.to(q.dtype.element_ty), high.to(q.dtype.element_ty)
    if norms.q_weight is not None:
        q_weight, k_weight = norms.q_weight + column, norms.k_weight + column
        low_weight = tl.where(is_query[:, None], tl.load(q_weight), tl.load(k_weight)).to(tl.float32)
        high_weight = tl.where(is_query[:, None], tl.load(q_weight + HALF), tl.load(k_weight + HALF)).to(tl.float32)
    angle = angles + (position * D)[:, None] + column
    cos = tl.load(angle, mask=turns[:, None], other=0.0)
    sin = tl.load(angle + HALF, mask=turns[:, None], other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if QKV.squares > 0:
        factor = rms_scale(projected.squares, token, exists, projected.eps, QKV.squares)[:, None]
        a, b = a * factor, b * factor
        low, high = a, b
    if projected.bias is not None:
        at = (head * D)[:, None] + column
        a += load_bias(projected, at, exists[:, None])
        b += load_bias(projected, at + HALF, exists[:, None])
        low, high = a, b
    dtype: tl.constexpr = q.dtype.element_ty
    if norms.q_weight is not None:
        squares = squares_of(a, INVARIANT) + squares_of(b, INVARIANT)
        scale = inverse_rms(squares, norms.eps, D, INVARIANT)[:, None]
        turned_low = norm_and_rotate(a, b, scale, low_weight, high_weight, cos, sin * -1.0).to(dtype)
        turned_high = norm_and_rotate(b, a, scale, high_weight, low_weight, cos, sin).to(dtype)
    else:
        turned_low, turned_high = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    if KEPT == HEADS:
        turned_low = tl.where(is_value[:, None], low.to(dtype), turned_low)
        turned_high = tl.where(is_value[:, None], high.to(dtype), turned_high)

    target = q + ((token * KEPT + head).to(tl.int64) * D)[:, None] + column
    store_halves(target, turned_low, turned_high, (exists & (head < KEPT))[:, None])
    kv_head = (head - Q_HEADS) % KV_HEADS
    cell = cell_of(slot // SIZES.page, kv_head, slot % SIZES.page, SIZES)[:, None] + column
    if cache.k_scale is not None:
        turned_low, turned_high = (
            as_bytes(turned_low, cache.k_scale, dtype),
            as_bytes(turned_high, cache.k_scale, dtype),
        )
        low, high = as_bytes(low, cache.v_scale, dtype), as_bytes(high, cache.v_scale, dtype)
    store_halves(cache.key_pages + cell, turned_low, turned_high, (turns & (head >= Q_HEADS) & (slot >= 0))[:, None])
    store_halves(cache.value_pages + cell, low, high, (exists & is_value & (slot >= 0))[:, None])


def qk_norm_rope(
    qkv: torch.Tensor | DeferredNorm,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    with_keys: bool = False,
    bias: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """Normalised and rotated queries [T, Hq, D]; such keys and the new values go into the paged cache.

    qkv                 [T, (Hq + 2 Hkv) * D], fp16, bf16 or fp32: query heads, key heads, value heads. Rows may be strided.
                        Or fp32 [partials, T, (Hq + 2 Hkv) * D], contiguous: its split-K partials. Or a ``DeferredNorm``, whose
                        RMS scale is applied here
    q_weight, k_weight  [D], of the RMSNorm of each head, with ``eps``, of the result's dtype or fp32; both None: heads are not
                        normalised
    angles              [max_positions, D] fp32: the cosines of D/2 angles, then their sines
    positions           [T] int32 or int64, each 0 .. max_positions - 1
    slots               [T] int64: page * S + offset in the page, no two alike; -1: not written, for padding, and for tokens of
                        a sharded cache that another rank holds
    keys, values        [P, Hkv, S, D], contiguous, of qkv's dtype, or for partials any of the three, or e4m3; written in place
    with_keys           the result has the new keys after the queries, [T, Hq + Hkv, D]. With a bias, where the new values are
                        no columns of qkv, it has them too, last: [T, Hq + 2 Hkv, D]
    bias                [(Hq + 2 Hkv) * D], of the cache's dtype, added to qkv after the sum of partials and the RMS scale;
                        None: there is none
    k_scale, v_scale    of a cache in e4m3: fp32, 1 element each, on the device, positive. Written are keys and values of the
                        result's dtype over the scale, saturated at 448 and rounded to the nearest even
    invariant           partials, as ``matmul_column_nodes`` leaves them, give the bits of their sum, as
                        ``matmul(invariant=True)`` rounds it. For results of 16 bits, without a ``DeferredNorm``

    The result is of the cache's dtype; with a cache in e4m3 of qkv's, or for partials of the weights' or the bias's, which are
    of 16 bits.

    D is a power of two from 16 to 256, S any. Computed in fp32, rounded once; a token's bits depend on the token alone. The
    host reads no positions or slots: values out of range are not refused. No backward. ValueError for shapes, dtypes or devices
    that do not fit.
    """
    op, norms, cache = "qk_norm_rope", HeadNorms(q_weight, k_weight, eps), PagedCache(keys, values, k_scale, v_scale)
    rows, squares, norm_eps = parts_of(qkv)
    check_projected(op, rows, norms, angles, cache, bias, tokens="T")
    tokens = rows.shape[-2]
    for name, x, shape, dtypes in (
        ("positions", positions, (tokens,), (torch.int32, torch.int64)),
        ("slots", slots, (tokens,), (torch.int64,)),
    ):
        check_like(op, name, x, rows.device, dtypes, shape)
    check_scalar(op, "eps", eps)
    check_flag(op, "with_keys", with_keys)
    check_flag(op, "invariant", invariant)
    if invariant and (squares is not None or heads_dtype(rows, keys, q_weight, bias) not in HALVES):
        kind = "a deferred RMS scale" if squares is not None else f"heads of {heads_dtype(rows, keys, q_weight, bias)}"
        raise ValueError(f"{op}: invariant=True with {kind}; pass rows or partials for heads of bfloat16 or float16")
    if squares is not None:
        check_scales(op, qkv.operand, rows)
    places = angles, positions, slots, keys, values
    given = NormRopeArguments(rows, squares, norm_eps, norms, *places, with_keys, bias, k_scale, v_scale, invariant)
    return QK_NORM_ROPE.dispatch(given)


class NormRopeArguments(NamedTuple):
    """Arguments of qk_norm_rope.

    squares, norm_eps  of a ``DeferredNorm`` of qkv; None: qkv has no such scale
    """

    qkv: torch.Tensor
    squares: torch.Tensor | None
    norm_eps: float
    norms: HeadNorms
    angles: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    with_keys: bool
    bias: torch.Tensor | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    invariant: bool = False


def parts_of(qkv: torch.Tensor | DeferredNorm) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """(rows, squares, eps) of a ``DeferredNorm``, without squares of a tensor."""
    return (qkv.scaled, qkv.squares, qkv.eps) if isinstance(qkv, DeferredNorm) else (qkv, None, 0.0)


def _check_both(op: str, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None) -> None:
    if (q_weight is None) != (k_weight is None):
        missing, given = ("q_weight", "k_weight") if q_weight is None else ("k_weight", "q_weight")
        raise ValueError(
            f"{op}: {missing} is None and {given} is not; pass both, or None for both: heads without norms"
        )


def check_projected(
    op: str,
    qkv: torch.Tensor,
    norms: HeadNorms,
    angles: torch.Tensor,
    cache: PagedCache,
    bias: torch.Tensor | None,
    *,
    tokens: str,
) -> None:
    """ValueError unless qkv [``tokens``, ...] or its partials and the other tensors fit the cache."""
    (q_weight, k_weight, _), (keys, values, k_scale, v_scale) = norms, cache
    check_is_tensor(op, "qkv", qkv)
    in_partials = qkv.dim() == 3
    check_like(op, "qkv", qkv, None, (torch.float32,) if in_partials else FLOATS)
    check_like(op, "keys", keys, qkv.device, (*FLOATS, E4M3))
    check_cache(op, keys, values, keys if in_partials else qkv, k_scale, v_scale)
    _, kv_heads, _, D = keys.shape
    width = qkv.shape[-1] if qkv.dim() in (2, 3) else -1
    if width % D != 0 or width <= 2 * kv_heads * D or 0 in qkv.shape[:-2]:
        raise ValueError(
            f"{op}: qkv has shape {tuple(qkv.shape)}; with keys of {tuple(keys.shape)} it must be "
            f"[{tokens}, (Hq + {2 * kv_heads}) * {D}], or 1 or more partials of that"
        )
    _check_both(op, q_weight, k_weight)
    dtype = heads_dtype(qkv, keys, q_weight, bias)
    if k_scale is not None and dtype not in HALVES:
        raise ValueError(
            f"{op}: keys of {keys.dtype} with heads of {dtype}; an fp8 cache is for qkv of 16 bits, or for partials "
            f"with weights or a bias of 16 bits"
        )
    weights = () if q_weight is None else (("q_weight", q_weight, D), ("k_weight", k_weight, D))
    vectors = weights if bias is None else (*weights, ("bias", bias, width))
    for name, x, shape, dtypes in (
        *((name, x, (size,), (dtype,) if name == "bias" else norm_dtypes(dtype)) for name, x, size in vectors),
        ("angles", angles, ("max_positions", D), (torch.float32,)),
    ):
        check_like(op, name, x, qkv.device, dtypes, shape)


def heads_dtype(
    qkv: torch.Tensor, keys: torch.Tensor, q_weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.dtype:
    """Dtype of heads: the cache's; with an fp8 cache qkv's, or for partials the weights' or the bias's."""
    if keys.dtype != E4M3:
        return keys.dtype
    like = next((x for x in (q_weight, bias) if x is not None and qkv.dim() == 3 and x.itemsize == 2), qkv)
    return like.dtype


def check_head_dim(head_dim: int, remedy: str = "") -> None:
    """ValueError unless the kernels of this family take heads of ``head_dim`` elements."""
    if head_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"head_dim={head_dim}: fused kernels take one of {allowed}{remedy}")


def check_cache(
    op: str,
    keys: torch.Tensor,
    values: torch.Tensor,
    like: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """ValueError unless keys and values are a paged cache on the device of ``like``.

    Of its dtype, or with scales in e4m3.
    """
    scaled = k_scale is not None or v_scale is not None
    dtypes = (E4M3,) if scaled else (like.dtype,)
    for name, x in (("keys", keys), ("values", values)):
        shape = ("pages", "kv_heads", "page_size", "head_dim") if name == "keys" else keys.shape
        check_like(op, name, x, like.device, dtypes, shape)
        if 0 in x.shape[:3] or x.shape[3] not in HEAD_DIMS:
            raise ValueError(
                f"{op}: {name} has shape {tuple(x.shape)}; a cache has at least one page, head and slot, and a head_dim of "
                f"{', '.join(map(str, HEAD_DIMS))}"
            )
        check_contiguous(op, name, x)
    if scaled:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is None:
                raise ValueError(f"{op}: {name} is None and the other scale is not; pass both, or None for both")
            check_like(op, name, scale, like.device, (torch.float32,))
            if scale.numel() != 1:
                raise ValueError(
                    f"{op}: {name} has shape {tuple(scale.shape)}; a layer has one scale of keys and one of values"
                )


class QKNormRope(Op):
    name, alias = "qk_norm_rope", "qk-norm-rope"
    bits = INVARIANT
    no_plan = "one kernel; a program takes as many heads as its registers hold"
    mutates = ("keys", "values")

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """positions, slots, the cache, the projection and its norms."""
        (_, heads, D, page), tokens = case.sizes, case.field("tokens")
        pages, generator = tokens // page + 3, torch.Generator().manual_seed(tokens)
        dtype = torch.int64 if case.field("strided") else torch.int32
        positions = torch.randint(50, (tokens,), generator=generator).to(draw.device, dtype)
        slots = torch.randperm(pages * page, generator=generator)[:tokens].to(draw.device)
        slots[list(case.field("padded") or ())] = -1
        cache = (draw.own(name, (pages, heads, page, D)) for name in ("keys", "values"))
        return positions, slots, *cache, *cases.draw_projection(draw, tokens)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(queries, keys, values)"""
        positions, slots, keys, values, *projection = by_rank[rank]
        q, k, v = cases.Projection.of(case, *projection).heads(positions)
        written = slots >= 0
        page, offset = slots[written] // case.sizes[3], slots[written] % case.sizes[3]
        keys, values = keys.double(), values.double()
        keys[page, :, offset], values[page, :, offset] = k[written], v[written]
        given = (q, k, v) if case.field("bias") else (q, k)
        return torch.cat(given, dim=1) if case.field("with_keys") else q, keys, values

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[2])

    def call(self, case: Case, team: None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(queries, keys, values)"""
        positions, slots, keys, values, *projection = tensors
        given, places = cases.Projection.of(case, *projection), (positions, slots, keys, values)
        with_keys, invariant = bool(case.field("with_keys")), bool(case.field("invariant"))
        q = qk_norm_rope(given.qkv, *given.norms, given.angles, *places, with_keys, given.bias, invariant=invariant)
        return q, keys, values

    def cases(self) -> Iterator[Case]:
        for heads in cases.HEADS:
            for fields in (
                {"tokens": 1},
                {"tokens": 7, "padded": (0, 5), "strided": True},
                {"tokens": 33, "padded": (32,), "with_keys": True},
                {"tokens": 1, "padded": (0,), "partials": 1},
                {"tokens": 5, "padded": (0,), "partials": 2},
                {"tokens": 33, "padded": (0,), "partials": 7},
                {"tokens": 1, "padded": (0,), "squares": 1},
                {"tokens": 5, "padded": (0,), "squares": 20, "with_keys": True},
                {"tokens": 33, "padded": (0,), "squares": 3},
            ):
                yield cases.case_of(self.name, heads, **fields)
        for heads, fields in (
            (cases.QWEN, {"norms": False}),
            (cases.QWEN, {"wide_norm": True}),
            (cases.SMALL, {"wide_norm": True, "partials": 3}),
            (cases.QWEN, {"bias": True, "with_keys": True, "strided": True}),
            (cases.SMALL, {"norms": False, "with_keys": True}),
            (cases.SMALL, {"norms": False, "bias": True, "partials": 3, "with_keys": True}),
            (cases.HEADS[3], {"norms": False, "bias": True, "squares": 20}),
            (cases.HEADS[5], {"bias": True, "squares": 3, "with_keys": True}),
            (cases.QWEN, {"partials": 2, "invariant": True}),
            (cases.HEADS[3], {"bias": True, "with_keys": True, "invariant": True}),
        ):
            yield cases.case_of(self.name, heads, tokens=9, padded=(2,), **fields)
        for fields in ({"tokens": 5, "padded": tuple(range(5))}, {"tokens": 0}):
            yield cases.case_of(self.name, cases.QWEN, **fields)

    def large_cases(self) -> Iterator[Case]:
        for fields in ({}, {"norms": False, "bias": True, "with_keys": True}):
            yield cases.case_of(self.name, cases.QWEN, tokens=4096, padded=tuple(range(4000, 4096)), **fields)

    def forward(self, given: NormRopeArguments) -> torch.Tensor:
        qkv, squares, bias, keys = given.qkv, given.squares, given.bias, given.keys
        sizes, q = CacheSizes.of(keys), self.fake(given)
        cache = cache_of(self.name, keys, given.values, given.k_scale, given.v_scale)
        (tokens, kept, _), heads = q.shape, qkv.shape[-1] // sizes.dim
        if tokens > 0:
            rows, caps = TILE // sizes.dim, capabilities_of(q.device)
            rows_of = qkv if squares is None else DeferredNorm(qkv, squares, given.norm_eps)
            projected, qkv_sizes = Projected.of(rows_of, bias)

            def constants() -> dict[str, Any]:
                own = {"SIZES": sizes, "Q_HEADS": heads - 2 * sizes.heads, "KEPT": kept, "ROWS": rows, "QKV": qkv_sizes}
                more = {"INVARIANT": True, "enable_fp_fusion": False} if given.invariant else {}
                return {**own, **more, **launch_options(caps)}

            of_kernel = sizes, heads, kept, qkv_sizes, given.invariant
            launch = launch_on(q.device, qk_norm_rope_kernel, of_kernel, constants)
            launch(
                cdiv(tokens * heads, rows),
                projected,
                given.norms.contiguous(),
                given.angles.contiguous(),
                given.positions.contiguous(),
                given.slots.contiguous(),
                q,
                cache,
                tokens * heads,
            )
        return q

    def fake(self, given: NormRopeArguments) -> torch.Tensor:
        qkv, keys, bias = given.qkv, given.keys, given.bias
        _, kv_heads, _, D = keys.shape
        left_out = 2 if not given.with_keys else 1 if bias is None else 0
        shape = qkv.shape[-2], qkv.shape[-1] // D - left_out * kv_heads, D
        return keys.new_empty(shape, dtype=heads_dtype(qkv, keys, given.norms.q_weight, bias))


QK_NORM_ROPE = register(QKNormRope())

"""decode_attention: qk_norm_rope and paged_attention in one kernel, for a decode step.

The queries of a KV head are few, so each program normalises and rotates the ones that it attends for. The new key and value are
computed, and written into the cache, by the program whose split-KV partial they belong to. So programs wait for each other only
to join partials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.deferred_norm import DeferredNorm, check_scales, rms_scale
from weft.kernels.fp8 import COLUMNS, Fp8, RowFormat, check_e4m3, empty_rows, fp8_of, quantized_parts, rows_argument
from weft.kernels.online_softmax import ScoreRule, attend, sinks_at, ways
from weft.kernels.paged_cache import PagedCache, Sequences, as_values, cell_of, pages_at, scale_of_scores, write_token
from weft.kernels.partial_sums import sum_of_partials
from weft.kernels.projected import Projected
from weft.kernels.rotary import HeadNorms, load_bias, load_heads, load_rotation, norm_and_rotate_heads
from weft.kernels.split_kv import HeadGates, first_block, split_count, store_or_join
from weft.ops.attention import cases
from weft.ops.attention.attention_op import (
    check_heads,
    check_scores,
    check_sequences,
    hiding,
    writes_heads,
)
from weft.ops.attention.decoding import SPLIT_KV_BITS, DecodingOp, SplitKV, check_tickets, launch_of
from weft.ops.attention.fp8_cache import cache_of
from weft.ops.attention.qk_norm_rope import check_projected, heads_dtype, parts_of
from weft.ops.case import BF16, Case, Draw, Inputs, agreed, format_of, lay_out
from weft.ops.local import capabilities_of, check_dtype, check_like, check_row_format
from weft.ops.op import Op, define, register
from weft.ops.registration import check_scalar
from weft.runtime.team.team import Team

# Forms in which a case may have its projection.
KINDS = ({"partials": 1}, {"partials": 3}, {"squares": 20}, {"strided": True})


@triton.jit
def prefetch(ptr, count):
    """Prefetch ``count`` elements from ``ptr`` on into the L2; none if it is not positive."""
    nbytes = tl.maximum(count, 0) * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    wl.prefetch(ptr + tl.arange(0, 1), nbytes + tl.zeros([1], tl.int32))


@triton.jit(do_not_specialize=["max_pages"])
def decode_attention_kernel(
    projected,
    norms,
    angles,
    cache,
    sequences,
    out,
    partials,
    max_pages,
    scores,
    fp8,
    gate,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    QKV: tl.constexpr,
):
    """out[b, h, :] = softmax(scores of q[b, h, :] . keys of b) @ values of b    grid: (B * heads, splits)

    ``paged_attention_kernel``, where q and the last key and value of sequence b come from its new token, projected[b].

    projected, QKV  ``Projected`` and its ``ProjectedSizes``; norms: ``HeadNorms``; the rest as for ``paged_attention_kernel``
    position        lengths[b] - 1: row of ``angles``, and the cell of the cache that the program of this token's partial writes
                    before it attends. lengths[b] = 0: nothing is written
    fp8             ``Fp8Rows`` of ``out`` as rows [B, heads * group * D]; else None
    gate            ``HeadGates``, by whose sigmoids ``out`` is multiplied; else None
    signals, waits  none: each cell is written and read by one program; partials as in ``paged_attention_kernel``
    """
    D: tl.constexpr = SIZES.dim
    PAGE: tl.constexpr = SIZES.page
    if fp8 is None:
        dtype: tl.constexpr = out.dtype.element_ty
    else:
        dtype: tl.constexpr = fp8.dtype
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = pair // SIZES.heads, pair % SIZES.heads
    row, column = tl.arange(0, TILE.rows), tl.arange(0, D)[None, :]
    table = sequences.pages + sequence.to(tl.int64) * max_pages
    first = split * TILE.block_n
    wl.follow_previous_kernel()
    # All loads at once; pages beyond the length are loaded and not used. With a window the length decides the first page.
    length = tl.load(sequences.lengths + sequence)
    begin = first_block(tl.minimum(length, max_pages * PAGE), TILE)
    first += begin
    page = pages_at(table, first, max_pages * PAGE, ways(TILE.block_n, TILE.ways), PAGE)
    token = projected.qkv + sequence.to(tl.int64) * projected.stride
    q_at = ((head * TILE.group + row) * D)[:, None]
    q_heads = token + q_at
    k_at = (SIZES.heads * TILE.group + head) * D
    k_head = token + k_at
    queries = load_heads(projected, q_heads, q_at, (row < TILE.group)[:, None], norms.q_weight, D, QKV.partials)
    # The new key and value are loaded by all programs, so that the one that writes them waits for memory only once.
    new_key = load_heads(projected, k_head, k_at, column >= 0, norms.k_weight, D, QKV.partials)
    value = sum_of_partials(k_head + SIZES.heads * D + column, column >= 0, projected.partial_stride, QKV.partials)
    factor = tl.full((1,), 1.0, tl.float32)
    if QKV.squares > 0:
        this = sequence + tl.arange(0, 1)
        factor = rms_scale(projected.squares, this, tl.arange(0, 1) == 0, projected.eps, QKV.squares)
    length = tl.minimum(length, max_pages * PAGE)
    count = split_count(length, splits, TILE)
    if TILE.block_n <= PAGE:
        # Prefetched before the queries are computed, which takes as long as the first keys need. More than one block costs
        # more than it saves: 128 x 128 tokens on 2 KV heads of an H200 take 8.8 us with one and 10.3 with two.
        cell = cell_of(page, head, first % PAGE, SIZES)
        prefetch(cache.key_pages + cell, tl.minimum(length - first, TILE.block_n) * D)
        prefetch(cache.value_pages + cell, tl.minimum(length - first, TILE.block_n) * D)
    if split < count:
        last = tl.maximum(length - 1, 0)
        page_of_last = tl.load(table + last // PAGE, mask=length > 0, other=0)
        rotation = load_rotation(angles, last, D)
        by = factor[:, None]
        x = norm_and_rotate_heads(queries, by, projected, norms, rotation, D).to(dtype)
        if ((last - begin) // TILE.block_n % count == split) & (length > 0):
            key = norm_and_rotate_heads(new_key, by, projected, norms, rotation, D)
            new_cell, new_value = cell_of(page_of_last, head, last % PAGE, SIZES), value * by
            if projected.bias is not None:
                new_value += load_bias(projected, k_at + SIZES.heads * D + column, column >= 0)
            write_token(cache, new_cell, key, new_value, D, dtype)
        scale, inner, sink = scores.scale, scores.inner, None
        if inner is None:
            scale = scale_of_scores(scale, cache)
        else:
            inner = scale_of_scores(inner, cache)
        if scores.sinks is not None:
            sink = sinks_at(scores.sinks, head * TILE.group + row, (row < TILE.group) & (split == 0))
        step = count * TILE.block_n
        mean, log_sum = attend(
            x, cache, table, page, head, first, length, step, scale, SIZES, TILE, None, None, inner, sink
        )
        gate_of_pair = None
        if gate is not None:
            gate_of_pair = gate.rows + sequence.to(tl.int64) * gate.stride + head * (TILE.group * D)
        mean = as_values(mean, cache)
        store_or_join(mean, log_sum, count, out, partials, fp8, SIZES.heads, TILE, None, gate_of_pair)


def decode_attention(
    qkv: torch.Tensor | DeferredNorm,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    angles: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    tickets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    fp8: RowFormat | None = None,
) -> torch.Tensor | Fp8:
    """Attention [B, Hq, D] of each sequence's new token to all its tokens, itself included.

    Its key and value are written into the paged cache first.

    qkv                 [B, (Hq + 2 Hkv) * D], fp16, bf16 or fp32: query heads, key heads, value heads. Rows may be strided. Or
                        its split-K partials, fp32 and contiguous, or a ``DeferredNorm``, whose RMS scale is applied here
    q_weight, k_weight  [D], of the RMSNorm of each head, with ``eps``; both None: heads are not normalised
    angles              [max_positions, D] fp32: the cosines of D/2 angles, then their sines
    keys, values        [P, Hkv, S, D], contiguous, of one dtype, which is qkv's unless that is in partials, or e4m3; written in
                        place
    pages               [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths             [B] int32: tokens to attend to, up to and with the new one; at most max_pages * S and
                        max_positions. 0, a padding row: nothing is written, and its result is zeros
    scale               of the scores; D ** -0.5 where None
    tickets             arrival counters: int32 zeros, B * Hkv or more, left as zeros, so calls of one stream may share them.
                        None: each call makes new ones, which takes one more small kernel
    bias                [(Hq + 2 Hkv) * D], of the cache's dtype, added to qkv after the sum of partials and the RMS scale;
                        None: there is none
    window              a token attends to this many tokens, itself the last, 1 or more; None: to all
    k_scale, v_scale    of a cache in e4m3: fp32, 1 element each, on the device, positive; a key is its byte times k_scale, a
                        value its byte times v_scale. The result is then of qkv's dtype, or for partials of the weights' or
                        the bias's
    softcap             positive; softcap * tanh(score / softcap) in place of a score, after ``scale``
    sinks               [Hq], fp16, bf16 or fp32: one more score of each row, without a value
    gate                [B, Hq * D] of the result's dtype, columns of a wider tensor or not: the rounded result is multiplied
                        by its sigmoid, as by ``sigmoid_mul``. None: there are no gates
    fp8                 rows [B, Hq * D] of the result are put in fp8 so, after they are rounded to 16 bits; ``row_format`` of
                        the weight that follows. By a kernel more with a scale for each token, and where groups of 128 columns
                        do not end with the heads of a KV head (``writes_heads``)

    Equals ``qk_norm_rope`` then ``paged_attention``, except for fp32 roundings. D and S are powers of two from 16 to 256.
    No two sequences of a call share the page of their new tokens. Results are the same bits from run to run. The host reads no
    lengths or pages: values out of range are not refused. No backward. ValueError for shapes, dtypes, devices that do not fit.
    """
    op = "decode_attention"
    norms, cache = HeadNorms(q_weight, k_weight, eps), PagedCache(keys, values, k_scale, v_scale)
    rows, squares, norm_eps = parts_of(qkv)
    check_projected(op, rows, norms, angles, cache, bias, tokens="B")
    B, heads, D = rows.shape[-2], keys.shape[1], keys.shape[3]
    check_heads(op, rows.shape[-1] // D - 2 * heads, keys)
    sequences = Sequences(pages, lengths)
    check_sequences(op, sequences, B, rows.device)
    check_tickets(op, tickets, B * heads, rows.device)
    check_scalar(op, "eps", eps)
    check_scores(op, rows.shape[-1] // D - 2 * heads, rows.device, window, scale, softcap, sinks)
    if squares is not None:
        check_scales(op, qkv.operand, rows)
    if gate is not None:
        dtype = heads_dtype(rows, keys, q_weight, bias)
        check_like(op, "gate", gate, rows.device, (dtype,), (B, rows.shape[-1] - 2 * heads * D))
    places = angles, keys, values, sequences
    options = D**-0.5 if scale is None else scale, tickets, bias, window, k_scale, v_scale, softcap, sinks, gate
    check_row_format(op, fp8, rows.device)
    given = DecodeArguments(rows, squares, norm_eps, norms, *places, *options)
    if fp8 is None:
        return DECODE_ATTENTION.dispatch(given)
    check_dtype(op, DECODE_ATTENTION.dtype_of(given))
    return fp8_of(*_FP8.dispatch(given, fp8), fp8)


class DecodeArguments(NamedTuple):
    """Arguments of decode_attention.

    squares, norm_eps  of a ``DeferredNorm`` of qkv; None: qkv has no such scale
    """

    qkv: torch.Tensor
    squares: torch.Tensor | None
    norm_eps: float
    norms: HeadNorms
    angles: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sequences: Sequences
    scale: float
    tickets: torch.Tensor | None
    bias: torch.Tensor | None
    window: int | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    gate: torch.Tensor | None = None


class DecodeAttention(DecodingOp):
    name, alias = "decode_attention", "decode-attention"
    bits = SPLIT_KV_BITS
    mutates = ("keys", "values", "tickets")

    def sequences_of(self, pairs: int, tokens: int) -> dict[str, Any]:
        return {**super().sequences_of(pairs, tokens), "positions": tokens}

    def results(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        return self.call(case, team, *tensors)[0]

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """The cache, pages and lengths, the projection and its norms; cells of new tokens hold NaN."""
        lengths = case.field("lengths")
        seen = [(cases.first_seen(case, length), length - 1) for length in lengths]
        cache = cases.draw_cache(draw, lengths, seen, spare=case.field("spare") or 0)
        held = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
        drawn = *cache, held, *cases.draw_projection(draw, len(lengths))
        if not case.field("gate"):
            return drawn
        gate = draw.own("gate", (len(lengths), case.sizes[0] * case.sizes[2]), 3.0)
        return *drawn, lay_out(gate, "strided")

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(result, keys, values), from rounded queries, keys and values."""
        keys, values, pages, lengths, *projection = by_rank[rank]
        at, S = (lengths.long() - 1).clamp(min=0), case.sizes[3]
        given, gate = _projected(case, projection)
        new = given.heads(at)
        q, k, v = (x.to(case.dtype).double() for x in new)
        keys, values = keys.double(), values.double()
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for b, length in enumerate(case.field("lengths")):
            if length > 0:
                page, offset = pages[b, (length - 1) // S].long(), (length - 1) % S
                keys[page, :, offset], values[page, :, offset] = k[b], v[b]
                held = (cases.tokens_of(x, pages[b], length) for x in (keys, values))
                out[b] = cases.attended(
                    q[b : b + 1], *held, length - 1, case.field("window"), cases.scores_of(case, q)
                )[0]
        return out if gate is None else out * gate.double().sigmoid().view(out.shape), keys, values

    def call(self, case: Case, team: None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(result, keys, values)"""
        keys, values, pages, lengths, *projection = tensors
        given, gate = _projected(case, projection)
        options = {"bias": given.bias, "window": case.field("window"), "gate": gate, **cases.scores_of(case, keys)}
        if isinstance(case.design, str):
            places = given.angles, keys, values, pages, lengths
            return decode_attention(given.qkv, *given.norms, *places, **options), keys, values
        places = given.angles, keys, values, Sequences(pages, lengths), keys.shape[3] ** -0.5, None
        arguments = DecodeArguments(*parts_of(given.qkv), HeadNorms(*given.norms), *places, **options)
        out = self.run(case.design, None, arguments)
        if format := format_of(case, out):
            out = agreed(out.flatten(1), fp8_of(*self.run(case.design, None, arguments, format), format), format)
            out = out.view(len(lengths), -1, keys.shape[3])
        return out, keys, values

    def cases(self) -> Iterator[Case]:
        for case in cases.decoding_cases(self.name, SplitKV):
            if (longest := max(case.field("lengths"))) <= 513:
                yield replace(case, fields=(*case.fields, ("positions", longest + 1)))
        # Partials of 16 tokens, any of which may hold the new token.
        design = SplitKV(block_n=16, least=16, splits=8, num_warps=1)
        for kind in KINDS:
            yield cases.case_of(self.name, cases.QWEN, design, lengths=(0, 15, 16, 17, 33), positions=301, **kind)
            for lengths in ((0, 15, 16, 17, 33), (300, 0, 1)):
                yield cases.case_of(self.name, cases.SMALL, design, lengths=lengths, positions=301, **kind)
        for heads, kind in (
            (cases.QWEN, {"norms": False}),
            (cases.QWEN, {"wide_norm": True}),
            (cases.QWEN, {"bias": True, "partials": 3}),
            (cases.SMALL, {"norms": False, "bias": True}),
            (cases.HEADS[3], {"norms": False, "bias": True, "squares": 20, "window": 24}),
            (cases.SMALL, {"bias": True, "squares": 3, "window": 24}),
            (cases.QWEN, {"norms": False, "partials": 3, "window": 64}),
        ):
            yield cases.case_of(self.name, heads, design, lengths=(33, 0, 70), positions=71, **kind)
        for heads, kind in cases.IN_FP8:
            yield cases.case_of(self.name, heads, design, lengths=(33, 0, 5), positions=71, fp8_rows=kind)
        # Of partials that are joined and of one; rows of three heads, of which a tile has four.
        for heads, kind in (
            (cases.QWEN, {}),
            (cases.QWEN, {"fp8_rows": "group"}),
            (cases.SMALL, {"partials": 3, "window": 24}),
            (cases.HEADS[6], {}),
        ):
            yield cases.case_of(self.name, heads, design, lengths=(33, 0, 5), positions=71, gate=True, **kind)
        yield cases.case_of(self.name, cases.HEADS[6], lengths=(20,), positions=20, gate=True)

    def large_cases(self) -> Iterator[Case]:
        design = SplitKV(block_n=16, least=16, splits=8, num_warps=1)
        for kind in KINDS:
            yield cases.case_of(self.name, cases.QWEN, design, lengths=(300, 0, 1), positions=301, **kind)
        for batch, length in ((1, 128), (1, 20000), (32, 1024), (128, 129)):
            for kind in ({"partials": 3}, {"squares": 20}):
                lengths = cases.lengths_of(batch, length)
                yield cases.case_of(self.name, cases.QWEN, lengths=lengths, positions=length, **kind)
        for batch, length in ((1, 1024), (32, 1024), (128, 129)):  # a rank of two with Qwen3.6-27B
            lengths = cases.lengths_of(batch, length)
            yield cases.case_of(self.name, ((12, 2, 256, 64), BF16), lengths=lengths, positions=length, gate=True)
        options = {"norms": False, "bias": True, "squares": 20, "window": 4096}
        for batch, length in ((1, 20000), (32, 5000)):
            lengths = cases.lengths_of(batch, length)
            yield cases.case_of(self.name, cases.QWEN, lengths=lengths, positions=length, **options)

    def run(
        self, design: SplitKV, team: None, given: DecodeArguments, format: RowFormat | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``decode_attention`` of checked arguments; in a ``format`` of fp8 its rows and scales."""
        self.check_design(design)
        shape = B, q_heads, D = self.shape_of(given)
        if format is not None and not writes_heads(q_heads // given.keys.shape[1], D, format):
            rows = self.run(design, team, given).flatten(1)
            return quantized_parts(rows, format, capabilities_of(rows.device))
        dtype, fp8 = self.dtype_of(given), None
        if format is None:
            out = given.keys.new_empty(shape, dtype=dtype)
        else:
            rows, scales = empty_rows(given.qkv, B, q_heads * D, format)
            out, fp8 = rows.view(shape), rows_argument(scales, format, dtype, COLUMNS.value)
        norm = given.qkv if given.squares is None else DeferredNorm(given.qkv, given.squares, given.norm_eps)
        projected, qkv_sizes = Projected.of(norm, given.bias)
        sequences, tickets = given.sequences, given.tickets
        if len(out) > 0:
            cache = cache_of(self.name, given.keys, given.values, given.k_scale, given.v_scale)
            launch, grid, arguments = launch_of(
                decode_attention_kernel, design, out, cache, sequences, tickets, given.window, QKV=qkv_sizes
            )
            norms, angles = given.norms.contiguous(), given.angles.contiguous()
            scores = ScoreRule.of(given.scale, given.softcap, given.sinks)
            gate = None if given.gate is None else HeadGates.of(given.gate)
            launch(grid, projected, norms, angles, *arguments, scores, fp8, gate)
        return out if format is None else (rows, scales)

    def forward(self, given: DecodeArguments) -> torch.Tensor:
        return self.planned(given)

    def planned(
        self, given: DecodeArguments, format: RowFormat | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        keys, pages = given.keys, given.sequences.pages
        given = given._replace(window=hiding(given.window, keys, pages))
        return self.run(self.plan_of(keys, pages, given.window), None, given, format)

    def shape_of(self, given: DecodeArguments) -> tuple[int, int, int]:
        """Shape of the result, [B, Hq, D]."""
        _, heads, _, D = given.keys.shape
        return given.qkv.shape[-2], given.qkv.shape[-1] // D - 2 * heads, D

    def dtype_of(self, given: DecodeArguments) -> torch.dtype:
        """Dtype of the result, before it is put in fp8."""
        return heads_dtype(given.qkv, given.keys, given.norms.q_weight, given.bias)

    def fake(self, given: DecodeArguments) -> torch.Tensor:
        return given.keys.new_empty(self.shape_of(given), dtype=self.dtype_of(given))


class DecodeAttentionFp8(Op):
    """DecodeAttention with rows in fp8: a torch op by itself, since it has two results."""

    name = alias = "decode_attention_fp8"
    mutates = DecodeAttention.mutates

    def forward(self, given: DecodeArguments, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("decode_attention", capabilities_of(given.qkv.device))
        return DECODE_ATTENTION.planned(given, format)

    def fake(self, given, format):
        B, q_heads, D = DECODE_ATTENTION.shape_of(given)
        return empty_rows(given.qkv, B, q_heads * D, format)


def _projected(case: Case, drawn: Sequence[torch.Tensor]) -> tuple[cases.Projection, torch.Tensor | None]:
    """(projection of a case, its gates or None)"""
    *projection, gate = drawn if case.field("gate") else (*drawn, None)
    return cases.Projection.of(case, *projection), gate


DECODE_ATTENTION = register(DecodeAttention())
_FP8 = define(DecodeAttentionFp8())

"""paged_attention: attention of the newest tokens of each sequence to its tokens in a paged cache.

Split-KV decoding in one kernel. A program computes the query heads of one KV head (rows of one tile, so that each key is loaded
once for all heads) over one split-KV partial of one sequence. The last program of a sequence and KV head joins its partials.
The largest number of partials follows from shapes alone, so that a CUDA graph holds any lengths; the programs derive the number
of a sequence's partials from its length.

New tokens of one sequence are further rows of a program, up to MOST_ROWS, so that each key is loaded once for them all. More
than 16 rows are not divided over ways, since a warp would hold the sums of all: a partial is then a run of neighbouring blocks.

Device code: weft.kernels.online_softmax and weft.kernels.split_kv.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.online_softmax import MIN_ROWS, ScoreRule, attend, attend_many, sinks_at, ways
from weft.kernels.paged_cache import Sequences, as_values, pages_at, scale_of_scores
from weft.kernels.split_kv import first_block, rows_at, split_count, store_or_join
from weft.ops.attention import cases
from weft.ops.attention.attention_op import (
    check_heads,
    check_scale,
    check_scores,
    check_sequences,
    hiding,
)
from weft.ops.attention.decoding import SPLIT_KV_BITS, DecodingOp, SplitKV, check_tickets, launch_of
from weft.ops.attention.fixed_runs import Attended, FixedRuns, Rows, attend_in_runs
from weft.ops.attention.fp8_cache import cache_of, check_queries, quantized_cache, read_back
from weft.ops.attention.qk_norm_rope import check_cache
from weft.ops.case import BF16, Case, Draw, Inputs
from weft.ops.local import check_like, check_shape
from weft.ops.op import INVARIANT, register
from weft.ops.registration import FLOATS, check_flag
from weft.runtime.team.team import Team


@triton.jit(do_not_specialize=["max_pages"])
def paged_attention_kernel(
    q,
    cache,
    sequences,
    out,
    partials,
    max_pages,
    scores,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """out[b, h, :] = softmax(scores of q[b, h, :] . keys of b) @ values of b    grid: (B * heads, splits)

    Program (b * heads + g, i) computes split-KV partial i of sequence b for its query heads g * group .. (g + 1) * group - 1. A
    sequence has one partial for each of ``splits``, or fewer, so that each has about TILE.least tokens; programs beyond them
    end at once. Its steps of TILE.block_n tokens are dealt out in turn: where a program starts does not depend on the length.
    With TILE.window it does: keys before the window are not loaded but for the block that the window begins in, and they and
    their values may be NaN. lengths[b] = 0: zeros.

    QUERIES > 1: rows b * QUERIES + t of q, lengths and out are new tokens t of sequence b, and the grid is (B * parts * heads,
    splits): a program computes TILE.queries tokens or fewer, each up to its length. Splits follow from the longest.

    signals, waits  none: of the partials of a sequence and KV head, the program that arrives last joins all
    cache, SIZES    ``PagedCache`` and its ``CacheSizes``
    sequences       ``Sequences``: token t of b lies in page pages[b, t // page]
    partials        ``Partials``, not touched unless TILE.split
    scores          ``ScoreRule``; a sink is counted by partial 0 of its row
    """
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = pair // SIZES.heads, pair % SIZES.heads
    row, column = tl.arange(0, TILE.rows), tl.arange(0, SIZES.dim)[None, :]
    first, room = split * TILE.block_n, max_pages * SIZES.page
    left, lengths, begin = None, None, None
    if QUERIES == 1:
        begins = pair.to(tl.int64) * (TILE.group * SIZES.dim)
    else:
        PARTS: tl.constexpr = (QUERIES + TILE.queries - 1) // TILE.queries
        HEADS: tl.constexpr = TILE.group // TILE.queries
        token = sequence // PARTS * QUERIES + sequence % PARTS * TILE.queries
        left = QUERIES - sequence % PARTS * TILE.queries
        sequence = sequence // PARTS
        begins = token.to(tl.int64) * TILE.stride + head * (HEADS * SIZES.dim)
    at, exists = rows_at(row[:, None], left, SIZES.dim, TILE)
    table = sequences.pages + sequence.to(tl.int64) * max_pages
    wl.follow_previous_kernel()
    # All three loads at once; pages beyond the length are loaded and not used. With a window the length decides the first page.
    if QUERIES == 1:
        length = tl.load(sequences.lengths + sequence)
        first += first_block(tl.minimum(length, room), TILE)
    else:
        there = (row < TILE.group) & (row // HEADS < left)
        lengths = tl.minimum(tl.load(sequences.lengths + token + row // HEADS, mask=there, other=0), room)
        length = tl.max(lengths, axis=0)
        shortest = tl.min(tl.where(lengths > 0, lengths, length), axis=0)
        if TILE.window is not None:
            first += first_block(shortest, TILE)
            begin = tl.maximum(shortest - TILE.window, 0)
    page = pages_at(table, first, room, ways(TILE.block_n, TILE.ways), SIZES.page)
    x = tl.load(q + begins + at + column, mask=exists, other=0.0)
    length = tl.minimum(length, room)
    count = split_count(length, splits, TILE)
    scale, inner, sink = scores.scale, scores.inner, None
    if inner is None:
        scale = scale_of_scores(scale, cache)
    else:
        inner = scale_of_scores(inner, cache)
    if scores.sinks is not None:
        if QUERIES == 1:
            sink = sinks_at(scores.sinks, head * TILE.group + row, (row < TILE.group) & (split == 0))
        else:
            sink = sinks_at(scores.sinks, head * HEADS + row % HEADS, (row < TILE.group) & (split == 0))
    if split < count:
        step = count * TILE.block_n
        if TILE.rows == MIN_ROWS or QUERIES == 1:
            mean, log_sum = attend(
                x, cache, table, page, head, first, length, step, scale, SIZES, TILE, begin, lengths, inner, sink
            )
        else:
            mean, log_sum = attend_many(
                x, cache, table, head, split, count, shortest, lengths, scale, SIZES, TILE, inner, sink
            )
        if QUERIES > 1:
            out += begins
        store_or_join(as_values(mean, cache), log_sum, count, out, partials, None, SIZES.heads, TILE, left)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    tickets: torch.Tensor | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    queries: int = 1,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """softmax(q @ keys.T * scale) @ values -> [B, Hq, D], for the newest token of each sequence.

    q             [B, Hq, D], fp16, bf16 or fp32
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype or e4m3; query head h attends to KV head h * Hkv // Hq
    pages         [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths       [B] int32: tokens to attend to, the new one included, max_pages * S at most. 0, a padding row: zeros
    scale         D ** -0.5 where None; positive with several queries
    tickets       arrival counters: int32 zeros, B * Hkv or more, left as zeros, so calls of one stream may share them. None:
                  each call makes new ones, which takes one more small kernel
    window        a token attends to this many tokens, itself the last, 1 or more; None: to all. Blocks of keys before
                  the window are not loaded
    k_scale, v_scale  of a cache in e4m3, for q in 16 bits: fp32, 1 element each, on the device, positive; a key is its byte
                  times k_scale, a value its byte times v_scale
    queries       new tokens of each sequence: q is then [B * queries, Hq, D] and lengths [B * queries], the tokens of a
                  sequence one after the other. A token attends to its length of tokens, by one row of pages. With
                  ``invariant`` and a window these lengths, but for 0, lie within a range of ``queries``
    softcap       positive; softcap * tanh(score / softcap) in place of a score, after ``scale``; None: scores as they are
    sinks         [Hq], fp16, bf16 or fp32: one more score of each row, without a value; None: there are none
    invariant     True: sums in an order of positions alone. A token's bits are equal to the ones of
                  ``paged_prefill_attention`` with this option, whatever B, max_pages, queries and further rows are

    Hkv divides Hq; D and S are powers of two from 16 to 256. Softmax and sums in fp32. Results are the same bits from run to
    run; B, max_pages, the window and the lengths decide how sums are split. ``pages`` and the cache beyond a length, and the
    cache before a window, do not change a result.
    The host reads no lengths or pages: values out of range are not refused. No backward. ValueError for shapes, dtypes or
    devices that do not fit.
    """
    op = "paged_attention"
    check_like(op, "q", q, None, FLOATS)
    check_cache(op, keys, values, q, k_scale, v_scale)
    check_queries(op, q, k_scale)
    heads, D = keys.shape[1], keys.shape[3]
    check_shape(op, "q", q, ("B", "Hq", D))
    B = q.shape[0]
    check_heads(op, q.shape[1], keys)
    sequences = Sequences(pages, lengths)
    check_sequences(op, sequences, B, q.device, queries=queries)
    check_tickets(op, tickets, B * heads, q.device)
    check_scores(op, q.shape[1], q.device, window, scale, softcap, sinks)
    if queries > 1:
        check_scale(op, scale)
    scale = D**-0.5 if scale is None else scale
    check_flag(op, "invariant", invariant)
    given = q, keys, values, sequences, scale, tickets, window, k_scale, v_scale, queries, softcap, sinks, invariant
    return PAGED_ATTENTION.dispatch(PagedArguments(*given))


class PagedArguments(NamedTuple):
    """Arguments of paged_attention."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sequences: Sequences
    scale: float
    tickets: torch.Tensor | None
    window: int | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    queries: int = 1
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    invariant: bool = False


class PagedAttention(DecodingOp):
    name, alias = "paged_attention", "paged-attention"
    bits = {"split_kv": SPLIT_KV_BITS, "fixed_runs": INVARIANT}
    designs = {"split_kv": SplitKV, "fixed_runs": FixedRuns}
    rare = ("fixed_runs",)
    variants = options = ("invariant",)
    mutates = ("tickets",)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """q, the cache, pages and lengths; with the field fp8 the scales."""
        lengths, queries = case.field("lengths"), case.field("queries") or 1
        q = draw.own("q", (len(lengths), case.sizes[0], case.sizes[2]))
        if queries > 1:
            return q, *self._few_inputs(draw, lengths, queries)
        seen = [(cases.first_seen(case, length), length) for length in lengths]
        cache = cases.draw_cache(draw, lengths, seen, spare=case.field("spare") or 0)
        held = torch.tensor(lengths, dtype=torch.int32, device=q.device)
        return (q, *quantized_cache(*cache, held)) if case.field("fp8") else (q, *cache, held)

    def _few_inputs(self, draw: Draw, lengths: Sequence[int], queries: int) -> Inputs:
        """The cache, pages and lengths of sequences with ``queries`` new tokens each, of which 0 is none."""
        case, seen = draw.case, []
        for first in range(0, len(lengths), queries):
            of_tokens = [length for length in lengths[first : first + queries] if length > 0]
            seen.append((cases.first_seen(case, min(of_tokens, default=0)), max(of_tokens, default=0)))
        ends = [end for _, end in seen]
        cache = cases.draw_cache(draw, ends, seen, spare=case.field("spare") or 0)
        held = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
        return quantized_cache(*cache, held) if case.field("fp8") else (*cache, held)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        q, keys, values, pages, _, *scales = by_rank[rank]
        pages = pages.repeat_interleave(case.field("queries") or 1, 0)
        keys, values = read_back(keys, values, *scales)
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for b, length in enumerate(case.field("lengths")):
            if length > 0:
                held = (cases.tokens_of(x, pages[b], length) for x in (keys, values))
                out[b] = cases.attended(
                    q[b : b + 1], *held, length - 1, case.field("window"), cases.scores_of(case, q)
                )[0]
        return out

    def call(self, case: Case, team: Team, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        window, queries = case.field("window"), case.field("queries") or 1
        if isinstance(case.design, str):
            keys, values, pages, lengths, *scales = cache
            named = dict(zip(("k_scale", "v_scale"), scales, strict=False)) | {"queries": queries}
            named |= cases.scores_of(case, q) | {"invariant": case.field("invariant") or False}
            return paged_attention(q, keys, values, pages, lengths, window=window, **named)
        keys, values, pages, lengths, *scales = cache
        sequences, (k_scale, v_scale) = Sequences(pages, lengths), scales or (None, None)
        scale = q.shape[2] ** -0.5
        given = PagedArguments(q, keys, values, sequences, scale, None, window, k_scale, v_scale, queries)
        given = given._replace(**cases.scores_of(case, q))
        return self.run(case.design, None, given)

    def cases(self) -> Iterator[Case]:
        yield from cases.decoding_cases(self.name, SplitKV)
        yield from cases.verifying_cases(self.name, SplitKV)
        yield from cases.invariant_cases(self.name, FixedRuns)

    def large_cases(self) -> Iterator[Case]:
        yield from cases.large_decoding_cases(self.name)
        for heads in (cases.QWEN, ((32, 4, 128, 64), BF16)):
            for queries, batch, length in ((2, 1, 40000), (4, 32, 1024), (9, 8, 300)):
                lengths = tuple(length + place % queries for place in range(batch * queries))
                yield cases.case_of(self.name, heads, lengths=lengths, queries=queries)

    def run(self, design: SplitKV | FixedRuns, team: None, given: PagedArguments) -> torch.Tensor:
        """``paged_attention`` of checked arguments."""
        self.check_design(design)
        if isinstance(design, FixedRuns):
            cache = cache_of(self.name, given.keys, given.values, given.k_scale, given.v_scale)
            pages, lengths = given.sequences
            scores, rows = ScoreRule.of(given.scale, given.softcap, given.sinks), Rows(lengths.contiguous(), lengths)
            attended = Attended(cache, pages, scores, given.window)
            return attend_in_runs(design, given.q, attended, rows, queries=given.queries, tickets=given.tickets)
        out = self.fake(given)
        if out.numel() > 0:
            cache = cache_of(self.name, given.keys, given.values, given.k_scale, given.v_scale)
            launch, grid, arguments = launch_of(
                paged_attention_kernel, design, out, cache, given.sequences, given.tickets, given.window, given.queries,
                QUERIES=given.queries,
            )  # fmt: skip
            launch(grid, given.q.contiguous(), *arguments, ScoreRule.of(given.scale, given.softcap, given.sinks))
        return out

    def examine(self, given: Mapping[str, Any]) -> None:
        queries = given["queries"]
        if given["window"] is None or not given["invariant"]:
            return
        for lengths in given["lengths"].reshape(-1, queries).tolist():
            real = [length for length in lengths if length > 0]
            if real and max(real) - min(real) >= queries:
                raise ValueError(
                    f"{self.name}: lengths={lengths} of one sequence do not lie within a range of queries={queries}, with "
                    "invariant=True and a window; pass new tokens that follow one another"
                )

    def forward(self, given: PagedArguments) -> torch.Tensor:
        keys, pages = given.keys, given.sequences.pages
        window = hiding(given.window, keys, pages)
        group = given.q.shape[1] // keys.shape[1]
        design = self.plan_of(keys, pages, window, group, given.queries, given.invariant)
        return self.run(design, None, given._replace(window=window))

    def fake(self, given: PagedArguments) -> torch.Tensor:
        return torch.empty_like(given.q, memory_format=torch.contiguous_format)


PAGED_ATTENTION = register(PagedAttention())

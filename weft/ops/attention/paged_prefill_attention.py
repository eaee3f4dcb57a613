"""paged_prefill_attention: causal attention of the new tokens of prompts to a paged cache.

``SequenceRanges`` hold on the device which tokens are new: one launch serves sequences of any lengths, after any number of
cached tokens. So one CUDA graph serves all prompts with the same number of tokens. Keys are read from the cache only.

The method is FlashAttention's online softmax (Dao et al., 2022), on rows that are the query heads of one KV head of
neighbouring tokens: each key is loaded once for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import (
    COLUMNS,
    Fp8,
    RowFormat,
    check_e4m3,
    empty_rows,
    fp8_of,
    quantized_parts,
    rows_argument,
    store_groups,
)
from weft.kernels.online_softmax import PrefillTile, ScoreRule, before_keys, over_keys, sinks_at
from weft.kernels.paged_cache import CacheSizes, as_values, scale_of_scores
from weft.ops.attention import cases
from weft.ops.attention.attention_op import (
    GROUP,
    AttentionOp,
    check_heads,
    check_scale,
    check_scores,
    hiding,
    writes_heads,
)
from weft.ops.attention.fixed_runs import IN_RUNS, Attended, FixedRuns, Rows, attend_in_runs, block_m_of, fixed_runs_for
from weft.ops.attention.fp8_cache import cache_of, check_queries, quantized_cache, read_back
from weft.ops.attention.qk_norm_rope import check_cache, check_head_dim
from weft.ops.attention.sequence_ranges import SequenceRanges, default_block_m
from weft.ops.case import BF16, Accuracy, Case, Draw, Inputs, agreed, format_of
from weft.ops.knobs import design_type, halved, knob, powers, stepped
from weft.ops.local import (
    capabilities_of,
    check_dtype,
    check_like,
    check_row_format,
    check_shape,
    compiler_options,
    machine_on,
)
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import FLOATS, check_flag
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# A program of at most this many steps masks every step: all loads are then in flight at once, in one loop.
SHORT = tl.constexpr(4)


@design_type
class KeyBlocks:
    """Programs that walk the keys of their rows. block_n: keys of a step, a power of two of at least 16."""

    block_n: int = knob(64, powers(16), halved(high=256))
    num_warps: int = knob(4, near=halved(high=8))
    num_stages: int = knob(3, near=stepped())


class PrefillCall(NamedTuple):
    """Sizes that the plan depends on.

    programs  tiles of rows of all KV heads
    pairs     of a sequence and a KV head
    tokens    new ones of a sequence, on average
    invariant  sums in an order of positions alone
    """

    programs: int
    pairs: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    design: str = AUTO
    invariant: bool = False


@triton.jit(do_not_specialize=["max_pages"])
def paged_prefill_attention_kernel(
    q, cache, pages, out, ranges, tiles, max_pages, scores, fp8, SIZES: tl.constexpr, TILE: tl.constexpr
):
    """out[t, h, :] = softmax(scores of q[t, h, :] . keys of t's sequence up to t) @ its values

    grid: (N * heads,)
    q, out  [T, heads * group, D]. A sequence's rows are its tokens' query heads of one KV head, a token's one after the other;
            tile i has rows block_m * i and on
    window  with TILE.window a program begins at the block of the first key that its first row sees; keys and values before that
            key may be NaN
    scores  ``ScoreRule``
    cache   ``PagedCache``, of SIZES ``CacheSizes``
    ranges  [B + 2, 3]: (first_token, length, before) of each sequence; the keys of one with before = -length are none, and its
            rows of out 0
    tiles   [N, 2]: (sequence, tile) of program i * heads + KV head
    fp8     ``Fp8Rows`` of ``out`` as rows [T, heads * group * D]; else None
    pages   [B, max_pages]: key i of sequence b lies in page pages[b, i // page]; keys beyond before + length - 1 are not used
    """
    D: tl.constexpr = SIZES.dim
    GROUP: tl.constexpr = TILE.group
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    wl.follow_previous_kernel()
    scale, inner = scores.scale, scores.inner
    if inner is None:
        scale = scale_of_scores(scale, cache)
    else:
        inner = scale_of_scores(inner, cache)
    head = tl.program_id(0) % SIZES.heads
    tiles += 2 * (tl.program_id(0) // SIZES.heads)
    sequence, tile = tl.load(tiles), tl.load(tiles + 1)
    ranges += 3 * sequence
    first_token, length, before = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = (row < length * GROUP)[:, None]
    first = first_token.to(tl.int64) * (SIZES.heads * GROUP * D)
    at = (
        first
        + ((token.to(tl.int64) * SIZES.heads + head) * GROUP + row % GROUP)[:, None] * D
        + tl.arange(0, D)[None, :]
    )
    table = pages + sequence.to(tl.int64) * max_pages
    end = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length)
    # Keys that the first row sees, all rows see: they need no mask.
    whole = (before + tile * BLOCK_M // GROUP + 1) // BLOCK_N * BLOCK_N
    if TILE.window is None:
        whole = tl.where(end <= SHORT * BLOCK_N, 0, whole)
    position = before + token
    # With a window not -inf: a row may see no key of the first step, and takes a difference of two maxima.
    largest = tl.full((BLOCK_M,), float("-inf") if TILE.window is None else -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if scores.sinks is not None:
        largest, total = before_keys(sinks_at(scores.sinks, head * GROUP + row % GROUP, row >= 0))
    state = largest, total, tl.zeros((BLOCK_M, D), tl.float32)
    x = tl.load(q + at, mask=exists, other=0.0)
    if TILE.window is None:
        state = over_keys(x, position, cache, table, head, 0, whole, scale, state, False, SIZES, TILE, inner)
    else:
        first = tl.maximum(before + tile * BLOCK_M // GROUP + 1 - TILE.window, 0)
        # Keys from ``inside`` on lie in the window of the last row, and so of all rows up to themselves.
        inside = tl.cdiv(tl.maximum(end - TILE.window, 0), BLOCK_N) * BLOCK_N
        masked = (inside >= whole) | (end - first <= SHORT * BLOCK_N)
        past = tl.cdiv(tl.maximum(end, 0), BLOCK_N) * BLOCK_N
        inside, whole = tl.where(masked, past, inside), tl.where(masked, past, whole)
        state = over_keys(
            x, position, cache, table, head, first, tl.minimum(inside, end), scale, state, True, SIZES, TILE, inner
        )
        state = over_keys(x, position, cache, table, head, inside, whole, scale, state, False, SIZES, TILE, inner)
    state = over_keys(x, position, cache, table, head, whole, end, scale, state, True, SIZES, TILE, inner)
    _, total, acc = state
    total = tl.where(total > 0, total, 1.0)  # 0 where there is no key
    result = as_values(acc / total[:, None], cache)
    if fp8 is None:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=exists)
    else:
        # A group of 128 columns lies in one row, or in rows of one token.
        GROUPS: tl.constexpr = BLOCK_M * D // 128
        place = tl.arange(0, GROUPS) * 128
        row = tile * BLOCK_M + place // D
        column = (head * GROUP + row % GROUP) * D + place % D
        of_group = first_token.to(tl.int64) + row // GROUP
        x = result.to(fp8.dtype).reshape(GROUPS, 128)
        store_groups(x, out, fp8, of_group, column, row < length * GROUP, SIZES.heads * GROUP * D)


def paged_prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    spans: SequenceRanges | Sequence[tuple[int, int]],
    scale: float | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    fp8: RowFormat | None = None,
    invariant: bool = False,
) -> torch.Tensor | Fp8:
    """softmax(q @ keys.T * scale) @ values -> [T, Hq, D], for T new tokens in a causal order.

    q             [T, Hq, D], fp16, bf16 or fp32: the new tokens of all sequences, whose keys and values are in the cache
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype or e4m3; query head h attends to KV head h * Hkv // Hq
    pages         [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    spans         (before, length) of each sequence: it goes on by ``length`` tokens after ``before``; T tokens in all,
                  one sequence after the other. Or the same as SequenceRanges on q's device, which many calls share
    scale         positive; D ** -0.5 where None
    window        a token attends to this many tokens, itself the last, 1 or more; None: to all up to itself. Blocks of
                  keys before the window are not loaded
    k_scale, v_scale  of a cache in e4m3, for q in 16 bits: fp32, 1 element each, on the device, positive; a key is its byte
                  times k_scale, a value its byte times v_scale
    softcap       positive; softcap * tanh(score / softcap) in place of a score, after ``scale``
    sinks         [Hq], fp16, bf16 or fp32: one more score of each row, without a value
    fp8           rows [T, Hq * D] of the result are put in fp8 so, after they are rounded to 16 bits; ``row_format`` of the
                  weight that follows
    invariant     True: sums in an order of positions alone. A token's bits do not depend on how its sequence is cut or on
                  further sequences, and are equal to the ones of ``paged_attention`` with this option

    Hkv divides Hq; D and S are powers of two from 16 to 256. Softmax and sums in fp32. Results are the same bits from run to
    run; sizes decide how sums are split. ``pages`` and the cache beyond a sequence, and the cache before the window of its
    first new token, do not change a result. The host reads no pages: values out of range are not refused. No backward.
    ValueError for shapes, dtypes, devices or spans that do not fit.
    """
    op = "paged_prefill_attention"
    check_like(op, "q", q, None, FLOATS)
    check_cache(op, keys, values, q, k_scale, v_scale)
    check_queries(op, q, k_scale)
    page, D = keys.shape[2:]
    check_shape(op, "q", q, ("T", "Hq", D))
    check_heads(op, q.shape[1], keys)
    check_like(op, "pages", pages, q.device, (torch.int32,), ("B", "max_pages"))
    group = q.shape[1] // keys.shape[1]
    if not isinstance(spans, SequenceRanges):
        block_m = block_m_of(q.dtype, group) if invariant else None
        try:
            spans = SequenceRanges.make(spans, group, q.dtype, block_m=block_m).to(q.device)
        except ValueError as error:
            raise ValueError(f"{op}: spans: {error}") from None
    check_like(op, "spans.spans", spans.spans, q.device, (torch.int32,))
    for what, given, limit in (
        ("tokens, which q must have", spans.tokens, q.shape[0]),
        ("query heads of a KV head, which q must have", spans.group, group),
    ):
        if given != limit:
            raise ValueError(f"{op}: spans are of {given} {what}, and not {limit}")
    for what, given, limit in (
        ("sequences", spans.spans.shape[0] - 2, pages.shape[0]),
        ("tokens of a sequence", spans.longest, pages.shape[1] * page),
    ):
        if given > limit:
            raise ValueError(f"{op}: spans have {given} {what}, and pages room for {limit}")
    check_scores(op, q.shape[1], q.device, window, scale, softcap, sinks)
    check_scale(op, scale)
    scale = D**-0.5 if scale is None else scale
    ranges = spans.spans, spans.tiles, spans.block_m
    check_flag(op, "invariant", invariant)
    if invariant and spans.block_m != (rows := block_m_of(q.dtype, group)):
        raise ValueError(f"{op}: spans have tiles of block_m={spans.block_m} rows; with invariant=True pass {rows}")
    scores = scale, window, k_scale, v_scale, softcap, sinks
    given = PrefillArguments(q, keys, values, pages, *ranges, *scores, invariant)
    check_row_format(op, fp8, q.device)
    if fp8 is None:
        return PAGED_PREFILL_ATTENTION.dispatch(given)
    check_dtype(op, q.dtype)
    return fp8_of(*_FP8.dispatch(given, fp8), fp8)


class PrefillArguments(NamedTuple):
    """Arguments of paged_prefill_attention. spans, tiles, block_m: of ``SequenceRanges``."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    spans: torch.Tensor
    tiles: torch.Tensor
    block_m: int
    scale: float
    window: int | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    invariant: bool = False


def key_blocks_for(call: PrefillCall, caps: Capabilities) -> KeyBlocks:
    """The design of a call: 8 KiB of keys a step, of heads of 256 16 KiB, and as much of values.

    One H200, heads of 128, prompts of 300, 1,000 and 3,000 tokens: 425, 3333 and 36785 us; with 16 KiB 519, 3557 and 37336
    (benchmarks/lab/h200-regret-unseen/w1.json).

    4 stages where each SM has one program, else 3, so that it holds two: 4 prompts of 512 tokens, D=128, 16 heads on 2 take
    24.7 us on an H200 with 3 stages and 34.3 with 4, one prompt 14.2 and 12.6 (`git show
    4c5a438:benchmarks/lab/h200-prefill-attention.json`).
    """
    if call.dtype == torch.float32:
        return KeyBlocks(block_n=16, num_stages=2)
    block_n = max(32, min(64, (8 << 10) // (call.head_dim * call.dtype.itemsize)))
    if caps.arch.startswith("gfx"):
        return KeyBlocks(block_n=block_n, num_stages=2)
    return KeyBlocks(block_n=block_n, num_stages=4 if call.programs <= caps.sms else 3)


class PagedPrefillAttention(AttentionOp):
    """sizes: of one prompt without cached tokens, on one rank."""

    name, alias = "paged_prefill_attention", "paged-prefill-attention"
    bits = {"key_blocks": "depend on how prompts are cut, a rank's KV heads and the design", "fixed_runs": INVARIANT}
    designs = {"key_blocks": KeyBlocks, "fixed_runs": FixedRuns}
    rare = ("fixed_runs",)
    variants = options = ("invariant",)
    sizes = ("tokens", "q_heads", "kv_heads", "head_dim")

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, invariant: bool = False
    ) -> PrefillCall:
        tokens, q_heads, kv_heads, head_dim = self.checked_sizes(sizes)
        check_head_dim(head_dim)
        if q_heads % kv_heads != 0:
            raise ValueError(f"{self.name}: q_heads={q_heads} is no multiple of kv_heads={kv_heads}")
        tiles = cdiv(tokens * (q_heads // kv_heads), default_block_m(dtype))
        return PrefillCall(tiles * kv_heads, kv_heads, tokens, head_dim, dtype, design, invariant)

    def rule(self, call: PrefillCall, machine: Machine) -> tuple[str, str]:
        if call.invariant:
            return "fixed_runs", IN_RUNS
        block_n = key_blocks_for(call, machine.caps).block_n
        return "key_blocks", f"{call.programs} programs on {machine.caps.sms} SMs, {block_n} keys a step"

    def tuned(self, call: PrefillCall, machine: Machine) -> Planned | None:
        return None if call.invariant else super().tuned(call, machine)

    def default(self, name: str, call: PrefillCall, machine: Machine) -> KeyBlocks | FixedRuns:
        if name == "fixed_runs":
            return fixed_runs_for(call.head_dim, call.dtype, machine.caps, call.programs, 1)
        return key_blocks_for(call, machine.caps)

    def space(self, call: PrefillCall, machine: Machine, quick: bool = False) -> Iterator[KeyBlocks]:
        if call.invariant:
            return
        rule = key_blocks_for(call, machine.caps)
        for block_n in (32, 64, 128):
            for num_warps in (4,) if quick else (4, 8):
                for num_stages in (rule.num_stages,) if quick else (2, 3, 4):
                    yield KeyBlocks(block_n=block_n, num_warps=num_warps, num_stages=num_stages)

    def sequences_of(self, pairs: int, tokens: int) -> dict[str, Any]:
        return {"chunks": ((pairs, tokens, 0),)}

    def call_of_case(self, case: Case, machine: Machine) -> PrefillCall:
        (q_heads, heads, head_dim, _), spans = case.sizes, _spans_of(case)
        rows, group = sum(length for _, length in spans), q_heads // heads
        tiles = sum(cdiv(length * group, default_block_m(case.dtype)) for _, length in spans)
        average = cdiv(rows, max(1, len(spans)))
        sizes = tiles * heads, len(spans) * heads, average, head_dim
        return PrefillCall(*sizes, case.dtype, case.design, case.field("invariant") or False)

    def flops(self, sizes: Sequence[int]) -> int:
        pairs, tokens, head_dim = sizes
        return 2 * GROUP * pairs * tokens * (tokens + 1) * head_dim

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """q, the cache and pages; with the field fp8 the scales."""
        spans, (tokens, batch) = _spans_of(case), case.field("room") or (0, 0)
        held = [before + length for before, length in spans]
        seen = [(cases.first_seen(case, before + 1), before + length) for before, length in spans]
        cache = cases.draw_cache(draw, held, seen, spare=case.field("spare") or 0, room=batch)
        rows = sum(length for _, length in spans) + tokens
        q = draw.own("q", (rows, case.sizes[0], case.sizes[2]))
        return (q, *quantized_cache(*cache)) if case.field("fp8") else (q, *cache)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        q, keys, values, pages, *scales = by_rank[rank]
        keys, values = read_back(keys, values, *scales)
        out, first = torch.zeros(q.shape, dtype=torch.float64, device=q.device), 0
        for b, (before, length) in enumerate(_spans_of(case)):
            held = (cases.tokens_of(x, pages[b], before + length) for x in (keys, values))
            options = case.field("window"), cases.scores_of(case, q)
            out[first : first + length] = cases.attended(q[first : first + length], *held, before, *options)
            first += length
        return out

    def accuracy(self, case: Case) -> Accuracy:
        longest = max((sum(span) for span in _spans_of(case)), default=0)
        longest = min(longest, case.field("window") or longest)
        return Accuracy(terms=longest + case.sizes[2], partials=1, by_row=True)

    def call(self, case: Case, team: None, *tensors: torch.Tensor) -> torch.Tensor:
        q, keys, values, pages, *scales = tensors
        sizes = {"tokens": len(q), "batch": len(pages)} if case.field("room") else {}
        group = q.shape[1] // keys.shape[1]
        ranges = SequenceRanges.make(_spans_of(case), group, q.dtype, block_m=case.field("block_m"), **sizes)
        here, window = ranges.to(q.device), case.field("window")
        if isinstance(case.design, str):
            named = dict(zip(("k_scale", "v_scale"), scales, strict=False)) | cases.scores_of(case, q)
            named["invariant"] = case.field("invariant") or False
            return paged_prefill_attention(q, keys, values, pages, here, window=window, **named)
        sizes = here.spans, here.tiles, here.block_m, q.shape[2] ** -0.5, window
        given = PrefillArguments(q, keys, values, pages, *sizes, *scales)._replace(**cases.scores_of(case, q))
        out = self.run(case.design, None, given)
        if format := format_of(case, q):
            out = agreed(out.flatten(1), fp8_of(*self.run(case.design, None, given, format), format), format)
        return out.view(q.shape)

    def cases(self) -> Iterator[Case]:
        few = {"design": KeyBlocks(block_n=16, num_warps=1), "block_m": 16}
        for chunks, fields in (
            (((1, 1, 0),), {}),
            (((3, 17, 0),), {"spare": 1}),
            (((1, 70, 300),), {}),
            (((2, 40, 0), (1, 9, 64)), {}),
            (((1, 33, 200),), {"block_m": 128, "design": KeyBlocks(block_n=32, num_warps=8, num_stages=2)}),
            (((1, 130, 7),), {"spare": 3, "design": KeyBlocks(block_n=128, num_stages=2)}),
            (((9, 40, 0),), {"spare": 1}),
            (((1, 50, 0), (1, 3, 300), (1, 70, 11)), {"room": (5, 0)}),
            (((1, 1, 0), (2, 30, 2)), {"room": (67, 5)}),
        ):
            yield cases.case_of(self.name, cases.QWEN, chunks=chunks, **fields)
        for chunks, fields in (
            (((0, 5, 0), (2, 0, 3), (1, 3, 0)), {}),
            (((2, 5, 0), (1, 1, 40), (2, 30, 19)), few),
            (((1, 100, 0), (1, 16, 256), (3, 64, 1)), few),
            (((1, 20, 0), (1, 0, 30), (1, 9, 16)), {"room": (1, 2), **few}),
            ((), {"room": (40, 3), **few}),
            ((), {}),
            (((2, 0, 3),), {}),
        ):
            yield cases.case_of(self.name, cases.SMALL, chunks=chunks, **fields)
        yield cases.case_of(self.name, ((2, 1, 64, 16), BF16), chunks=((1, 5, 20), (1, 3, 0)), fp8=True, **few)
        for heads, kind in cases.OF_SCORES:
            yield cases.case_of(self.name, heads, chunks=((2, 5, 0), (1, 1, 40), (1, 30, 19)), **kind, **few)
            yield cases.case_of(self.name, heads, chunks=((1, 40, 60), (1, 0, 3)), window=41, **kind, **few)
        for heads, kind in cases.IN_FP8:
            yield cases.case_of(self.name, heads, chunks=((1, 20, 4), (1, 3, 0)), fp8_rows=kind, **few)
        for heads in cases.HEADS:
            yield cases.case_of(self.name, heads, chunks=((2, 21, 0), (1, 50, 77)), **few)
            yield cases.case_of(self.name, heads, chunks=((1, 90, 130), (1, 7, 0)), spare=2)
            yield cases.case_of(self.name, heads, chunks=((1, 19, 130), (1, 30, 1)), room=(33, 1))
        # Windows of a token, within a block, of whole blocks and not, of a whole sequence and beyond it; steps that need no
        # mask between blocks that do.
        for window, chunks in (
            (1, ((2, 5, 0), (1, 9, 30))),
            (5, ((1, 40, 0), (1, 3, 100))),
            (16, ((1, 33, 0), (2, 17, 15))),
            (41, ((1, 100, 0), (1, 1, 40), (1, 50, 77))),
            (110, ((1, 40, 260), (1, 9, 101))),
            (200, ((1, 20, 170),)),
        ):
            yield cases.case_of(self.name, cases.SMALL, chunks=chunks, window=window, **few)
        wide = KeyBlocks(block_n=32, num_warps=8, num_stages=2)
        for heads, fields in (
            (cases.QWEN, {"chunks": ((1, 20, 400),), "window": 300, "design": wide, "block_m": 128}),
            (cases.QWEN, {"chunks": ((1, 17, 200), (1, 9, 0)), "window": 90, "room": (6, 3)}),
            (cases.HEADS[1], {"chunks": ((1, 30, 500),), "window": 440}),
            (cases.HEADS[5], {"chunks": ((2, 30, 90),), "window": 50}),
            (cases.SMALL, {"chunks": ((1, 20, 4),), "window": 32}),
        ):
            yield cases.case_of(self.name, heads, **fields)
        yield from cases.invariant_cases(self.name, FixedRuns)

    def large_cases(self) -> Iterator[Case]:
        for heads in (cases.QWEN, ((32, 4, 128, 64), BF16)):
            for chunks in (((1, 128, 0),), ((32, 128, 0),), ((1, 2048, 0),), ((1, 1000, 3001), (2, 77, 0))):
                yield cases.case_of(self.name, heads, chunks=chunks)
            yield cases.case_of(self.name, heads, chunks=((1, 1000, 3001), (2, 77, 0)), fp8=True)
            for chunks in (((1, 1500, 3500),), ((1, 300, 19700), (2, 77, 5000))):
                yield cases.case_of(self.name, heads, chunks=chunks, window=4096)

    def run(
        self, design: KeyBlocks | FixedRuns, team: None, given: PrefillArguments, format: RowFormat | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``paged_prefill_attention`` of checked arguments; in a ``format`` of fp8 its rows and scales."""
        self.check_design(design)
        if isinstance(design, FixedRuns):
            out = self._run_in_runs(design, given)
            return out if format is None else quantized_parts(out.flatten(1), format, capabilities_of(out.device))
        q, pages, spans, tiles = given.q, given.pages, given.spans, given.tiles
        (T, q_heads, D), sizes, fp8 = q.shape, CacheSizes.of(given.keys), None
        if format is None:
            out = self.fake(given)
        elif writes_heads(q_heads // sizes.heads, D, format):
            out, scales = empty_rows(q, T, q_heads * D, format)
            fp8 = rows_argument(scales, format, q.dtype, COLUMNS.value)
        else:
            rows = self.run(design, team, given).flatten(1)
            return quantized_parts(rows, format, capabilities_of(q.device))
        programs, caps = tiles.shape[0] * sizes.heads, capabilities_of(q.device)
        tile = PrefillTile(q.shape[1] // sizes.heads, given.block_m, design.block_n, given.window)
        cache = cache_of(self.name, given.keys, given.values, given.k_scale, given.v_scale)
        if programs:
            launch = launch_on(
                q.device,
                paged_prefill_attention_kernel,
                (design, sizes, tile),
                lambda: {"SIZES": sizes, "TILE": tile, **compiler_options(design, caps)},
            )
            arguments = q.contiguous(), cache, pages.contiguous(), out, spans, tiles, pages.shape[1]
            launch(programs, *arguments, ScoreRule.of(given.scale, given.softcap, given.sinks), fp8)
        return out if format is None else (out, scales)

    def _run_in_runs(self, design: FixedRuns, given: PrefillArguments) -> torch.Tensor:
        cache = cache_of(self.name, given.keys, given.values, given.k_scale, given.v_scale)
        scores = ScoreRule.of(given.scale, given.softcap, given.sinks)
        attended = Attended(cache, given.pages, scores, given.window)
        return attend_in_runs(design, given.q, attended, Rows(given.spans, given.tiles))

    def forward(self, given: PrefillArguments) -> torch.Tensor:
        return self.planned(given)

    def planned(
        self, given: PrefillArguments, format: RowFormat | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        (_, heads, _, D), sequences, q = given.keys.shape, max(1, given.spans.shape[0] - 2), given.q
        sizes = given.tiles.shape[0] * heads, sequences * heads, cdiv(len(q), sequences), D
        call = PrefillCall(*sizes, q.dtype, invariant=given.invariant)
        design = self.plan(call, machine_on(q.device)).design
        return self.run(design, None, given._replace(window=hiding(given.window, given.keys, given.pages)), format)

    def fake(self, given: PrefillArguments) -> torch.Tensor:
        return torch.empty_like(given.q, memory_format=torch.contiguous_format)


class PagedPrefillAttentionFp8(Op):
    """PagedPrefillAttention with rows in fp8: a torch op by itself, since it has two results."""

    name = alias = "paged_prefill_attention_fp8"

    def forward(self, given: PrefillArguments, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("paged_prefill_attention", capabilities_of(given.q.device))
        return PAGED_PREFILL_ATTENTION.planned(given, format)

    def fake(self, given, format):
        T, q_heads, D = given.q.shape
        return empty_rows(given.q, T, q_heads * D, format)


PAGED_PREFILL_ATTENTION = register(PagedPrefillAttention())
_FP8 = define(PagedPrefillAttentionFp8())


def _spans_of(case: Case) -> list[tuple[int, int]]:
    """(before, length) of each sequence of a case.

    Its field ``chunks`` has (batch, length, before) of each kind.
    """
    return [(before, length) for batch, length, before in case.field("chunks") for _ in range(batch)]

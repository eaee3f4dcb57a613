"""mla_decode_attention: attention of new tokens to a paged cache of latents (MLA, absorbed).

All heads attend to the same row of a token, whose first part is key and value at once: so a program loads a step of tokens once
for block_m rows, and multiplies it twice. A sequence's tokens are split over programs, whose results are merged by a second
kernel, that of ``merge_attention``: one program would take too long over partials of this size. The largest number of splits
follows from shapes alone, so that a CUDA graph holds any lengths; programs derive the number of a sequence's splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.latent_attention import HeadRows, LatentTile, attend_early, attend_to_latents
from weft.kernels.online_softmax import LOG2_E
from weft.kernels.paged_cache import CacheSizes, Sequences
from weft.ops.attention import cases
from weft.ops.attention.attention_op import PAGE_SIZES, check_sequences
from weft.ops.attention.merge_attention import merge_into
from weft.ops.attention.mla_plan import EarlyBlocks, LatentBlocks, MLACall, MLAPlan
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like, check_shape, compiler_options, machine_on
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_scalar
from weft.runtime.arithmetic import cdiv
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

LATENTS, ROPES = (16, 32, 64, 128, 256, 512), (16, 32, 64)
LOG2_OF_E: tl.constexpr = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize=["max_pages"])
def mla_decode_attention_kernel(
    q, q_rope, cache, sequences, out, lse, max_pages, scale, SIZES: tl.constexpr, TILE: tl.constexpr
):
    """out[i, r, :] = softmax(queries r . rows of tokens * scale) @ latents    grid: (B * blocks, splits)

    Row r = (b * queries + t) * heads + h is head h of new token t of sequence b, which attends to lengths[b * queries + t]
    tokens. Program (b * blocks + m, i) computes rows m * block_m .. of sequence b over split i, a run of neighbouring steps of
    block_n tokens. A block has one split for each of ``splits``, or fewer, so that each has about TILE.least tokens; of a split
    without tokens lse is -inf and out is not written, but for split 0. lengths = 0: zeros, and lse is -inf.

    q, q_rope    ``HeadRows``: [B * queries, heads, latent], and [.., rope] already rotated
    cache        [pages, page, latent + rope] by SIZES, a ``CacheSizes`` of one head. Rows after a length may be NaN
    sequences    ``Sequences``: token t of b lies in page pages[b, t // page]; lengths [B * queries]
    out, lse     [splits, rows, latent], and fp32 [splits, rows]: natural log of the sum of exp(score)
    signals, waits  none: programs share nothing that is written
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    ROWS: tl.constexpr = TILE.queries * TILE.heads
    BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence = block // BLOCKS
    row = block % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < ROWS
    token, head = sequence * TILE.queries + row // TILE.heads, row % TILE.heads
    table = sequences.pages + sequence.to(tl.int64) * max_pages
    wl.follow_previous_kernel()
    lengths = tl.minimum(tl.load(sequences.lengths + token, mask=exists, other=0), max_pages * SIZES.page)
    at = token.to(tl.int64) * q.token_stride + head.to(tl.int64) * q.head_stride
    at_rope = token.to(tl.int64) * q_rope.token_stride + head.to(tl.int64) * q_rope.head_stride
    latent = tl.arange(0, TILE.latent)[None, :]
    x = tl.load(q.rows + at[:, None] + latent, mask=exists[:, None], other=0.0)
    x_rope = tl.load(q_rope.rows + at_rope[:, None] + tl.arange(0, TILE.rope)[None, :], mask=exists[:, None], other=0.0)
    length = tl.max(lengths, axis=0)
    count = tl.minimum(tl.maximum(tl.cdiv(length, TILE.least), 1), splits)
    steps = tl.cdiv(tl.cdiv(length, TILE.block_n), count) * TILE.block_n
    start, end = split * steps, tl.minimum((split + 1) * steps, length)
    sequence_rows = tl.num_programs(0) // BLOCKS * ROWS
    to = split.to(tl.int64) * sequence_rows + sequence * ROWS + row
    if (start < end) | (split == 0):
        if TILE.stages is None:
            mean, log_sum = attend_to_latents(x, x_rope, cache, table, lengths, start, end, scale, SIZES, TILE)
        else:
            mean, log_sum = attend_early(x, x_rope, cache, table, lengths, start, end, scale, SIZES, TILE)
        tl.store(out + to[:, None] * TILE.latent + latent, mean.to(out.dtype.element_ty), mask=exists[:, None])
        tl.store(lse + to, log_sum / LOG2_OF_E, mask=exists)
    else:
        tl.store(lse + to, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=exists)


def mla_decode_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    queries: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over a paged cache of latents: (out [T, H, L], lse [T, H] fp32).

    T = B * queries.
    out = softmax((q @ latents.T + q_rope @ ropes.T) * scale) @ latents, and lse the natural log of the sum of exp(score)

    q        [T, H, L], fp16, bf16 or fp32: the part of a query without rotation, times the keys' half of kv_b_proj (absorbed)
    q_rope   [T, H, R]: its rotated part. Columns of both must be neighbours, or they are copied
    cache    [P, S, L + R], contiguous, of q's dtype: a token's latent, normalised, then its rotated key, which all heads share
    pages    [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths  [T] int32: tokens to attend to, the new one included, max_pages * S at most. 0, a padding row: zeros, lse -inf
    scale    of the scores, 1 / sqrt(nope + rope) of the expanded heads, with YaRN times its mscale twice: no default would
             know it
    queries  new tokens of each sequence, one after the other: a token attends to its length of tokens, by one row of pages

    L is a power of two from 16 to 512, R from 16 to 64, S from 16 to 256. Softmax and sums in fp32. lse is what
    ``merge_attention`` takes, for parts of a context at several ranks. Results are the same bits from run to run; B, max_pages
    and the lengths decide how sums are split. Pages and the cache beyond a length do not change a result.
    The host reads no lengths or pages: values out of range are not refused. No backward. ValueError for shapes, dtypes or
    devices that do not fit.
    """
    op = "mla_decode_attention"
    check_like(op, "q", q, None, FLOATS, ("T", "H", "L"))
    T, H, L = q.shape
    check_like(op, "q_rope", q_rope, q.device, (q.dtype,), (T, H, "R"))
    check_latents(op, cache, q, L, q_rope.shape[2])
    if H == 0:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}; pass 1 or more heads")
    sequences = Sequences(pages, lengths)
    check_sequences(op, sequences, T, q.device, queries=queries)
    check_scalar(op, "scale", scale)
    return MLA_DECODE_ATTENTION.dispatch(MLAArguments(q, q_rope, cache, sequences, scale, queries))


def check_latents(op: str, cache: torch.Tensor, like: torch.Tensor, latent: int, rope: int) -> None:
    """ValueError unless ``cache`` is a paged cache of latents beside ``like`` that kernels take."""
    check_like(op, "cache", cache, like.device, (like.dtype,))
    check_latent_sizes(latent, rope, op=f"{op}: ")
    check_shape(op, "cache", cache, ("pages", "page_size", latent + rope))
    if cache.shape[0] == 0 or cache.shape[1] not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(f"{op}: cache has shape {tuple(cache.shape)}; it has 1 or more pages, each of {sizes} tokens")
    check_contiguous(op, "cache", cache)


def check_latent_sizes(latent: int, rope: int, remedy: str = "", op: str = "") -> None:
    """ValueError unless kernels take latents and rotary parts of these sizes, L and R."""
    for name, size, known in (("L", latent, LATENTS), ("R", rope, ROPES)):
        if size not in known:
            raise ValueError(f"{op}{name}={size} is not one of {', '.join(map(str, known))}{remedy}")


class MLAArguments(NamedTuple):
    """Arguments of mla_decode_attention."""

    q: torch.Tensor
    q_rope: torch.Tensor
    cache: torch.Tensor
    sequences: Sequences
    scale: float
    queries: int = 1


class MLADecodeAttention(MLAPlan):
    """sizes of a case: heads, 1, latent + rope, page size. Fields: rope, lengths, queries, spare."""

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """q, its rotary part, the cache, pages and lengths."""
        (heads, _, width, _), rope = case.sizes, case.field("rope")
        lengths, queries = case.field("lengths"), case.field("queries") or 1
        q = draw.own("q", (len(lengths), heads, width))
        ends = [max(lengths[first : first + queries]) for first in range(0, len(lengths), queries)]
        seen = [(0, end) for end in ends]
        latents, _, pages = cases.draw_cache(draw, ends, seen, spare=case.field("spare") or 0)
        held = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
        return q[..., : width - rope], q[..., width - rope :].contiguous(), latents[:, 0], pages, held

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        q, q_rope, cache, pages, _ = by_rank[rank]
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
        for row, length in enumerate(case.field("lengths")):
            if length > 0:
                table = pages[row // (case.field("queries") or 1)]
                keys = cases.tokens_of(cache[:, None], table, length)[:, 0]
                scores = torch.cat((q[row], q_rope[row]), -1).double() @ keys.T * scale_of(case)
                out[row], lse[row] = scores.softmax(-1) @ keys[:, : q.shape[2]], scores.logsumexp(-1)
        return out, lse

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=max(case.field("lengths")) + case.sizes[2], partials=1, by_row=True)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, queries = scale_of(case), case.field("queries") or 1
        if isinstance(case.design, str):
            out, lse = mla_decode_attention(*tensors, scale, queries)
        else:
            q, q_rope, cache, pages, lengths = tensors
            given = MLAArguments(q, q_rope, cache, Sequences(pages, lengths), scale, queries)
            out, lse = self.run(case.design, None, given)
        return out, lse.to(case.dtype)

    def cases(self) -> Iterator[Case]:
        small = LatentBlocks(block_m=16, block_n=16, least=16, splits=8, num_warps=1, num_stages=2)
        wide = LatentBlocks(block_m=64, block_n=32, least=128, splits=3, num_warps=8, num_stages=3)
        for lengths, spare, design in (
            ((1,), 0, "auto"), ((0, 63, 64, 65, 128), 0, small), ((300, 0, 700), 1, wide), ((0, 0), 0, "auto"),
            ((1000,), 4, "auto"), ((255, 1, 0, 47), 3, small),
        ):  # fmt: skip
            yield case_of(self.name, (16, 32, 16, 16), FP32, design, lengths=lengths, spare=spare)
        # Heads that fill no tile, one tile, several; pages of more and of fewer tokens than a step.
        for sizes, dtype, design in (
            ((3, 64, 32, 64), BF16, small), ((20, 32, 16, 32), FP16, wide), ((70, 64, 16, 16), BF16, wide),
            ((128, 32, 16, 128), BF16, small), ((1, 16, 64, 256), FP32, small), ((16, 512, 64, 64), BF16, "auto"),
        ):  # fmt: skip
            yield case_of(self.name, sizes, dtype, design, lengths=(160, 0, 77))
        # Several new tokens, which attend to different numbers of tokens in one program and in several; 0: no token.
        for sizes, queries, lengths, design in (
            ((4, 32, 16, 16), 2, (1, 2, 16, 17), small),
            ((16, 32, 16, 32), 3, (31, 32, 33, 300, 301, 0, 0, 0, 0), "auto"),
            ((40, 32, 16, 16), 4, (*range(70, 74), 17, 18, 0, 0), small),
            ((8, 64, 16, 64), 9, (*range(500, 509), *range(1, 10)), wide),
        ):
            yield case_of(self.name, sizes, BF16, design, lengths=lengths, queries=queries)
        few = EarlyBlocks(block_m=16, block_n=16, least=32, splits=8, num_warps=4, num_stages=2)
        many = EarlyBlocks(block_m=64, block_n=32, least=128, splits=3, num_warps=8, num_stages=3)
        # Steps in a page, in several, and of one token; splits without tokens; tokens of one program that see different ones.
        for sizes, dtype, queries, lengths, design in (
            ((16, 32, 16, 16), FP32, 1, (0, 63, 64, 65, 0, 129), few),
            ((70, 64, 16, 16), BF16, 1, (300, 1, 0, 97), many),
            ((3, 16, 64, 256), FP16, 1, (500, 17), few),
            ((16, 32, 16, 32), BF16, 3, (31, 32, 33, 300, 301, 0, 0, 0, 0), many),
            ((8, 64, 16, 64), BF16, 9, (*range(500, 509), *range(1, 10)), many),
        ):
            yield case_of(self.name, sizes, dtype, design, lengths=lengths, queries=queries)

    def large_cases(self) -> Iterator[Case]:
        early = EarlyBlocks(block_m=64, block_n=64, least=512, splits=2, num_warps=8, num_stages=2)
        for heads, queries, batch, length, designs in (
            (16, 1, 1, 128, ("auto",)), (16, 1, 1, 40000, ("auto",)), (16, 1, 32, 1024, ("auto",)),
            (128, 1, 1, 40000, ("auto", early)), (128, 1, 64, 4096, ("auto", early)), (64, 1, 128, 300, ("auto", early)),
            (128, 2, 16, 1024, ("auto", early)), (16, 4, 8, 3000, ("auto",)),
        ):  # fmt: skip
            lengths = tuple(length + place % queries for place in range(batch * queries))
            for dtype in (BF16, FP16):
                for design in designs:
                    yield case_of(self.name, (heads, 512, 64, 64), dtype, design, lengths=lengths, queries=queries)

    def run(
        self, design: LatentBlocks | EarlyBlocks, team: None, given: MLAArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``mla_decode_attention`` of checked arguments."""
        self.check_design(design)
        out, lse = self.fake(given)
        if out.numel() == 0:
            return out, lse
        (T, heads, latent), caps, queries, splits = out.shape, capabilities_of(out.device), given.queries, design.splits
        tile = tile_of(design, (heads, latent, given.q_rope.shape[2]), queries)
        _, page, width = given.cache.shape

        launch = launch_on(
            out.device,
            mla_decode_attention_kernel,
            (tile, page, design.num_warps, design.num_stages),
            lambda: {"SIZES": CacheSizes(1, page, width), "TILE": tile, **compiler_options(design, caps)},
        )
        outs, lses = out, lse
        if splits > 1:
            outs = out.new_empty((splits, *out.shape), dtype=torch.float32)
            lses = lse.new_empty((splits, *lse.shape))
        pages, lengths = (x.contiguous() for x in given.sequences)
        grid = T // queries * cdiv(heads * queries, design.block_m), splits
        rows = HeadRows.of(given.q), HeadRows.of(given.q_rope)
        arguments = given.cache, Sequences(pages, lengths), outs, lses, pages.shape[1], given.scale * LOG2_E
        launch(grid, *rows, *arguments)
        if splits > 1:
            merge_into(outs, lses, out, lse)
        return out, lse

    def forward(self, given: MLAArguments) -> tuple[torch.Tensor, torch.Tensor]:
        (T, heads, _), pages, cache = given.q.shape, given.sequences.pages, given.cache
        tokens = pages.shape[1] * cache.shape[1]
        call = MLACall(T // given.queries, heads * given.queries, tokens, cache.shape[2], cache.dtype)
        return self.run(self.plan(call, machine_on(cache.device)).design, None, given)

    def fake(self, given: MLAArguments) -> tuple[torch.Tensor, torch.Tensor]:
        q = given.q
        return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def tile_of(design: LatentBlocks | EarlyBlocks, sizes: tuple[int, int, int], queries: int) -> LatentTile:
    """A program's tile of heads, latent and rotary part."""
    heads, latent, rope = sizes
    stages = design.num_stages if isinstance(design, EarlyBlocks) else None
    return LatentTile(latent, rope, heads, queries, design.block_m, design.block_n, design.least, stages)


def case_of(op: str, sizes: tuple[int, ...], dtype: torch.dtype, design: Any = "auto", **fields: Any) -> Case:
    """A case of (heads, latent, rope, page size)."""
    heads, latent, rope, page = sizes
    return cases.case_of(op, ((heads, 1, latent + rope, page), dtype), design, rope=rope, **fields)


def scale_of(case: Case) -> float:
    """Scale of a case's scores."""
    return case.sizes[2] ** -0.5


MLA_DECODE_ATTENTION = register(MLADecodeAttention())

"""Attention to latents, for multi-head latent attention (MLA) with absorbed weights.

All heads attend to one row of a token. The row has a latent, which is key and value at once, and a rotary part, which is key
only. The queries are already in the space of the latents, so that heads have no keys. The method is DeepSeek-V2's
(arXiv 2405.04434).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.online_softmax import accumulate
from weft.kernels.paged_cache import cell_of, cells_at, pages_at


class HeadRows(NamedTuple):
    """Rows [tokens, heads, columns] of queries, and the elements between two tokens and between two heads."""

    rows: torch.Tensor
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "HeadRows":
        """``x`` as it lies in memory, if its columns are neighbours; else a copy."""
        x = x if x.stride(2) == 1 else x.contiguous()
        return cls(x, x.stride(0), x.stride(1))


class LatentTile(NamedTuple):
    """One program's part of an attention over latents, a compile-time constant.

    latent, rope  elements of a token's latent and of its rotary part
    heads         query heads; queries: new tokens of a sequence
    block_m       rows, each a query head of a new token
    block_n       tokens of a step
    least         tokens of a split-KV partial at least
    stages        of the pipeline of ``attend_early``; None: ``attend_to_latents``
    """

    latent: int
    rope: int
    heads: int
    queries: int
    block_m: int
    block_n: int
    least: int
    stages: int | None = None


@triton.jit
def attend_to_latents(x, x_rope, cache, table, lengths, start, end, scale, SIZES: tl.constexpr, TILE: tl.constexpr):
    """(weighted mean of latents [block_m, latent], log2 of the sum of weights) of some tokens.

    The tokens are start .. end - 1. A token's weight is 2 ** (score * scale), so ``scale`` holds log2(e). Row i attends to
    tokens before lengths[i]. Of a row that attends to none of these tokens the mean is 0 and the sum's log is -inf.

    x, x_rope  [block_m, latent] and [block_m, rope]: the rows' queries
    cache      [pages, page, latent + rope], by SIZES, its ``CacheSizes``; table: the sequence's pages
    start      a multiple of block_n
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    LATENT: tl.constexpr = TILE.latent
    column, rope = tl.arange(0, LATENT)[None, :], LATENT + tl.arange(0, TILE.rope)[None, :]
    local = tl.arange(0, BLOCK_N)
    largest, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    page = pages_at(table, start, end, local, SIZES.page)
    for at in tl.range(start, end, BLOCK_N):
        cells = cells_at(page, 0, at, local, SIZES)[:, None]
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_at(table, at + BLOCK_N, end, local, SIZES.page)
        there = (local < end - at)[:, None]
        k = tl.load(cache + cells + column, mask=there, other=0.0)
        k_rope = tl.load(cache + cells + rope, mask=there, other=0.0)
        score = tl.dot(x, k.T, input_precision="ieee")
        score = tl.dot(x_rope, k_rope.T, score, input_precision="ieee") * scale
        score = tl.where((at + local)[None, :] < lengths[:, None], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=1))
        p = tl.exp2(score - new[:, None])
        total, acc = accumulate(p, k, new, largest, total, acc)
        largest = new
    return mean_of(largest, total, acc)


@triton.jit
def attend_early(x, x_rope, cache, table, lengths, start, end, scale, SIZES: tl.constexpr, TILE: tl.constexpr):
    """``attend_to_latents`` with copies before products, and scores that groups of warps share.

    Copies of a later step are issued before the products of this step, not after them, so that they have its whole time. Of 64
    rows each of two groups of 4 warps computes the scores of half of the step's tokens, gets the weights of the other half
    through shared memory, and sums up 256 of 512 columns over all tokens; with ``attend_to_latents`` both groups compute
    all scores. Triton 3.6 does this for two branches that are always taken:

    * ``at < end``: the pipeline puts copies after the products of a loop's body, but before its branches. tl.range
      has the stages, because without a product outside of branches the kernel's option is not applied.
    * ``at < length``: a product that enters another one gets rows for all warps, and the search for the other one ends
      with a branch. The sum of both parts of the scores would be such a product, so it is outside. Both sides are alike and
      become one, but by then the rotary part has two uses and so two buffers; with one use it has three, which is
      more than shared memory holds.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    LATENT: tl.constexpr = TILE.latent
    column, rope = tl.arange(0, LATENT)[None, :], LATENT + tl.arange(0, TILE.rope)[None, :]
    local = tl.arange(0, BLOCK_N)
    length = tl.max(lengths, axis=0)
    largest, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    page = pages_held(table, start, end, local, SIZES.page)
    for at in tl.range(start, end, BLOCK_N, num_stages=TILE.stages):
        k = tl.load(rows_at(cache + column, page, at, end, local, SIZES))
        k_rope = tl.load(rows_at(cache + rope, page, at, end, local, SIZES))
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_held(table, at + BLOCK_N, end, local, SIZES.page)
        if at < end:
            if at < length:
                score, rotary = tl.dot(x, k.T, input_precision="ieee"), tl.dot(x_rope, k_rope.T, input_precision="ieee")
            else:
                score, rotary = tl.dot(x, k.T, input_precision="ieee"), tl.dot(x_rope, k_rope.T, input_precision="ieee")
            score = tl.where((at + local)[None, :] < lengths[:, None], (score + rotary) * scale, float("-inf"))
            new = tl.maximum(largest, tl.max(score, axis=1))
            p = tl.exp2(score - new[:, None])
            total, acc = accumulate(p, k, new, largest, total, acc)
            largest = new
    return mean_of(largest, total, acc)


@triton.jit
def mean_of(largest, total, acc):
    """(mean, log2 of the sum of weights, -inf without tokens) of rows after their last step."""
    divisor = tl.where(total > 0, total, 1.0)
    return acc / divisor[:, None], tl.where(total > 0, largest + tl.log2(divisor), float("-inf"))


@triton.jit
def pages_held(table, start, end, local, PAGE: tl.constexpr):
    """``pages_at``, with the page of token end - 1 from ``end`` on, if ``start`` is before it.

    So a row that no token asks for is one of the sequence's own: its weight is 0, and 0 times a NaN of another page is NaN.
    """
    if local.numel <= PAGE:
        return pages_at(table, start, end, local, PAGE)
    else:
        token = tl.minimum(start + local, end - 1)
        return tl.load(table + token // PAGE, mask=(local >= 0) & (start < end), other=0)


@triton.jit
def rows_at(columns, page, start, end, local, SIZES: tl.constexpr):
    """Pointers to ``columns`` of tokens start + ``local``, but of token end - 1 from there on.

    Loads then need no mask, whose predicates, with the addresses of rows, take registers that the sums need.
    columns  pointers [1, COLUMNS] to columns of the cache's first row; page: the tokens', which ``pages_held`` has given
    """
    token = tl.minimum(local, end - start - 1)
    if local.numel <= SIZES.page:
        return columns + cell_of(page, 0, start % SIZES.page, SIZES) + (token * SIZES.dim)[:, None]
    else:
        return columns + cells_at(page, 0, start, token, SIZES)[:, None]

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
from weft.kernels.paged_cache import cells_at, pages_at


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
    """

    latent: int
    rope: int
    heads: int
    queries: int
    block_m: int
    block_n: int
    least: int


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
    # No tokens: 0 / 1.
    divisor = tl.where(total > 0, total, 1.0)
    return acc / divisor[:, None], tl.where(total > 0, largest + tl.log2(divisor), float("-inf"))

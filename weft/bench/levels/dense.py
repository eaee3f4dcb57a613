"""Layer, embedding and head of a dense Qwen3 in plain torch, as functions that torch.compile accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

Sum = Callable[[torch.Tensor], torch.Tensor]


class LayerWeights(NamedTuple):
    """One rank's weights: qkv [(Hq + 2 Hkv) D, H], o [H, Hq D], gate_up [2 N, H], down [H, N], and norms."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Sizes(NamedTuple):
    """Sizes of one rank: Hq query heads and Hkv KV heads of D each."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Tokens(NamedTuple):
    """Tokens that a step computes: `new` of each of `batch` sequences.

    cos, sin   [batch or 1, new, 1, D] of their positions
    rows       [batch], positions [batch]: where decoding writes the cache; None: whole prompts, at 0 .. new
    mask       [batch, 1, 1, max_len] bool: positions visible to decoding; None with whole prompts
    """

    batch: int
    new: int
    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention(
    x: torch.Tensor, w: LayerWeights, keys: torch.Tensor, values: torch.Tensor, at: Tokens, sizes: Sizes
) -> torch.Tensor:
    """x [batch * new, H] → this rank's term of the sum over the ranks, of x's shape.

    keys, values [batch, Hkv, max_len, D].
    """
    heads, kv_heads, dim, eps = sizes
    q, k, v = F.linear(x, w.qkv).view(at.batch, at.new, -1, dim).split([heads, kv_heads, kv_heads], dim=2)
    q = rotate(F.rms_norm(q, (dim,), w.q_norm, eps), at.cos, at.sin)
    k = rotate(F.rms_norm(k, (dim,), w.k_norm, eps), at.cos, at.sin)
    if at.rows is None:
        keys[:, :, : at.new] = k.transpose(1, 2)
        values[:, :, : at.new] = v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        ).transpose(1, 2)
    else:
        keys[at.rows, :, at.positions] = k[:, 0]
        values[at.rows, :, at.positions] = v[:, 0]
        # The query heads of one KV head are rows of one attention, so that its keys are read once.
        packed = q.reshape(at.batch, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=at.mask)
    return F.linear(out.reshape(at.batch * at.new, heads * dim), w.o)


def mlp(x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
    """x [M, H] → this rank's term of the sum over the ranks, of x's shape."""
    gate, up = F.linear(x, w.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w.down)


def layer(
    x: torch.Tensor, more: torch.Tensor, w: LayerWeights, keys: torch.Tensor, values: torch.Tensor, at: Tokens,
    sizes: Sizes, summed: Sum,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Apply one layer. x + more are the hidden states before it, and after it.

    So the next layer's norm can be compiled together with the addition that one layer leaves to it.
    """
    x = x + more
    normed = F.rms_norm(x, x.shape[-1:], w.input_norm, sizes.eps)
    x = x + summed(attention(normed, w, keys, values, at, sizes))
    return x, summed(mlp(F.rms_norm(x, x.shape[-1:], w.post_norm, sizes.eps), w))


def summed_attention(
    x: torch.Tensor, w: LayerWeights, keys: torch.Tensor, values: torch.Tensor, at: Tokens, sizes: Sizes, summed: Sum
) -> torch.Tensor:
    return summed(attention(x, w, keys, values, at, sizes))


def summed_mlp(x: torch.Tensor, w: LayerWeights, summed: Sum) -> torch.Tensor:
    return summed(mlp(x, w))


def embed(tokens: torch.Tensor, weight: torch.Tensor, start: int, summed: Sum) -> torch.Tensor:
    local = tokens - start
    mine = (local >= 0) & (local < weight.shape[0])
    return summed(F.embedding(local.clamp(0, weight.shape[0] - 1), weight).masked_fill(~mine[:, None], 0))


def head(
    x: torch.Tensor, more: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, real: int, eps: float
) -> torch.Tensor:
    """This rank's logits [batch, V / W] in fp32, -inf for token ids past V."""
    logits = F.linear(F.rms_norm(x + more, x.shape[-1:], norm, eps), weight).float()
    logits[:, real:] = float("-inf")
    return logits


def best_words(logits: torch.Tensor, start: int) -> torch.Tensor:
    """[batch, 2]: this rank's largest logit and its token id, in fp32."""
    value, index = logits.max(dim=-1)
    return torch.stack((value, (index + start).float()), dim=-1)

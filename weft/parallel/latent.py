"""Latent attention (MLA) in torch's operations.

Prompts attend with expanded keys and values, decode steps with absorbed weights.

A token's row of the cache is (latent, rotary key), of all heads. kv_b expands a latent to each head's key and value: keys of a
decode step would cost more than its attention, so there the keys' half multiplies the queries, and the values' half the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.parallel.quantized import linear
from weft.parallel.rotary import apply_rotary, table_of
from weft.parallel.tensors import Matrix, MLAWeights

if TYPE_CHECKING:
    from weft.parallel.step import Chunk, Step


def attend(projected: Tensor, w: MLAWeights, step: Step, cache: tuple[Tensor, ...]) -> Tensor:
    """Norms, rotary embedding, cache write (padding: page 0), attention: [T, heads * value].

    projected  x @ qkv.T; cache: (rows [pages, 1, page_size, latent + rope],)
    """
    (q, q_rope), kv = queries(projected, w)
    angles = table_of(step.angles, 0)[step.positions]
    q_rope = rotated(q_rope, angles, w)
    latent, key = kv.split([w.latent, w.rope], dim=-1)
    latent = F.rms_norm(latent, w.kv_norm.shape, w.kv_norm, w.eps)
    rows = torch.cat((latent, rotated(key[:, None], angles, w)[:, 0]), dim=-1)
    page, offset = step.cells
    cache[0][page, 0, offset] = rows
    spread = step.spread
    if step.is_prefill:
        if spread is not None:
            cache = spread.gathered(w, cache, rows[:, None])
        return attend_to_prompts(torch.cat((q, q_rope), dim=-1), rows, w, step, cache)
    if spread is not None:
        cache, pages = spread.all_pages(w, cache, step.pages)
        step = replace(step, pages=pages)
    attended = attend_to_latents(torch.cat((absorbed(q, w), q_rope), dim=-1), w, step, cache)
    return with_values(attended, w)


def queries(
    projected: Tensor, w: MLAWeights, multiply: Callable[[Tensor, Matrix], Tensor] = linear
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((queries [T, heads, nope], their rotary parts [T, heads, rope] before rotation), rows of kv_a).

    multiply  (rows, weight) -> rows @ weight.T
    """
    q, kv = projected.split([projected.shape[1] - w.latent - w.rope, w.latent + w.rope], dim=-1)
    if w.q_b is not None:
        q = multiply(F.rms_norm(q, w.q_norm.shape, w.q_norm, w.eps), w.q_b)
    return q.unflatten(-1, (w.heads, w.head_dim)).split([w.nope, w.rope], dim=-1), kv


def rotated(x: Tensor, angles: Tensor, w: MLAWeights) -> Tensor:
    """x [T, heads, rope], rotated; partners halves apart."""
    return apply_rotary(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) if w.interleaved else x, angles)


def absorbed(q: Tensor, w: MLAWeights) -> Tensor:
    """Queries [T, heads, latent] in the space of latents, from parts without rotation."""
    return torch.bmm(q.transpose(0, 1), w.kv_b[:, : w.nope]).transpose(0, 1)


def with_values(attended: Tensor, w: MLAWeights) -> Tensor:
    """Results [T, heads * value] of weighted means of latents [T, heads, latent]."""
    return torch.bmm(attended.transpose(0, 1), w.kv_b[:, w.nope :].transpose(1, 2)).transpose(0, 1).flatten(1)


def rows_of(cache: tuple[Tensor, ...], pages: Tensor) -> Tensor:
    """[B, n * page_size, latent + rope] of a page table [B, n]: a copy"""
    return cache[0][pages.long()].flatten(1, 3)


def attend_to_latents(q: Tensor, w: MLAWeights, step: Step, cache: tuple[Tensor, ...]) -> Tensor:
    """Reference of ``ops.mla_decode_attention``, [T, heads, latent]; rows with length 0 are undefined."""
    keys = rows_of(cache, step.pages)[:, None]
    seen = torch.arange(keys.shape[2], device=q.device) < step.lengths.clamp(min=1)[:, None]
    # Heads are rows of one attention.
    mask, values = seen[:, None, None], keys[..., : w.latent]
    return F.scaled_dot_product_attention(q[:, None], keys, values, attn_mask=mask, scale=w.scale)[:, 0]


def attend_to_prompts(q: Tensor, rows: Tensor, w: MLAWeights, step: Step, cache: tuple[Tensor, ...]) -> Tensor:
    """Causal attention of a prefill by torch, [T, heads * value]: a launch for each chunk.

    q     [T, heads, nope + rope]
    rows  of the new tokens, as the cache has them
    """
    return torch.cat([attend_to_chunk(q, rows, w, step.pages, chunk, cache) for chunk in step.chunks])


def attend_to_chunk(
    q: Tensor, rows: Tensor, w: MLAWeights, pages: Tensor, chunk: Chunk, cache: tuple[Tensor, ...]
) -> Tensor:
    """``attend_to_prompts`` of one chunk; keys and values are expanded from all its tokens' latents."""
    batch, length, before, token, sequence = chunk
    whole, of_chunk = before + length, slice(token, token + batch * length)
    if before == 0:
        rows = rows[of_chunk].unflatten(0, (batch, length))
    else:
        table = pages[sequence : sequence + batch, : -(-whole // cache[0].shape[2])]
        rows = rows_of(cache, table)[:, :whole]
    keys, values = expanded(rows, w)
    q = q[of_chunk].unflatten(0, (batch, length)).transpose(1, 2)
    if before == 0:
        attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=w.scale)
    else:
        last = torch.arange(before, whole, device=q.device)[:, None]
        mask = torch.arange(whole, device=q.device) <= last
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=w.scale)
    return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def expanded(rows: Tensor, w: MLAWeights) -> tuple[Tensor, Tensor]:
    """Keys [B, heads, n, nope + rope] and values [B, heads, n, value] of rows [B, n, latent + rope]."""
    latent, rope = rows.split([w.latent, w.rope], dim=-1)
    heads = F.linear(latent, w.kv_b.flatten(0, 1)).unflatten(-1, (w.heads, -1)).transpose(1, 2)
    rope = rope[:, None].expand(-1, w.heads, -1, -1)
    return torch.cat((heads[..., : w.nope], rope), dim=-1), heads[..., w.nope :]

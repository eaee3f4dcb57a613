"""Latent attention (MLA) in weft's kernels, but for prompts, which attend by torch's operations.

GEMMs of each head, which absorb kv_b into queries and results, are torch's, and so is the norm of what q_a gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.kernels.block_cyclic import local_lengths
from weft.parallel.latent import absorbed, attend_to_prompts, queries, with_values
from weft.parallel.quantized import gemm_operands
from weft.parallel.rotary import table_of
from weft.parallel.tensors import Matrix, MLAWeights

if TYPE_CHECKING:
    from weft.parallel.context import SpreadPages
    from weft.parallel.step import Step


def attend(projected: Tensor, w: MLAWeights, step: Step, cache: tuple[Tensor, ...]) -> Tensor:
    """Norms, rotary embedding, cache write, attention: [T, heads * value]. By kernels.

    A decode step is five launches: mla_norm_rope, a GEMM of each head, mla_decode_attention in two, a GEMM of each head; with
    q_a a norm and a GEMM before. Where the cache is spread over the ranks, the queries of all heads are gathered, and results
    and lse sent to the owners of the heads, which merge them.
    """
    (q, q_rope), kv = queries(projected, w, _linear)
    places = table_of(step.angles, 0), step.positions, step.slots, cache[0].squeeze(1)
    q_rope, rows = ops.mla_norm_rope(q_rope, kv, w.kv_norm, w.eps, *places, interleaved=w.interleaved)
    if step.is_prefill:
        if step.spread is not None:
            cache = step.spread.gathered(w, cache, rows[:, None])
        return attend_to_prompts(torch.cat((q, q_rope), dim=-1), rows, w, step, cache)
    q = absorbed(q, w)
    if step.spread is not None:
        return with_values(_attend_spread(torch.cat((q, q_rope), dim=-1), w, step, places[-1], step.spread), w)
    attended, _ = ops.mla_decode_attention(q, q_rope, places[-1], step.pages, step.lengths, w.scale, step.queries)
    return with_values(attended, w)


def _linear(x: Tensor, weight: Matrix) -> Tensor:
    return ops.matmul(*gemm_operands(x, weight))


def _attend_spread(q: Tensor, w: MLAWeights, step: Step, cache: Tensor, spread: SpreadPages) -> Tensor:
    """Weighted means of latents [T, heads, latent] of this rank's heads, over the pages of all ranks.

    q  [T, heads, latent + rope]
    """
    team = spread.team
    lengths = local_lengths(step.lengths, team.rank, team.size, cache.shape[1])
    q, q_rope = spread.all_queries(q).split([w.latent, w.rope], dim=-1)
    out, lse = ops.mla_decode_attention(q, q_rope, cache, step.pages, lengths, w.scale)
    # By owner of the heads, [W, T, heads, ...]; then by rank whose tokens they are of.
    outs, lses = (ops.all_to_all(_by_owner(x, team.size), team) for x in (out, lse))
    return ops.merge_attention(outs, lses)[0]


def _by_owner(x: Tensor, world_size: int) -> Tensor:
    """[T, W * heads, ...] → [W, T, heads, ...], contiguous"""
    return x.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()

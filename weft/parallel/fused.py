"""Local work of a recipe in weft's kernels, a launch each but where a function says otherwise.

The functions are those of weft.parallel.plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import Fp8
from weft.ops.attention.parts import attention_after
from weft.parallel.plain import as_cached, attend_to_chunk, attend_to_prompts, attend_to_sequences
from weft.parallel.plain import silu_mul as plain_silu_mul
from weft.parallel.quantized import operands
from weft.parallel.sequences import Sequences
from weft.parallel.tensors import (
    AttentionWeights,
    ExpertRows,
    MLPWeights,
    MoEWeights,
    NormWeights,
    SplitK,
    VocabWeights,
    tensor_of,
)
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from weft.parallel.step import Step

NAME, FUSED = "fused", True
# Cached tokens whose keys and values are copied out of their pages at a time: for 4 KV heads of 128 134 MB.
CACHED_AT_ONCE = 65536


def embed(tokens: Tensor, table: VocabWeights) -> Tensor:
    """Rows of this rank's part of the embedding; zeros for token ids of other ranks."""
    return ops.vocab_embedding(tokens, table.weight, table.start)


def add_norm(x: Tensor, residual: Tensor | None, norm: NormWeights) -> tuple[Tensor, Tensor]:
    """(normed, hidden): hidden = x + residual, normed = RMSNorm(hidden). No residual is one of zeros."""
    residual = torch.zeros_like(x) if residual is None else residual
    return ops.add_rms_norm(x, residual, norm.weight, norm.eps)


def matmul_split(x: Tensor | DeferredNorm, weight: Tensor | Fp8) -> Tensor | SplitK | DeferredNorm:
    """x @ weight.T, or what becomes it in the kernel behind, where that is sooner."""
    product = ops.matmul_parts(*operands(x, weight))
    return SplitK(product) if isinstance(product, Tensor) and product.dim() == 3 else product


def project(x: Tensor | DeferredNorm, w: AttentionWeights, step: Step) -> Tensor | SplitK | DeferredNorm:
    """Queries, keys and values of all tokens: [T, (heads + 2 kv_heads) * head_dim], for ``attend``."""
    # cuDNN, and a prefill over a spread cache, take the values as they are.
    whole = step.by_cudnn(w) or (step.spread is not None and step.is_prefill)
    return ops.matmul(*operands(x, w.qkv)) if whole else matmul_split(x, w.qkv)


def attend(
    qkv: Tensor | SplitK | DeferredNorm, w: AttentionWeights, step: Step | Sequences, cache: tuple[Tensor, ...] | None
) -> Tensor:
    """Bias, norm, rotary embedding, cache write, attention: [T, heads * head_dim].

    A prefill is two launches, more where cuDNN attends in parts. Where the cache is spread over the ranks, a prefill after
    cached tokens or without cuDNN gathers pages between the two, and a decode step the queries of all heads.

    cache  as for weft.parallel.plain
    """
    if isinstance(step, Sequences):
        return attend_to_sequences(qkv, w, step)
    spread = step.spread
    cache, scales = cache[:2], dict(zip(("k_scale", "v_scale"), cache[2:], strict=False))
    projected = qkv if isinstance(qkv, DeferredNorm) else tensor_of(qkv)
    head = w.q_norm, w.k_norm, w.eps, step.angles
    if not step.is_prefill and spread is None:
        places, options = (*cache, step.pages, step.lengths), {"bias": w.bias, "window": w.window, **scales}
        attended = ops.decode_attention(projected, *head, *places, tickets=step.tickets, **options)
    elif step.by_cudnn(w) or (step.is_prefill and spread is not None):
        places = step.positions, step.slots, *cache
        heads = ops.qk_norm_rope(projected, *head, *places, with_keys=True, bias=w.bias, **scales)
        q, keys, values = heads.tensor_split((w.heads, w.heads + w.kv_heads), dim=1)
        if w.bias is None:
            values = projected[:, -w.kv_heads * w.head_dim :]
        if spread is not None:
            # Values are [T, kv_heads, head_dim] already where they come with the keys.
            keys, values = (x.reshape(keys.shape)[:, spread.heads(w)] for x in (keys, values))
        if spread is not None and (step.after_cached or not step.by_cudnn(w)):
            new = (as_cached(x, scales.get(name)) for x, name in ((keys, "k_scale"), (values, "v_scale")))
            cache = spread.gathered(w, cache, *new)
        if not step.by_cudnn(w):
            attended = ops.paged_prefill_attention(q, *cache, step.pages, step.spans, window=w.window, **scales)
        elif step.after_cached:
            attended = attend_after_cached(q, keys, values, step, (*cache, *scales.values()))
        else:
            attended = attend_to_prompts(q, keys, values, step, cache)
    else:
        q = ops.qk_norm_rope(projected, *head, step.positions, step.slots, *cache, bias=w.bias, **scales)
        if spread is not None:
            places = *cache, step.pages, step.lengths, spread.team
            options = {"window": w.window, **scales}
            return ops.sharded_decode_attention(spread.all_queries(q), *places, **options).flatten(1)
        attended = ops.paged_prefill_attention(q, *cache, step.pages, step.spans, window=w.window, **scales)
    return attended.reshape(step.tokens, w.heads * w.head_dim)


def attend_after_cached(q: Tensor, keys: Tensor, values: Tensor, step: Step, cache: tuple[Tensor, ...]) -> Tensor:
    """Causal attention of a prefill by cuDNN, [T, heads, head_dim]: in parts after cached tokens.

    q [T, heads, head_dim], keys [T, kv_heads, head_dim] and values, also [T, kv_heads * head_dim]: of all tokens of the pass
    cache  keys and values of the pages that ``step.pages`` names, and of an fp8 cache their scales

    Cached keys are copied out of their pages, CACHED_AT_ONCE tokens at a time at most. New ones do not come from the cache, so
    an fp8 cache does not round them.
    """
    values, found = values.view(keys.shape), []
    for chunk in step.chunks:
        if chunk.before == 0:
            found.append(attend_to_chunk(q, (keys, values), cache, step.pages, chunk, None))
            continue
        for number in range(chunk.batch):
            first = chunk.first_token + number * chunk.length
            mine = slice(first, first + chunk.length)
            cached = cached_parts(cache, step.pages[chunk.first_sequence + number], chunk.before, q.dtype)
            found.append(attention_after(q[mine], (keys[mine], values[mine]), cached, q.shape[-1] ** -0.5))
    return found[0] if len(found) == 1 else torch.cat(found)


def cached_parts(
    cache: tuple[Tensor, ...], pages: Tensor, before: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [tokens, kv_heads, head_dim] of ``before`` tokens in ``pages``, some at a time."""
    size = cache[0].shape[2]
    # Equal parts, none of a few tokens.
    number = cdiv(before, size)
    at_once = cdiv(number, cdiv(number * size, CACHED_AT_ONCE))
    for begin in range(0, number, at_once):
        some = pages[begin : begin + at_once].long()
        count = min(before - begin * size, at_once * size)
        parts = zip(cache[:2], cache[2:] or (None, None), strict=True)
        keys, values = (pages_of(part, some, dtype, scale)[:count] for part, scale in parts)
        yield keys, values


def pages_of(cache: Tensor, pages: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """[pages, heads, page_size, head_dim] and n of them → [n * page_size, heads, head_dim]

    In memory head by head, as cuDNN reads them.
    """
    bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # torch does not index e4m3 on all devices
    found = bits.transpose(0, 1).index_select(1, pages).view(cache.dtype)
    found = found if scale is None else (found.float() * scale).to(dtype)
    return found.flatten(1, 2).transpose(0, 1)


def gated(x: Tensor | DeferredNorm, w: MLPWeights) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T). With many rows cuBLAS and silu_mul."""
    return ops.matmul_silu_mul(*operands(x, w.gate_up))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up"""
    return ops.silu_mul(gate_up)


def route(x: Tensor, w: MoEWeights) -> ops.Routing:
    """Choices of x's rows, in two launches."""
    return choose(ops.matmul(x, w.router), w)[0]


def choose(found: Tensor, w: MoEWeights) -> tuple[ops.Routing, Tensor | None]:
    """(choices, logits of the shared expert's gate or None) of rows by ``found``, those times the router."""
    logits, gate = w.logits(found)
    return ops.route(logits, bias=w.bias, **w.gating._asdict()), gate


def experts(x: Tensor, w: MoEWeights) -> Tensor:
    """This rank's summand of a mixture of experts: what its experts, or slices of them, add to x's rows.

    Six launches, four with few rows by the plan of matmul_route_schedule, and two of a shared expert, three with many rows.
    """
    return summand_of(expert_rows(x, w))


def expert_rows(x: Tensor, w: MoEWeights) -> ExpertRows:
    """``experts`` without the last two launches, the second GEMM and the sum."""
    gating = {"bias": w.bias, **w.gating._asdict()}
    routing, schedule, gate = ops.matmul_route_schedule(x, w.router, w.experts, tickets=w.tickets, **gating)
    h = ops.grouped_matmul_silu_mul(*operands(x, w.gate_up), schedule)
    shared = None if w.shared is None else ops.matmul(*operands(_shared_gated(x, w.shared), w.shared.down))
    return ExpertRows(h, w.down, schedule, routing, w.experts, shared, gate)


def summand_of(x: ExpertRows) -> Tensor:
    """This rank's summand of experts' rows: two launches."""
    y = ops.grouped_matmul(*operands(x.h, x.down), x.schedule)
    return ops.moe_sum(y, x.routing, x.experts, shared=x.shared, gate=x.gate)


def _shared_gated(x: Tensor, w: MLPWeights) -> Tensor:
    """``gated``, by operations that have a backward if gradients are asked for."""
    if torch.is_grad_enabled() and (x.requires_grad or getattr(w.gate_up, "requires_grad", False)):
        return plain_silu_mul(ops.matmul(x, w.gate_up))
    return ops.matmul_silu_mul(*operands(x, w.gate_up))


def logits(x: Tensor | DeferredNorm, head: VocabWeights) -> Tensor:
    """This rank's logits in x's dtype; -inf for padding of the vocabulary."""
    found = ops.matmul(x, head.weight)
    if head.real < head.weight.shape[0]:
        found[:, head.real :] = float("-inf")
    return found

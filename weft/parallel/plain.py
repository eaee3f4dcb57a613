"""Local work of a recipe in torch's operations, for the reference and for simulator tests.

The functions are the same as in weft.parallel.fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.moe.route import choices_by_torch
from weft.ops.moe.routing import ClampedSwiGLU, Routing
from weft.parallel import latent
from weft.parallel.delta_net import delta_net, with_rates
from weft.parallel.quantized import expert_of, linear
from weft.parallel.rotary import apply_rotary, table_of
from weft.parallel.sequences import Sequences
from weft.parallel.tensors import (
    PLAIN_SCORES,
    AttentionWeights,
    DeltaColumns,
    DeltaWeights,
    Gating,
    Matrix,
    MLAWeights,
    MLPWeights,
    MoEWeights,
    NormWeights,
    Scores,
    VocabWeights,
)

if TYPE_CHECKING:
    from weft.parallel.step import Chunk, Step

NAME, FUSED = "unfused", False
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""Name of an activation of a gate → torch's operation."""


def relu2(x: Tensor) -> Tensor:
    """max(x, 0) ** 2"""
    return F.relu(x).square()


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010), by two trained numbers: alpha_p of positive elements, alpha_n of the rest."""
    positive, negative = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = (torch.expm1(torch.minimum(x, eps)) - x) * negative
    return torch.where(x > 0, positive * x * x, below) + beta * x


UNGATED: dict[str, Callable[..., Tensor]] = {"relu2": relu2, "xielu": xielu}
"""Name of an activation of an MLP without a gate, down(activation(up(x))) → torch's operations."""


def embed(tokens: Tensor, table: VocabWeights) -> Tensor:
    """Rows of this rank's part of the embedding; zeros for token ids of other ranks."""
    rows, local = table.weight.shape[0], tokens - table.start
    held = (local >= 0) & (local < rows)
    return scaled(F.embedding(local.clamp(0, rows - 1), table.weight).masked_fill(~held[:, None], 0), table.scale)


def scaled(x: Tensor, factor: float | None) -> Tensor:
    """x * factor; x itself without one."""
    return x if factor is None else x * factor


def add_norm(
    x: Tensor, residual: Tensor | None, norm: NormWeights | None, weight: Matrix | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, hidden): hidden = x + residual, normed = RMSNorm(hidden), or hidden without a norm.

    In 16 bits for any ``weight``.
    """
    hidden = x if residual is None else x + residual
    return rms_norm(hidden, norm), hidden


def rms_norm(x: Tensor, norm: NormWeights | None) -> Tensor:
    """RMSNorm of rows, in x's dtype, also by a weight in fp32; x itself without a norm."""
    if norm is None:
        return x
    wide = norm.weight.dtype != x.dtype
    return F.rms_norm(x.float() if wide else x, norm.weight.shape, norm.weight, norm.eps).to(x.dtype)


def output(x: Tensor, norm: NormWeights | None, scale: float | None) -> Tensor:
    """Rows that attention or MLP give, as they are added to the residual: normed, then scaled."""
    return scaled(rms_norm(x, norm), scale)


def project(
    x: Tensor, w: AttentionWeights | MLAWeights | DeltaWeights, step: Step | Sequences
) -> Tensor | DeltaColumns:
    """Queries, keys and values of all tokens: [T, (heads + 2 kv_heads) * head_dim], for ``attend``."""
    return with_rates(linear(x, w.qkv), w, lambda rates: F.linear(x, rates))


def norm_all_heads(
    qkv: Tensor, w: AttentionWeights, mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, AttentionWeights]:
    """(qkv with q and k normed over all heads of all ranks, the weights that remain to be used).

    Both as they are for weights without such norms.
    mean  mean over the ranks of a tensor [T, 2]: ranks that share a KV head count it alike
    """
    if not w.norm_all_heads:
        return qkv, w
    q, k, v = qkv.split([n * w.head_dim for n in (w.heads, w.kv_heads, w.kv_heads)], dim=-1)
    squares = mean(torch.stack([x.float().square().mean(-1) for x in (q, k)], dim=-1))
    q, k = (
        (x.float() * (squares[:, at, None] + w.eps).rsqrt() * weight.float()).to(x.dtype)
        for at, (x, weight) in enumerate(((q, w.q_norm), (k, w.k_norm)))
    )
    return torch.cat((q, k, v), dim=-1), w._replace(q_norm=None, k_norm=None, norm_all_heads=False)


def attend(
    qkv: Tensor | DeltaColumns,
    w: AttentionWeights | MLAWeights | DeltaWeights,
    step: Step | Sequences,
    cache: tuple[Tensor, ...] | None,
) -> Tensor:
    """Bias, norm, rotary embedding, cache write (padding: page 0), attention: [T, heads * head_dim].

    cache  (keys, values), or of an fp8 cache (keys, values, k_scale, v_scale); of latents (rows,); None for ``Sequences``
    """
    if isinstance(w, MLAWeights):
        return latent.attend(qkv, w, step, cache)
    if isinstance(w, DeltaWeights):
        return delta_net(qkv, w, step, cache)
    if w.gated:
        qkv, gate = without_gates(qkv, w)
        return attend(qkv, w._replace(gated=False), step, cache) * gate.sigmoid()
    if isinstance(step, Sequences):
        return attend_to_sequences(qkv, w, step)
    keys, values, *scales = cache
    k_scale, v_scale = scales or (None, None)
    spread = step.spread
    qkv = qkv if w.bias is None else qkv + w.bias
    heads = qkv.view(step.tokens, -1, w.head_dim)
    q, k, v = heads.split([w.heads, w.kv_heads, w.kv_heads], dim=1)
    angles = table_of(step.angles, w.rotary)[step.positions]
    page, offset = step.cells
    k = normed_and_turned(k, w.k_norm, w, partial(apply_rotary, angles=angles))
    keys[page, :, offset], values[page, :, offset] = as_cached(k, k_scale), as_cached(v, v_scale)
    q = normed_and_turned(q, w.q_norm, w, partial(apply_rotary, angles=angles))
    if spread is not None:
        k, v = (x[:, spread.heads(w)] for x in (k, v))
    if spread is not None and step.is_prefill:
        keys, values = spread.gathered(w, cache, as_cached(k, k_scale), as_cached(v, v_scale))
    elif spread is not None:
        (keys, values), pages = spread.all_pages(w, cache, step.pages)
        step = replace(step, pages=pages)
    if step.is_prefill:
        attended = attend_to_prompts(q, k, v.flatten(1), step, (keys, values, *scales), w.scores)
    else:
        attended = attend_to_pages(q, keys, values, step.pages, step.lengths, w.scores, k_scale, v_scale)
    return attended.reshape(step.tokens, w.heads * w.head_dim)


def without_gates(qkv: Tensor, w: AttentionWeights) -> tuple[Tensor, Tensor]:
    """(queries, keys and values; gates [T, heads * head_dim]) of gated attention, columns of ``qkv``."""
    gate, qkv = qkv.tensor_split((w.heads * w.head_dim,), dim=-1)
    return qkv, gate


def attend_to_sequences(qkv: Tensor, w: AttentionWeights, step: Sequences) -> Tensor:
    """``attend`` without a paged cache; rows of both in the order in which the recipe has them."""
    if step.shards > 1:  # by rank, then by sequence
        qkv = qkv.unflatten(0, (step.shards, step.batch, -1)).transpose(0, 1).reshape(step.tokens, -1)
    qkv = qkv if w.bias is None else qkv + w.bias
    q, k, v = qkv.view(step.tokens, -1, w.head_dim).split([w.heads, w.kv_heads, w.kv_heads], dim=1)
    angles = table_of(step.angles, w.rotary).expand(step.batch, -1, -1).flatten(0, 1)
    rotate = partial(apply_rotary, angles=angles)
    q, k = (normed_and_turned(x, norm, w, rotate) for x, norm in ((q, w.q_norm), (k, w.k_norm)))
    q, k, v = (x.unflatten(0, (step.batch, step.length)).transpose(1, 2) for x in (q, k, v))
    attended = attend_causally(q, k, v, w.scores) if step.attend is None else step.attend(q, k, v)
    if step.shards > 1:
        attended = attended.unflatten(1, (step.shards, -1)).transpose(0, 1)
    return attended.reshape(step.tokens, w.heads * w.head_dim)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Attention of whole sequences, each token to its window, itself included.

    q, k, v: [batch, heads or kv_heads, length, head_dim] -> [batch, length, heads, head_dim]
    """
    length, windowed = q.shape[2], scores.window is not None and scores.window < q.shape[2]
    mask = causal_mask(0, length, scores.window, q.device) if windowed else None
    return softmax_attention(q, k, v, scores, mask).transpose(1, 2)


def causal_mask(before: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, before + length]: True where a token after ``before`` attends to a key."""
    end = before + length
    distance = torch.arange(before, end, device=device)[:, None] - torch.arange(end, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def softmax_attention(q: Tensor, keys: Tensor, values: Tensor, scores: Scores, seen: Any = None) -> Tensor:
    """softmax(scores) @ values, of the scores where ``seen`` [..., length, keys]; None: causal.

    q [batch, heads, length, head_dim], keys and values [batch, kv_heads, keys, head_dim]. Rows of a head of q may be its group
    of query heads, whose sinks these are then.
    """
    if scores.softcap is None and scores.sinks is None:
        causal, grouped = seen is None, q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, is_causal=causal, scale=scores.scale, enable_gqa=grouped
        )
    seen = causal_mask(0, q.shape[2], None, q.device) if seen is None else seen
    keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
    x = (q @ keys.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    x = x if scores.softcap is None else scores.softcap * torch.tanh(x / scores.softcap)
    x = x.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(q.shape[1], -1, 1)
        x = torch.cat((x, sinks.expand(*x.shape[:-1], 1)), dim=-1)
    shares = x.softmax(-1)[..., : keys.shape[2]]
    return shares.to(values.dtype) @ values


def as_cached(x: Tensor, scale: Tensor | None) -> Tensor:
    """``x`` as a cache holds it: as it is, or with a scale as e4m3 bytes of x / scale, saturated."""
    return x if scale is None else (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def norm_of_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of each head of x [T, heads, head_dim]; x itself without a weight."""
    return x if weight is None else rms_norm(x, NormWeights(weight, eps))


def normed_and_turned(
    x: Tensor, norm: Tensor | None, w: AttentionWeights, rotate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Heads of queries or keys after their norm and the rotary embedding, in the order of ``w``."""
    if w.unrotated is not None:
        return norm_of_heads(rotate(x), norm, w.eps)
    return rotate(norm_of_heads(x, norm, w.eps))


def gated(x: Tensor, w: MLPWeights) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), or with another activation."""
    return activated(linear(x, w.gate_up), w)


def activated(projected: Tensor, w: MLPWeights) -> Tensor:
    """Rows that ``w.down`` takes, of x @ w.gate_up.T, in 16 bits for any form of it."""
    if w.activation in UNGATED:
        return UNGATED[w.activation](projected, *w.activation_weights)
    return silu_mul(projected, w.activation)


def silu_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """silu(gate) * up, or with another activation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def route(x: Tensor, w: MoEWeights) -> Routing:
    """Choices of x's rows."""
    return choose(F.linear(x, w.router), w)[0]


def choose(routed: Tensor, w: MoEWeights) -> tuple[Routing, Tensor | None]:
    """(choices, logits of the shared expert's gate or None) by ``routed``, rows times the router."""
    logits, gate = w.logits(routed)
    ids, weights = routing_of(logits, w.bias, w.gating)
    return Routing(ids.int(), weights), gate


def experts(x: Tensor, w: MoEWeights) -> Tensor:
    """This rank's summand of a mixture of experts: each computes all rows, and counts where it was chosen."""
    (ids, weights), gate = choose(F.linear(x, w.router), w)
    total = torch.zeros_like(x)
    for local in range(w.experts.count):
        weight = weights.masked_fill(ids != w.experts.first + local, 0).sum(-1, keepdim=True)
        gate_up = with_bias(linear(x, expert_of(w.gate_up, local)), w.gate_up_bias, local)
        h = silu_mul(gate_up) if w.swiglu is None else clamped_swiglu(gate_up, w.swiglu)
        total = total + with_bias(linear(h, expert_of(w.down, local)), w.down_bias, local) * weight
    return total if w.shared is None else total + shared_expert(x, w.shared, gate)


def with_bias(x: Tensor, bias: Tensor | None, expert: int | Tensor) -> Tensor:
    """x + bias[expert], of one expert or of each row's; x without biases."""
    return x if bias is None else x + bias[expert]


def clamped_swiglu(gate_up: Tensor, swiglu: ClampedSwiGLU) -> Tensor:
    """(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit)"""
    alpha, limit = swiglu
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def shared_expert(x: Tensor, w: MLPWeights, gate: Tensor | None) -> Tensor:
    """This rank's summand of an MLP of all tokens, times sigmoid(gate [T]) if there is one."""
    y = linear(gated(x, w), w.down)
    return y if gate is None else y * gate.sigmoid()[:, None]


def routing_of(logits: Tensor, bias: Tensor | None, gating: Gating) -> tuple[Tensor, Tensor]:
    """``ops.route`` by torch: (ids [T, k], weights [T, k])."""
    ids, weights = choices_by_torch(logits.float(), bias, gating)
    return ids, weights.to(logits.dtype)


def logits(x: Tensor, head: VocabWeights) -> Tensor:
    """This rank's logits in fp32, -inf for padding of the vocabulary."""
    return adjusted_logits(linear(x, head.weight), head).float()


def adjusted_logits(columns: Tensor, head: VocabWeights) -> Tensor:
    """Logits divided and softly capped as the head says, -inf for padding of the vocabulary."""
    columns = columns if head.divisor is None else columns / head.divisor
    columns = columns if head.softcap is None else (columns / head.softcap).tanh() * head.softcap
    if head.real < head.weight.shape[0]:
        columns[:, head.real :] = float("-inf")
    return columns


def gather_pages(cache: Tensor, pages: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """[pages, heads, page_size, head_dim] and a table [B, n] → [B, heads, n * page_size, head_dim]: a copy

    scale  of an fp8 cache, whose bytes times it become ``dtype``
    """
    _, heads, page_size, head_dim = cache.shape
    rows = cache[pages.long()].transpose(1, 2)
    rows = rows if scale is None else (rows.float() * scale).to(dtype)
    return rows.reshape(len(pages), heads, pages.shape[1] * page_size, head_dim)


def attend_to_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    scores: Scores = PLAIN_SCORES,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Reference of ``ops.paged_attention``, [B, heads, head_dim]; rows with length 0 are undefined."""
    batch, heads, head_dim = q.shape
    keys, values = (gather_pages(cache, pages, q.dtype, scale) for cache, scale in ((keys, k_scale), (values, v_scale)))
    at, lengths = torch.arange(keys.shape[2], device=q.device), lengths.clamp(min=1)[:, None]
    seen = at < lengths
    if scores.window is not None:
        seen &= at >= lengths - scores.window
    # Query heads of one KV head are rows of one attention.
    q = q.view(batch, keys.shape[1], -1, head_dim)
    return softmax_attention(q, keys, values, scores, seen[:, None, None]).reshape(batch, heads, head_dim)


def attend_to_prompts(
    q: Tensor, keys: Tensor, values: Tensor, step: Step, cache: tuple[Tensor, ...], scores: Scores = PLAIN_SCORES
) -> Tensor:
    """Causal attention of a prefill by torch, [T, heads, head_dim]: a launch for each chunk.

    q [T, heads, head_dim], keys [T, kv_heads, head_dim] and values [T, kv_heads * head_dim]: of all tokens of the pass
    """
    attended = [attend_to_chunk(q, (keys, values), cache, step.pages, chunk, scores) for chunk in step.chunks]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def attend_to_chunk(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    cache: tuple[Tensor, ...],
    pages: Tensor,
    chunk: Chunk,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """``attend_to_prompts`` of one chunk. ``new``: keys and values, for new prompts."""
    batch, length, before, token, sequence = chunk
    whole_length = before + length

    def of_chunk(x: Tensor) -> Tensor:
        rows = x[token : token + batch * length]
        return rows.view(batch, length, -1, q.shape[-1]).transpose(1, 2)

    q = of_chunk(q)
    windowed = scores.window is not None and scores.window < whole_length
    if before == 0 and not windowed:
        attended = softmax_attention(q, *map(of_chunk, new), scores)
    else:
        table = pages[sequence : sequence + batch, : -(-whole_length // cache[0].shape[2])]
        parts = zip(cache[:2], cache[2:] or (None, None), strict=True)
        keys, values = (gather_pages(part, table, q.dtype, scale)[:, :, :whole_length] for part, scale in parts)
        # torch's lower-right mask does not support grouped heads.
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
        if windowed or scores.softcap is not None or scores.sinks is not None:
            mask = causal_mask(before, length, scores.window, q.device)
        else:
            from torch.nn.attention.bias import causal_lower_right  # late: it loads torch._dynamo, for two seconds

            mask = causal_lower_right(length, whole_length)
        attended = softmax_attention(q, keys, values, scores, mask)
    return attended.transpose(1, 2).flatten(0, 1)

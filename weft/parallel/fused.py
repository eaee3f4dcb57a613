"""Local work of a recipe in weft's kernels, a launch each but where a function says otherwise.

The functions are the same as in weft.parallel.plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import Fp8, RowFormat, RowsBeside, quantized_rows
from weft.ops.attention.parts import attention_after
from weft.ops.attention.qk_norm_rope import heads_dtype
from weft.ops.elementwise.silu_mul import MAX_TOKEN
from weft.ops.local import capabilities_of
from weft.parallel import fused_latent
from weft.parallel.delta_net import parts_of, with_rates
from weft.parallel.plain import (
    UNGATED,
    adjusted_logits,
    as_cached,
    attend_to_chunk,
    attend_to_prompts,
    scaled,
    without_gates,
)
from weft.parallel.plain import activated as plain_activated
from weft.parallel.plain import attend as plain_attend
from weft.parallel.quantized import gemm_operands, grouped_operands, rows_between, rows_for
from weft.parallel.rotary import table_of
from weft.parallel.sequences import Sequences
from weft.parallel.tensors import (
    PLAIN_SCORES,
    AttentionWeights,
    DeltaColumns,
    DeltaWeights,
    ExpertRows,
    Matrix,
    MLAWeights,
    MLPWeights,
    MoEWeights,
    NextWeights,
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
    return scaled(ops.vocab_embedding(tokens, table.weight, table.start), table.scale)


def add_norm(
    x: Tensor, residual: Tensor | None, norm: NormWeights | None, weight: NextWeights = None, *, invariant: bool = False
) -> tuple[Tensor | Fp8 | RowsBeside, Tensor]:
    """(normed, hidden): hidden = x + residual, normed = RMSNorm(hidden). No residual is one of zeros.

    Without a norm normed is hidden, by torch's addition.
    weight  of the GEMM that takes the normed rows, in the form that it asks for; None: of 16 bits
    invariant  of ``ops.add_rms_norm``
    """
    if norm is None:
        hidden = x if residual is None else x + residual
        return hidden, hidden
    return ops.add_rms_norm(x, residual, norm.weight, norm.eps, fp8=rows_for(weight, x.dtype), invariant=invariant)


def output(x: Tensor, norm: NormWeights | None, scale: float | None) -> Tensor:
    """Rows of attention or MLP as they are added to the residual: normed, then scaled, a launch each."""
    return scaled(x if norm is None else add_norm(x, None, norm)[0], scale)


def matmul_split(x: Tensor | DeferredNorm, weight: Matrix) -> Tensor | SplitK | DeferredNorm:
    """x @ weight.T, or what the next kernel makes it from, where that is sooner."""
    product = ops.matmul_parts(*gemm_operands(x, weight))
    return SplitK(product) if isinstance(product, Tensor) and product.dim() == 3 else product


def project(
    x: Tensor | Fp8 | RowsBeside | DeferredNorm, w: AttentionWeights | MLAWeights | DeltaWeights, step: Step
) -> Tensor | SplitK | DeferredNorm | DeltaColumns:
    """Queries, keys and values of all tokens: [T, (heads + 2 kv_heads) * head_dim], for ``attend``."""
    x, beside = x if isinstance(x, RowsBeside) else (x, x)
    rows = beside.scaled if isinstance(beside, DeferredNorm) else beside
    if not projects_whole(w, step, rows.dtype):
        return matmul_split(x, w.qkv)
    return with_rates(ops.matmul(*gemm_operands(x, w.qkv)), w, lambda rates: ops.matmul(beside, rates))


def projects_whole(w: AttentionWeights | MLAWeights | DeltaWeights, step: Step, dtype: torch.dtype) -> bool:
    """True if ``attend`` takes the projection as one tensor, with no scale left to be applied.

    dtype  of the rows that are projected
    """
    # Their columns go to several kernels.
    if isinstance(w, (DeltaWeights, MLAWeights)) or w.gated or w.norm_all_heads or w.unrotated is not None:
        return True
    # Beside a norm in fp32 nothing but qkv says what 16 bits an fp8 cache is of.
    if w.q_norm is not None and w.q_norm.dtype == torch.float32 != dtype:
        return True
    # cuDNN, and a prefill over a spread cache, take the values as they are.
    return step.by_cudnn(w) or (step.spread is not None and step.is_prefill)


def attend(
    qkv: Tensor | SplitK | DeferredNorm | DeltaColumns,
    w: AttentionWeights | MLAWeights | DeltaWeights,
    step: Step | Sequences,
    cache: tuple[Tensor, ...] | None,
) -> Tensor | Fp8:
    """Bias, norm, rotary embedding, cache write, attention: [T, heads * head_dim], as ``w.o`` takes it.

    A prefill is two launches, more where cuDNN attends in parts. Where the cache is spread over the ranks, a prefill after
    cached tokens or without cuDNN gathers pages between the two, and a decode step the queries of all heads. By cuDNN, of
    several new tokens of a sequence, and where the cache is spread, rows have 16 bits, also for an fp8 ``w.o``.

    Gated attention of one new token of a sequence is the same launches, unless the cache is spread; otherwise one more, which
    multiplies rows of 16 bits by the gates. Norms after the rotary embedding are two launches more, one with biases.

    cache  as for weft.parallel.plain
    """
    if isinstance(w, DeltaWeights):
        return _delta_net(qkv, w, step, cache)
    if isinstance(w, MLAWeights):
        return fused_latent.attend(tensor_of(qkv), w, step, cache)
    if isinstance(step, Sequences):  # torch's operations, which have gradients
        return plain_attend(qkv, w, step, cache)
    projected, gate = qkv if isinstance(qkv, DeferredNorm) else tensor_of(qkv), None
    if w.gated:
        projected, gate = without_gates(projected, w)
    if w.unrotated is not None:
        projected, w = _turned(projected, w, step, cache)
    cache, scales = cache[:2], _scales_of(cache)
    if step.by_cudnn(w) or (step.is_prefill and step.spread is not None):
        attended = _attend_with_keys(projected, w, step, cache, scales)
    elif not step.is_prefill and step.spread is None and step.queries == 1:
        return _decode(projected, gate, w, step, cache, scales)
    else:
        attended = _attend_to_pages(projected, w, step, cache, scales)
    if isinstance(attended, Fp8):
        return attended
    rows = attended.reshape(step.tokens, w.heads * w.head_dim)
    if gate is None:
        return rows
    return ops.sigmoid_mul(rows, gate, fp8=_elementwise_format(w.last_matrix, rows.dtype, rows.shape[1]))


def _delta_net(projected: Tensor | DeltaColumns, w: DeltaWeights, step: Step, kept: ops.DeltaSlots) -> Tensor | Fp8:
    """``weft.parallel.delta_net.delta_net``: one launch of a decode step, five of a prefill."""
    qkv, z, gates = parts_of(projected, w)
    if not step.is_prefill:
        tokens = ops.DeltaTokens(step.lengths, step.state_slots, step.state_pending, step.most_pending)
        options = {"fp8": rows_for(w.o, z.dtype)}
        return ops.gated_delta_net_step(qkv, z, gates, w.conv, (w.norm.weight, w.norm.eps), kept, tokens, **options)
    mixed = ops.causal_conv1d(qkv, w.conv, kept.inputs, step.state_chunks)
    out = ops.gated_delta_rule(mixed, gates, kept.state, step.state_chunks)
    return ops.rms_norm_gated(out, z, w.norm.weight, w.norm.eps).flatten(1)


Scales = dict[str, Tensor]


def _scales_of(cache: tuple[Tensor, ...]) -> Scales:
    return dict(zip(("k_scale", "v_scale"), cache[2:], strict=False))


def _turned(
    projected: Tensor, w: AttentionWeights, step: Step, cache: tuple[Tensor, ...]
) -> tuple[Tensor, AttentionWeights]:
    """(projection with its bias, q and k turned; weights with which kernels norm heads and turn nothing).

    Kernels norm heads before they turn them: here one turns them without a norm, and the next norms without turning. Keys that
    this one writes into the cache are written again, with their norms, before anything reads them. Without a bias one of zeros
    is added, so that values come with the heads.
    """
    bias = projected.new_zeros(projected.shape[1]) if w.bias is None else w.bias
    places = table_of(step.angles, w.rotary), step.positions, step.slots, *cache[:2]
    heads = ops.qk_norm_rope(projected, None, None, w.eps, *places, with_keys=True, bias=bias, **_scales_of(cache))
    return heads.flatten(1), w._replace(bias=None, rotary=w.unrotated, unrotated=None)


def _scores(w: AttentionWeights) -> dict[str, Any]:
    """Options of all attention ops that say how scores become weights."""
    return {"scale": w.scale, "window": w.window, "softcap": w.softcap, "sinks": w.sinks}


def _head(w: AttentionWeights, step: Step) -> tuple[Tensor | None, Tensor | None, float, Tensor]:
    return w.q_norm, w.k_norm, w.eps, table_of(step.angles, w.rotary)


def _decode(
    projected: Tensor | DeferredNorm,
    gate: Tensor | None,
    w: AttentionWeights,
    step: Step,
    cache: tuple[Tensor, ...],
    scales: Scales,
) -> Tensor | Fp8:
    """Gated attention of one new token of each sequence, in one launch."""
    places, options = (*cache, step.pages, step.lengths), {"bias": w.bias, "gate": gate, **_scores(w), **scales}
    rows = projected.scaled if isinstance(projected, DeferredNorm) else projected
    options["fp8"] = rows_for(w.last_matrix, heads_dtype(rows, cache[0], w.q_norm, w.bias))
    attended = ops.decode_attention(projected, *_head(w, step), *places, tickets=step.tickets, **options)
    return attended if isinstance(attended, Fp8) else attended.flatten(1)


def _attend_to_pages(
    projected: Tensor | DeferredNorm, w: AttentionWeights, step: Step, cache: tuple[Tensor, ...], scales: Scales
) -> Tensor | Fp8:
    """Attention of queries after keys and values have gone into the cache: of a prefill, or of new tokens."""
    q = ops.qk_norm_rope(projected, *_head(w, step), step.positions, step.slots, *cache, bias=w.bias, **scales)
    options = {**_scores(w), **scales}
    if step.is_prefill:
        options["fp8"] = None if w.gated else rows_for(w.last_matrix, q.dtype)
        return ops.paged_prefill_attention(q, *cache, step.pages, step.spans, **options)
    places = *cache, step.pages, step.lengths
    if step.spread is None:  # several new tokens of each sequence, which attend to keys of neighbouring rows
        return ops.paged_attention(q, *places, tickets=step.tickets, queries=step.queries, **options)
    if w.sinks is not None:
        options["sinks"] = ops.all_gather(w.sinks, step.spread.team)
    return ops.sharded_decode_attention(step.spread.all_queries(q), *places, step.spread.team, **options)


def _attend_with_keys(
    projected: Tensor | DeferredNorm, w: AttentionWeights, step: Step, cache: tuple[Tensor, ...], scales: Scales
) -> Tensor:
    """Attention of a prefill that takes its new keys and values apart from the cache."""
    places, spread = (step.positions, step.slots, *cache), step.spread
    heads = ops.qk_norm_rope(projected, *_head(w, step), *places, with_keys=True, bias=w.bias, **scales)
    q, keys, values = heads.tensor_split((w.heads, w.heads + w.kv_heads), dim=1)
    if w.bias is None:
        values = projected[:, -w.kv_heads * w.head_dim :]
    by_cudnn = step.by_cudnn(w)
    if spread is not None:
        # Values are [T, kv_heads, head_dim] already where they come with the keys.
        keys, values = (x.reshape(keys.shape)[:, spread.heads(w)] for x in (keys, values))
        if step.after_cached or not by_cudnn:
            new = (as_cached(x, scales.get(name)) for x, name in ((keys, "k_scale"), (values, "v_scale")))
            cache = spread.gathered(w, cache, *new)
    if not by_cudnn:
        return ops.paged_prefill_attention(q, *cache, step.pages, step.spans, **_scores(w), **scales)
    if step.after_cached:
        return attend_after_cached(q, keys, values, step, (*cache, *scales.values()), w.scale)
    return attend_to_prompts(q, keys, values, step, cache, PLAIN_SCORES._replace(scale=w.scale))


def attend_after_cached(
    q: Tensor, keys: Tensor, values: Tensor, step: Step, cache: tuple[Tensor, ...], scale: float | None = None
) -> Tensor:
    """Causal attention of a prefill by cuDNN, [T, heads, head_dim]: in parts after cached tokens.

    q [T, heads, head_dim], keys [T, kv_heads, head_dim] and values, also [T, kv_heads * head_dim]: of all tokens of the pass
    cache  keys and values of the pages that ``step.pages`` names, and of an fp8 cache their scales

    Cached keys are copied out of their pages, CACHED_AT_ONCE tokens at a time at most. New ones do not come from the cache, so
    an fp8 cache does not round them.
    """
    values, attended = values.view(keys.shape), []
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for chunk in step.chunks:
        if chunk.before == 0:
            attended.append(
                attend_to_chunk(q, (keys, values), cache, step.pages, chunk, PLAIN_SCORES._replace(scale=scale))
            )
            continue
        for number in range(chunk.batch):
            first = chunk.first_token + number * chunk.length
            rows = slice(first, first + chunk.length)
            cached = cached_parts(cache, step.pages[chunk.first_sequence + number], chunk.before, q.dtype)
            attended.append(attention_after(q[rows], (keys[rows], values[rows]), cached, factor))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


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
    """[pages, heads, page_size, head_dim] and n page numbers → [n * page_size, heads, head_dim]

    In memory head by head, as cuDNN reads them.
    """
    bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # torch does not index e4m3 on all devices
    rows = bits.transpose(0, 1).index_select(1, pages).view(cache.dtype)
    rows = rows if scale is None else (rows.float() * scale).to(dtype)
    return rows.flatten(1, 2).transpose(0, 1)


def gated(x: Tensor | Fp8 | DeferredNorm, w: MLPWeights) -> Tensor | Fp8:
    """silu(x @ gate.T) * (x @ up.T), or by another activation, as ``w.down`` takes it.

    With many rows cuBLAS and silu_mul. Without a gate a GEMM, then ``activated``.
    """
    if w.activation in UNGATED:
        return activated(ops.matmul(*gemm_operands(x, w.gate_up)), w)
    rows, gate_up = gemm_operands(x, w.gate_up)
    dtype = (rows.scaled if isinstance(rows, DeferredNorm) else rows).dtype
    format = rows_for(w.down, dtype) if isinstance(gate_up, Fp8) else None
    return ops.matmul_silu_mul(rows, gate_up, fp8=format, activation=w.activation)


def activated(projected: Tensor, w: MLPWeights) -> Tensor | Fp8:
    """Rows as ``w.down`` takes them, of x @ w.gate_up.T.

    One launch. Without a gate the operations of torch, two of relu2 and about ten of xielu, and before a ``w.down`` in fp8 a
    launch that puts the rows in fp8.
    """
    if w.activation in UNGATED:
        rows = plain_activated(projected, w)
        format = rows_for(w.last_matrix, rows.dtype)
        return rows if format is None else quantized_rows(rows, format, capabilities_of(rows.device))
    format = _elementwise_format(w.last_matrix, projected.dtype, projected.shape[1] // 2)
    return ops.silu_mul(projected, fp8=format, activation=w.activation)


def _elementwise_format(w: Matrix | None, dtype: torch.dtype, columns: int) -> RowFormat | None:
    """``rows_for`` of an elementwise op; None too where a row with one scale is too wide for a program."""
    format = rows_for(w, dtype)
    return None if format is not None and format.kind == "token" and columns > MAX_TOKEN else format


def route(x: Tensor, w: MoEWeights) -> ops.Routing:
    """Choices of x's rows, in two launches."""
    return choose(ops.matmul(x, w.router), w)[0]


def choose(routed: Tensor, w: MoEWeights) -> tuple[ops.Routing, Tensor | None]:
    """(choices, logits of the shared expert's gate or None) by ``routed``, rows times the router."""
    logits, gate = w.logits(routed)
    return ops.route(logits, bias=w.bias, **w.gating._asdict()), gate


def experts(x: Tensor | RowsBeside, w: MoEWeights) -> Tensor:
    """This rank's summand of a mixture of experts: what its experts, or their slices, add to x's rows.

    Six launches, four with few rows by the plan of matmul_route_schedule, and two of a shared expert, three with many rows.
    """
    return summand_of(expert_rows(x, w))


def expert_rows(x: Tensor | RowsBeside, w: MoEWeights) -> ExpertRows:
    """``experts`` without the last two launches, the second GEMM and the sum."""
    in_fp8, rows = x if isinstance(x, RowsBeside) else (x, x)
    gating = {"bias": w.bias, "logit_bias": w.logit_bias, **w.gating._asdict()}
    routing, schedule, gate = ops.matmul_route_schedule(rows, w.router, w.experts, tickets=w.tickets, **gating)
    format = rows_between(w.gate_up, w.down, rows.dtype)
    h = ops.grouped_matmul_silu_mul(*grouped_operands(in_fp8, w.gate_up), schedule, fp8=format, **w.of_first)
    shared = None
    if w.shared is not None:
        given = in_fp8 if _takes_rows_of(w.gate_up, w.shared.gate_up, rows.dtype) else rows
        shared = ops.matmul(*gemm_operands(_shared_gated(given, w.shared), w.shared.down))
    return ExpertRows(h, w.down, schedule, routing, w.experts, shared, gate, w.down_bias)


def summand_of(x: ExpertRows) -> Tensor:
    """This rank's summand of experts' rows: two launches."""
    y = ops.grouped_matmul(*grouped_operands(x.h, x.down), x.schedule, bias=x.bias)
    return ops.moe_sum(y, x.routing, x.experts, shared=x.shared, gate=x.gate)


def _takes_rows_of(experts: Matrix, shared: Matrix, dtype: torch.dtype) -> bool:
    """True if the shared expert takes rows in fp8 as the experts do; a static scale is each one's own."""
    if not isinstance(experts, Fp8) or experts.input_scale is not None:
        return False
    return rows_for(shared, dtype) == experts.row_format


def _shared_gated(x: Tensor | Fp8, w: MLPWeights) -> Tensor:
    """``gated``, by operations that have a backward if gradients are asked for."""
    wanted = any(getattr(one, "requires_grad", False) for one in (x, w.gate_up))
    if torch.is_grad_enabled() and wanted:
        return plain_activated(ops.matmul(x, w.gate_up), w)
    return ops.matmul_silu_mul(*gemm_operands(x, w.gate_up), activation=w.activation)


def logits(x: Tensor | DeferredNorm, head: VocabWeights) -> Tensor:
    """This rank's logits in x's dtype; -inf for padding of the vocabulary."""
    return adjusted_logits(ops.matmul(*gemm_operands(x, head.weight)), head)

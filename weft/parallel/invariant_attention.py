"""Attention of the recipe ``invariant``: a token's row has the same bits in every kind of pass.

A decode step, a chunk of a prompt and drafts go through the same two kernels: ``qk_norm_rope``, which writes keys and values
into the cache, and attention to the cache in runs of positions. What a prefix left in the cache has the bits that this pass
would write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from weft import ops
from weft.kernels.fp8 import Fp8, quantized_rows
from weft.ops.local import capabilities_of
from weft.parallel.plain import without_gates
from weft.parallel.quantized import rows_for
from weft.parallel.rotary import table_of
from weft.parallel.sequences import Sequences
from weft.parallel.tensors import AttentionWeights, SplitK, tensor_of
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from weft.parallel.step import Step

# Tokens of a page of whole sequences.
PAGE = 64


def attend(
    qkv: Tensor | SplitK, w: AttentionWeights, step: Step | Sequences, cache: tuple[Tensor, ...] | None
) -> Tensor | Fp8:
    """Bias, norm, rotary embedding, cache write, attention: [T, heads * head_dim], as ``w.o`` takes it.

    Two launches, one more where ``w.o`` takes rows in fp8 or attention is gated.

    cache  (keys, values), or of an fp8 cache (keys, values, k_scale, v_scale); None for ``Sequences``, whose keys and values go
           into pages of this call
    """
    qkv = tensor_of(qkv)
    if isinstance(step, Sequences):
        step, cache = paged(step, w, qkv)
    qkv, gate = without_gates(qkv, w) if w.gated else (qkv, None)
    (keys, values), scales = cache[:2], dict(zip(("k_scale", "v_scale"), cache[2:], strict=False))
    angles = step.angles if isinstance(step, WholeSequences) else table_of(step.angles, w.rotary)
    head = w.q_norm, w.k_norm, w.eps, angles
    q = ops.qk_norm_rope(qkv, *head, step.positions, step.slots, keys, values, bias=w.bias, invariant=True, **scales)
    options = {"scale": w.scale, "window": w.window, "softcap": w.softcap, "sinks": w.sinks, **scales}
    if step.is_prefill:
        rows = ops.paged_prefill_attention(q, keys, values, step.pages, step.spans, invariant=True, **options)
    else:
        given = q, keys, values, step.pages, step.lengths
        rows = ops.paged_attention(*given, tickets=step.tickets, queries=step.queries, invariant=True, **options)
    rows, format = rows.reshape(step.tokens, w.heads * w.head_dim), rows_for(w.o, q.dtype)
    if gate is not None:
        return ops.sigmoid_mul(rows, gate, fp8=format)
    return rows if format is None else quantized_rows(rows, format, capabilities_of(rows.device))


class WholeSequences(NamedTuple):
    """Fields of a prefill ``Step`` that ``attend`` reads."""

    positions: Tensor
    slots: Tensor
    pages: Tensor
    angles: Tensor
    spans: ops.SequenceRanges
    tokens: int
    is_prefill: bool = True


def paged(step: Sequences, w: AttentionWeights, qkv: Tensor) -> tuple[WholeSequences, tuple[Tensor, Tensor]]:
    """(``step`` as a prefill of new prompts, pages for their keys and values).

    ValueError for an attention of the caller's, which sums in another order.
    """
    if step.attend is not None:
        raise ValueError("mode='invariant' with Sequences(attend=…): it attends by its kernels alone; leave attend out")
    batch, length, device = step.batch, step.length, qkv.device
    each = cdiv(length, PAGE)
    at = torch.arange(length, device=device)
    first = torch.arange(batch, device=device)[:, None] * (each * PAGE)
    angles = table_of(step.angles, w.rotary).expand(batch, -1, -1).flatten(0, 1).contiguous()
    spans = ops.SequenceRanges.make([(0, length)] * batch, w.heads // w.kv_heads, qkv.dtype).to(device)
    prefill = WholeSequences(
        positions=torch.arange(batch * length, device=device),
        slots=(first + at).flatten(),
        pages=torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each),
        angles=angles,
        spans=spans,
        tokens=batch * length,
    )
    keys, values = torch.zeros((2, batch * each, w.kv_heads, PAGE, w.head_dim), dtype=qkv.dtype, device=device)
    return prefill, (keys, values)

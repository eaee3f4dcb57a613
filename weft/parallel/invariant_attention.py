"""Attention of the recipe ``invariant``: a token's row has the same bits in every kind of pass.

A decode step, a chunk of a prompt and drafts go through the same two kernels: ``qk_norm_rope``, which writes keys and values
into the cache, and attention to the cache in runs of positions. What a prefix left in the cache has the bits that this pass
would write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from weft import ops
from weft.kernels.fp8 import Fp8, quantized_rows
from weft.ops.local import capabilities_of
from weft.parallel.plain import without_gates
from weft.parallel.quantized import rows_for
from weft.parallel.rotary import table_of
from weft.parallel.tensors import AttentionWeights

if TYPE_CHECKING:
    from weft.parallel.step import Step


def attend(qkv: Tensor, w: AttentionWeights, step: Step, cache: tuple[Tensor, ...]) -> Tensor | Fp8:
    """Bias, norm, rotary embedding, cache write, attention: [T, heads * head_dim], as ``w.o`` takes it.

    Two launches, one more where ``w.o`` takes rows in fp8. Gated attention is four launches more.

    cache  (keys, values), or of an fp8 cache (keys, values, k_scale, v_scale)
    """
    if w.gated:
        qkv, gate = without_gates(qkv, w)
        return attend(qkv, w._replace(gated=False), step, cache) * gate.sigmoid()
    (keys, values), scales = cache[:2], dict(zip(("k_scale", "v_scale"), cache[2:], strict=False))
    head = w.q_norm, w.k_norm, w.eps, table_of(step.angles, w.rotary)
    q = ops.qk_norm_rope(qkv, *head, step.positions, step.slots, keys, values, bias=w.bias, **scales)
    options = {"scale": w.scale, "window": w.window, "softcap": w.softcap, "sinks": w.sinks, **scales}
    if step.is_prefill:
        rows = ops.paged_prefill_attention(q, keys, values, step.pages, step.spans, invariant=True, **options)
    else:
        given = q, keys, values, step.pages, step.lengths
        rows = ops.paged_attention(*given, tickets=step.tickets, queries=step.queries, invariant=True, **options)
    rows, format = rows.reshape(step.tokens, w.heads * w.head_dim), rows_for(w.o, q.dtype)
    return rows if format is None else quantized_rows(rows, format, capabilities_of(rows.device))

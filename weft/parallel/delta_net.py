"""Gated delta nets in torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.linear_attention.delta_rule import Gates, Recurrence
from weft.ops.linear_attention.gated_delta_net_step import DeltaSlots
from weft.parallel.tensors import AttentionWeights, DeltaColumns, DeltaWeights, MLAWeights

if TYPE_CHECKING:
    from weft.parallel.step import Chunk, Step


def delta_net(projected: Tensor | DeltaColumns, w: DeltaWeights, step: Step, kept: DeltaSlots) -> Tensor:
    """Convolution, gated delta rule, gated norm: [T, value heads * V], for ``w.o``. Writes states."""
    (qkv, z, gates), outs = parts_of(projected, w), []
    if step.is_prefill:
        for chunk in step.chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.batch * chunk.length)
            slots = step.state_slots[chunk.first_sequence : chunk.first_sequence + chunk.batch].long()
            outs.append(_chunk(qkv[rows], gates.rows(rows), w, kept, slots, chunk))
    else:
        outs.append(_step(qkv, gates, w, kept, step))
    out = torch.cat(outs)
    normed = F.rms_norm(out.float(), w.norm.weight.shape, None, w.norm.eps).to(out.dtype) * w.norm.weight
    return (normed * F.silu(z.reshape(out.shape).float())).to(out.dtype).flatten(1)


def with_rates(
    qkv: Tensor, w: AttentionWeights | MLAWeights | DeltaWeights, times: Callable[[Tensor], Tensor]
) -> Tensor | DeltaColumns:
    """``qkv``, of weights with ``rates`` with the same rows ``times`` these beside it."""
    return DeltaColumns(qkv, times(w.rates)) if isinstance(w, DeltaWeights) and w.rates is not None else qkv


def parts_of(projected: Tensor | DeltaColumns, w: DeltaWeights) -> tuple[Tensor, Tensor, Gates]:
    """(q, k and v before the convolution; z, the gate of the norm; the rule's gates)"""
    heads = w.sizes.value_heads
    of_qkv = [w.sizes.columns, heads * w.sizes.V]
    if isinstance(projected, DeltaColumns):
        (qkv, z), rates = projected.qkv.split(of_qkv, dim=1), projected.rates.chunk(2, dim=1)
        b, a = (of_all[:, w.first_head : w.first_head + heads] for of_all in rates)
    else:
        qkv, z, b, a = projected.split([*of_qkv, heads, heads], dim=1)
    return qkv, z, Gates(a, b, w.A_log, w.dt_bias)


def _chunk(qkv: Tensor, gates: Gates, w: DeltaWeights, kept: DeltaSlots, slots: Tensor, chunk: Chunk) -> Tensor:
    """Convolution and rule of sequences of equal length, [n * length, value heads, V], rows by sequence."""
    count, lags, before = len(slots), w.conv.shape[1] - 1, chunk.before
    x, ring = qkv.reshape(count, -1, qkv.shape[1]), kept.inputs.shape[1]
    earlier = torch.arange(before - lags, before, device=x.device)
    rows = torch.where((earlier >= 0)[:, None], kept.inputs[slots][:, earlier % ring], 0)
    rates = torch.cat((gates.a, gates.b), dim=1).view(count, -1, 2 * w.sizes.value_heads)
    first = torch.zeros_like(kept.state[slots]) if before == 0 else kept.state[slots]
    outs, states = _recurrence(torch.cat((rows, x), dim=1), rates, w, first)
    last = torch.arange(max(0, x.shape[1] - lags), x.shape[1], device=x.device)
    kept.inputs[slots[:, None], (before + last) % ring] = x[:, last]
    kept.state[slots] = states[-1]
    return torch.stack(outs, dim=1).to(qkv.dtype).flatten(0, 1)


def _step(qkv: Tensor, gates: Gates, w: DeltaWeights, kept: DeltaSlots, step: Step) -> Tensor:
    """Convolution and rule of a decode step, [T, value heads, V]: pending tokens come first."""
    lengths, slots = step.lengths.view(-1, step.queries), step.state_slots.long()
    count, queries, lags, ring = len(slots), step.queries, w.conv.shape[1] - 1, kept.inputs.shape[1]
    most = step.most_pending
    before, new = lengths[:, :1].long() - 1, lengths > 0
    place = torch.arange(-most, queries, device=slots.device)
    position = before + place
    for part, rows in ((kept.inputs, qkv), (kept.rates, torch.cat((gates.a, gates.b), dim=1))):
        at = (slots[:, None], position[:, most:] % ring)
        part[at] = torch.where(new[..., None], rows.view(count, queries, -1), part[at])
    pending = torch.zeros_like(before) if most == 0 else step.state_pending[:, None].long()
    exists = torch.cat((new[:, :1] & (before > 0) & (place[:most] >= -pending), new), dim=1)
    taken = torch.arange(-most - lags, queries, device=slots.device) + before
    rows = torch.where((taken >= 0)[..., None], kept.inputs[slots[:, None], taken % ring], 0)
    first = torch.where((before > 0)[..., None, None], kept.state[slots], 0)
    outs, states = _recurrence(rows, kept.rates[slots[:, None], position % ring], w, first, exists)
    kept.state[slots] = torch.where(new[:, 0].view(-1, 1, 1, 1), states[most], kept.state[slots])
    return torch.stack(outs[most:], dim=1).to(qkv.dtype).flatten(0, 1)


def _recurrence(
    rows: Tensor, rates: Tensor, w: DeltaWeights, state: Tensor, exists: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """(out, state) after each token of n sequences: [n, value heads, V] and [n, value heads, K, V] fp32.

    rows    [n, taps - 1 + tokens, columns]; rates: [n, tokens, 2 * value heads]; state: before the first token
    exists  [n, tokens]: whether a token changes the state; None: all
    """
    mixed = F.silu(F.conv1d(rows.transpose(1, 2), w.conv[:, None], groups=rows.shape[2])).permute(2, 0, 1)
    count, heads = len(rows), w.sizes.value_heads
    both = rates.transpose(0, 1).flatten(0, 1).float().split(heads, dim=1)
    whole = Recurrence.of(mixed.flatten(0, 1).float(), Gates(*both, w.A_log, w.dt_bias), w.sizes)
    outs, states = [], []
    for token, one in enumerate(zip(*(part.unflatten(0, (-1, count)) for part in whole), strict=True)):
        [(out, after)] = Recurrence(*(part[None] for part in one)).steps(state)
        state = after if exists is None else torch.where(exists[:, token].view(-1, 1, 1, 1), after, state)
        outs.append(out)
        states.append(state)
    return outs, states

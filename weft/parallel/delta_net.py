"""Gated delta nets in torch's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.linear_attention.delta_rule import Gates, Recurrence
from weft.parallel.tensors import DeltaWeights

if TYPE_CHECKING:
    from weft.parallel.step import Step


def delta_net(projected: Tensor, w: DeltaWeights, step: Step, cache: tuple[Tensor, Tensor]) -> Tensor:
    """Convolution, gated delta rule, gated norm: [T, value heads * V], for ``w.o``. Writes states.

    projected  [T, columns], x @ w.qkv.T
    """
    (qkv, z, gates), outs = parts_of(projected, w), []
    if step.is_prefill:
        for chunk in step.chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.batch * chunk.length)
            slots = step.state_slots[chunk.first_sequence : chunk.first_sequence + chunk.batch].long()
            before = torch.full((chunk.batch,), chunk.before, device=slots.device)
            outs.append(_of_sequences(qkv[rows], gates.rows(rows), w, cache, slots, before))
    else:
        outs.append(_of_sequences(qkv, gates, w, cache, step.state_slots.long(), step.lengths - 1))
    out = torch.cat(outs)
    normed = F.rms_norm(out.float(), w.norm.weight.shape, None, w.norm.eps).to(out.dtype) * w.norm.weight
    return (normed * F.silu(z.reshape(out.shape).float())).to(out.dtype).flatten(1)


def parts_of(projected: Tensor, w: DeltaWeights) -> tuple[Tensor, Tensor, Gates]:
    """(q, k and v before the convolution; the gate of the norm; the rule's gates), columns of x @ w.qkv.T."""
    heads = w.sizes.value_heads
    qkv, z, b, a = projected.split([w.sizes.columns, heads * w.sizes.V, heads, heads], dim=1)
    return qkv, z, Gates(a, b, w.A_log, w.dt_bias)


def _of_sequences(
    qkv: Tensor, gates: Gates, w: DeltaWeights, cache: tuple[Tensor, Tensor], slots: Tensor, before: Tensor
) -> Tensor:
    """Convolution and rule of sequences of equal length, [n * length, value heads, V], rows by sequence.

    before  tokens of each sequence before; -1: padding, of which states are kept
    """
    conv, delta = cache
    count, dtype = len(slots), qkv.dtype
    kept, states = conv[slots], delta[slots]
    is_old, is_real = before > 0, before >= 0
    x = torch.cat((torch.where(is_old[:, None, None], kept, 0), qkv.reshape(count, -1, qkv.shape[1])), dim=1)
    conv[slots] = torch.where(is_real[:, None, None], x[:, x.shape[1] - kept.shape[1] :], kept)
    mixed = F.silu(F.conv1d(x.transpose(1, 2), w.conv[:, None], groups=x.shape[2])).permute(
        2, 0, 1
    )  # [length, n, columns]
    by_token = (one.view(count, -1, one.shape[1]).transpose(0, 1).reshape(len(one), -1).float() for one in gates[:2])
    whole = Recurrence.of(mixed.flatten(0, 1).float(), Gates(*by_token, w.A_log, w.dt_bias), w.sizes)
    steps = Recurrence(*(one.unflatten(0, (-1, count)) for one in whole))
    outs, state = [], torch.where(is_old[:, None, None, None], states, 0)
    for out, after in steps.steps(state):
        outs.append(out.to(dtype))
        state = after
    delta[slots] = torch.where(is_real[:, None, None, None], state, states)
    return torch.stack(outs, dim=1).flatten(0, 1)

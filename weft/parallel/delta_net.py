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
        lengths, slots = step.lengths.view(-1, step.queries), step.state_slots.long()
        after = (slots if step.state_after is None else step.state_after.long()).view(lengths.shape)
        outs.append(_of_sequences(qkv, gates, w, cache, slots, lengths[:, 0] - 1, (after, lengths > 0)))
    out = torch.cat(outs)
    normed = F.rms_norm(out.float(), w.norm.weight.shape, None, w.norm.eps).to(out.dtype) * w.norm.weight
    return (normed * F.silu(z.reshape(out.shape).float())).to(out.dtype).flatten(1)


def parts_of(projected: Tensor, w: DeltaWeights) -> tuple[Tensor, Tensor, Gates]:
    """(q, k and v before the convolution; the gate of the norm; the rule's gates), columns of x @ w.qkv.T."""
    heads = w.sizes.value_heads
    qkv, z, b, a = projected.split([w.sizes.columns, heads * w.sizes.V, heads, heads], dim=1)
    return qkv, z, Gates(a, b, w.A_log, w.dt_bias)


def _of_sequences(
    qkv: Tensor,
    gates: Gates,
    w: DeltaWeights,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    before: Tensor,
    each: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Convolution and rule of sequences of equal length, [n * length, value heads, V], rows by sequence.

    slots   where each sequence's states are read
    before  tokens of each sequence before
    each    of a step, [n, length] both: where the state after a token goes, and whether there is that token; None: the state
            after the last token goes to `slots`
    """
    conv, delta = cache
    count, dtype = len(slots), qkv.dtype
    kept, is_old = conv[slots], before > 0
    x = torch.cat((torch.where(is_old[:, None, None], kept, 0), qkv.reshape(count, -1, qkv.shape[1])), dim=1)
    mixed = F.silu(F.conv1d(x.transpose(1, 2), w.conv[:, None], groups=x.shape[2])).permute(
        2, 0, 1
    )  # [length, n, columns]
    by_token = (one.view(count, -1, one.shape[1]).transpose(0, 1).reshape(len(one), -1).float() for one in gates[:2])
    whole = Recurrence.of(mixed.flatten(0, 1).float(), Gates(*by_token, w.A_log, w.dt_bias), w.sizes)
    steps = Recurrence(*(one.unflatten(0, (-1, count)) for one in whole))
    outs, first = [], torch.where(is_old[:, None, None, None], delta[slots], 0)
    last = x.shape[1] - kept.shape[1] - 1
    for token, (out, state) in enumerate(steps.steps(first)):
        outs.append(out.to(dtype))
        if each is not None or token == last:
            at, real = (slots, None) if each is None else (one[:, token] for one in each)
            _write(conv, at, x[:, token + 1 : token + 1 + kept.shape[1]], real)
            _write(delta, at, state, real)
    return torch.stack(outs, dim=1).flatten(0, 1)


def _write(states: Tensor, at: Tensor, new: Tensor, real: Tensor | None) -> None:
    """states[at] = new, but for sequences that are not ``real``."""
    states[at] = new if real is None else torch.where(real.view(-1, *[1] * (new.dim() - 1)), new, states[at])

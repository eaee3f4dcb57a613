"""Pipelined design of gathered_prefill_attention: cuDNN's attention between copies.

    copy  | keys of r+1 | keys of r+2 | …
    attn  | own stripes | r+1 | r+2 | … | merge                                        rank r, source ranks modulo W

signals  the copy engine of rank s: landed[s, 0] = the call, behind its keys and values
waits    one kernel of one program before the attention to rank s's keys, in the stream that computes
reuse    a ``CopyChannel``: two halves, in turn

Each rank's keys are one call of cuDNN: rank s < r has sent its first stripe, which all queries of rank r see whole; rank s > r
both, which only the second stripe of queries sees, again whole. Parts of a row are merged by their log-sum-exp, in the order of
the ranks from r on: the same bits from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.ops.attention.merge_attention import MERGE_ATTENTION
from weft.transport.copy_channel import CopyChannel, await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# (out [T, Hq, D], natural log of the sum of exp(score) [T, Hq])
Part = tuple[torch.Tensor, torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> Part:
    """Attention of q [T, Hq, D] to k and v [keys, Hkv, D]: to all of them, or row i to the first i + 1.

    cuDNN's on GPUs, torch's operations on virtual ranks.
    """
    if q.device.type == "cuda":
        x, keys, values = (one.transpose(0, 1)[None] for one in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            x, keys, values, None, True, 0.0, causal, scale=scale
        )
        return out[0].transpose(0, 1), lse.view(q.shape[1], len(q)).T
    x, keys, values = (one.float().transpose(0, 1) for one in (q, k, v))
    scores = x.unflatten(0, (len(keys), -1)) @ keys[:, None].transpose(2, 3) * scale  # [Hkv, group, T, keys]
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ values[:, None]
    return out.flatten(0, 1).transpose(0, 1).to(q.dtype), lse.flatten(0, 1).T


def merged(parts: Sequence[Part]) -> Part:
    """Attention to the keys of all ``parts``, in their order."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    return MERGE_ATTENTION.forward(outs, lses)


def attend_between_copies(
    team: Team,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    received: torch.Tensor | None,
    channel: CopyChannel | None,
    rows: Sequence[int],
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's queries of one sequence; lse is [0] unless ``return_lse``.

    received  [2, W - 1, room, Hkv, D]: keys and values; panel d is of rank me + 1 + d (mod W). None for one rank, as
              ``channel``
    rows      tokens of each of the 2 W stripes
    """
    W, me = team.size, team.rank
    first = rows[me]
    stripes = [half for half in (slice(0, first), slice(first, len(q))) if half.start < half.stop]
    parts: list[list[Part]] = [[attention(q[half], k[half], v[half], scale, causal=True)] for half in stripes]
    if len(stripes) == 2:
        before, behind = stripes
        parts[1].append(attention(q[behind], k[before], v[before], scale, causal=False))
    for step in range(1, W):
        source = (me + step) % W
        keys = rows[source] + (0 if source < me else rows[2 * W - 1 - source])
        if keys == 0:
            continue  # nothing is sent, no flag either
        await_chunk(channel.landed, 0, source)
        panels = received[:, step - 1, :keys]
        seeing = slice(0 if source < me else first, len(q))
        if seeing.start == seeing.stop:
            continue
        out, lse = attention(q[seeing], *panels, scale, causal=False)
        for half, own in zip(stripes, parts, strict=True):
            if half.start >= seeing.start:
                mine = slice(half.start - seeing.start, half.stop - seeing.start)
                own.append((out[mine], lse[mine]))
    if not stripes:
        return torch.empty_like(q), q.new_empty(q.shape[:2] if return_lse else 0, dtype=torch.float32)
    outs, lses = zip(*map(merged, parts), strict=True)
    return torch.cat(outs), torch.cat(lses) if return_lse else q.new_empty(0, dtype=torch.float32)

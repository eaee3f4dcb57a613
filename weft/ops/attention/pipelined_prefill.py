"""Pipelined design of gathered_prefill_attention: cuDNN's attention between copies.

    copy  | keys of r+1 | keys of r+2 | …
    attn  | own stripes | r+1 | r+2 | … | merge                                        rank r, source ranks modulo W

signals  the copy engine of rank s: landed[s, 0] = the call, after its keys and values
waits    one kernel of one program before the attention to rank s's keys, in the stream that computes
reuse    a ``CopyChannel``: two halves, in turn

Each rank's keys are one call of cuDNN: rank s < r has sent its first stripe, which all queries of rank r see whole; rank s > r
both, which only the second stripe of queries sees, again whole. Parts of a row are merged by their log-sum-exp, in the order of
the ranks from r on: the same bits from run to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.ops.attention.gathered_plan import GatheredArguments
from weft.ops.attention.parts import Part, attention, merged
from weft.transport.copy_channel import CopyChannel, await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def attend_between_copies(
    team: Team, given: GatheredArguments, received: torch.Tensor | None, channel: CopyChannel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's queries of one sequence; lse is [0] unless ``given.return_lse``.

    received  [2, W - 1, room, Hkv, D]: keys and values; panel d is of rank me + 1 + d (mod W). None for one rank, as
              ``channel``
    """
    q, k, v, rows, scale, return_lse = *given[:3], given.rows, given.scale, given.return_lse
    W, me = team.size, team.rank
    first = rows[me]
    stripes = [half for half in (slice(0, first), slice(first, len(q))) if half.start < half.stop]
    parts: list[list[Part]] = [[attention(q[half], k[half], v[half], scale, causal=True)] for half in stripes]
    if len(stripes) == 2:
        first_half, second = stripes
        parts[1].append(attention(q[second], k[first_half], v[first_half], scale, causal=False))
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
                at = slice(half.start - seeing.start, half.stop - seeing.start)
                own.append((out[at], lse[at]))
    if not stripes:
        return torch.empty_like(q), q.new_empty(q.shape[:2] if return_lse else 0, dtype=torch.float32)
    outs, lses = zip(*map(merged, parts), strict=True)
    return torch.cat(outs), torch.cat(lses) if return_lse else q.new_empty(0, dtype=torch.float32)

"""Attention in parts: cuDNN's to some keys at a time, merged by the parts' log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weft.ops.attention.merge_attention import MERGE_ATTENTION

# (out [T, Hq, D], natural log of the sum of exp(score) [T, Hq])
Part = tuple[torch.Tensor, torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> Part:
    """Attention of q [T, Hq, D] to k and v [keys, Hkv, D]: to all keys, or row i to the first i + 1.

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


def attention_after(
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    cached: Iterable[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """[T, Hq, D]: attention of new tokens to all cached ones, then to the new ones up to themselves.

    new     keys and values of the new tokens, [T, Hkv, D]
    cached  keys and values of earlier tokens, some at a time, [keys, Hkv, D]; each is read before the next one is made
    """
    parts = [attention(q, *some, scale, causal=False) for some in cached]
    return merged([*parts, attention(q, *new, scale, causal=True)])[0]

"""Log-probabilities of tokens, from logits split over the ranks, as rows of numbers.

A row is [logprob of the token, its rank, logprobs of the MOST_LOGPROBS likeliest tokens, their ids], in fp32, which holds token
ids exactly. As vLLM's, they are those of the model: before penalties, masks and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.engine.outputs import Logprob
from weft.engine.params import MOST_LOGPROBS
from weft.parallel.vocabulary import VocabParallelHead, all_gather

WIDTH = 2 + 2 * MOST_LOGPROBS
# Rows computed at once, of a long prompt: their logits are copied in fp32.
ROWS = 256


def token_logprobs(head: VocabParallelHead, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows [B, WIDTH] of tokens [B] under logits [B, V'/W], the same on every rank. Collective.

    Ranks exchange their MOST_LOGPROBS greatest logits, a maximum, a sum and a count per row.
    """
    if len(tokens) > ROWS:
        pairs = zip(logits.split(ROWS), tokens.split(ROWS), strict=True)
        return torch.cat([token_logprobs(head, *pair) for pair in pairs])
    logits, most = logits.float(), min(MOST_LOGPROBS, head.local_size)
    index = tokens - head.start
    owned = (index >= 0) & (index < head.local_size)
    own = logits.gather(1, torch.where(owned, index, 0)[:, None])
    value = torch.where(owned[:, None], own, -torch.inf)
    top, ids = logits.topk(most, dim=1)
    greatest = top[:, :1].clamp(min=torch.finfo(torch.float32).min)  # a rank's ids may all be padding
    total = (logits - greatest).exp().sum(dim=1, keepdim=True)
    parts = torch.cat((value, greatest, total, top, (ids + head.start).float()), dim=1)
    value, greatest, total, top, ids = all_gather(parts[None], head.team, head.mode).split((1, 1, 1, most, most), dim=2)
    value, most_of_all = value.amax(dim=0), greatest.amax(dim=0)
    total = most_of_all + (total * (greatest - most_of_all).exp()).sum(dim=0).log()
    at_least = (logits >= value).sum(dim=1, dtype=torch.float32)
    rank = all_gather(at_least[None], head.team, head.mode).sum(dim=0)
    # Of equal ones the lowest rank's come first, on every rank.
    top, order = top.transpose(0, 1).flatten(1).sort(dim=1, descending=True, stable=True)
    ids = ids.transpose(0, 1).flatten(1).gather(1, order)
    rows = torch.full((len(tokens), WIDTH), -torch.inf, device=logits.device)
    count = min(MOST_LOGPROBS, top.shape[1])
    rows[:, 0], rows[:, 1] = (value - total)[:, 0], rank
    rows[:, 2 : 2 + count] = top[:, :count] - total
    rows[:, 2 + MOST_LOGPROBS : 2 + MOST_LOGPROBS + count] = ids[:, :count]
    return rows


def logprobs_of(
    row: Sequence[float], token: int, count: int, decode: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The token's Logprob, then those of the `count` likeliest tokens, by token id."""
    found = {token: Logprob(row[0], int(row[1]), decode(token))}
    for rank in range(1, count + 1):
        logprob, other = row[1 + rank], row[1 + MOST_LOGPROBS + rank]
        if logprob > -torch.inf and int(other) not in found:
            found[int(other)] = Logprob(logprob, rank, decode(int(other)))
    return found

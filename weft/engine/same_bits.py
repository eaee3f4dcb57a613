"""Log-probabilities whose bits depend on a row's logits alone, not on ranks or further rows."""

from __future__ import annotations

import torch

from weft.engine.params import MOST_LOGPROBS
from weft.kernels.slices import SLICES
from weft.ops.vocab.log_sums import join_log_sums, log_sums
from weft.ops.vocab.top_p_mass import ordered_keys
from weft.parallel.vocabulary import VocabParallelHead, all_gather

# Logits of a block at most: the k likeliest tokens of a row lie in k blocks.
BLOCK = 64
LOWEST_ID = 0x7FFFFFFF


def likelihoods(head: VocabParallelHead, logits: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(value [B, 1], log of the sum of exp [B, 1], greatest logits [B, k], their ids [B, k]).

    Over all ranks; collective.
    logits  this rank's [B, V'/W], equal slices of the padded vocabulary
    value   -inf but on the rank that has the token
    """
    slices = SLICES // head.team.size
    top, ids = likeliest(logits, head.start)
    pairs = torch.stack((top, ids.float()), -1), torch.stack((value, value), -1)
    parts = torch.cat((log_sums(logits, slices), *pairs), dim=1)
    by_rank = all_gather(parts[None], head.team, head.mode).transpose(0, 1)
    sums, pairs, value = by_rank.split((slices, top.shape[1], 1), dim=2)
    top, ids = pairs.flatten(1, 2).unbind(-1)
    place, ids = _greatest(ordered_keys(top), ids.long())
    total = join_log_sums(sums.reshape(len(logits), SLICES, 2))
    return value[..., 0].amax(dim=1), total[:, None], top.gather(1, place), ids


def likeliest(logits: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [B, k] fp32, token ids [B, k]) of the likeliest tokens of a rank.

    Of equal ones the lowest id comes first. The k blocks with the greatest logits hold them, since blocks are in the order of
    their ids. Every choice is among different integers, so no algorithm has a tie to break.
    """
    block = min(BLOCK, logits.shape[1] & -logits.shape[1])
    blocks = logits.unflatten(1, (-1, block))
    numbers = torch.arange(blocks.shape[1], device=logits.device)
    _, chosen = _greatest(ordered_keys(blocks.amax(2)), numbers)
    rows = blocks.gather(1, chosen[..., None].expand(-1, -1, block)).flatten(1).float()
    ids = (chosen[..., None] * block + torch.arange(block, device=logits.device)).flatten(1) + start
    place, ids = _greatest(ordered_keys(rows), ids)
    return rows.gather(1, place), ids


def _greatest(keys: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(places, ids) [B, k] of the greatest keys [B, n]; of equal ones the lowest id first."""
    ids = ids.expand(keys.shape)
    order = (keys.long() << 32) | (LOWEST_ID - ids)
    place = order.topk(min(MOST_LOGPROBS, keys.shape[1]), dim=1).indices
    return place, ids.gather(1, place)

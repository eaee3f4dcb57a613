"""Sampling of the next token of each sequence, on the device, from logits split over the ranks.

    greedy       argmax over token ids of logit
    temperature  argmax over token ids of logit + temperature * g(token id)    g: Gumbel noise; so distributed as softmax
    top_p        the same, among the most likely token ids that together reach top_p
    top_k        the same, among the top_k most likely ones
    min_p        the same, among ids at least min_p times as likely as the most likely one

First, each rank changes its logits as requests ask (weft.engine.slots). top_p counts what top_k and min_p leave. Ranks exchange
one (value, token id) per sequence, for top_p sums of probabilities and for top_k numbers of tokens, never logits. The noise is
a function of (seed of the request, position of the token, token id), so equal logits give the same choice for every world size
and batch. All ranks choose the same: they compare exchanged values, and sums are of integers, so their order does not matter.

Log-probabilities are rows: [logprob of the token, its rank, logprobs of the MOST_LOGPROBS likeliest tokens, their ids], in
fp32, which holds token ids exactly. As in vLLM they are the model's: before penalties, masks and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft import ops
from weft.engine.params import MOST_LOGPROBS, Kind, SamplingParams
from weft.engine.slots import DTYPES, SAMPLING, Adjustments
from weft.kernels.slices import SLICES
from weft.ops.vocab.log_sums import join_log_sums, log_sums
from weft.ops.vocab.sample_argmax import gumbel_noise
from weft.ops.vocab.top_p_mass import LOWEST, SHIFTS, narrow, ordered_keys
from weft.parallel.vocabulary import VocabParallelHead, all_gather
from weft.runtime.copying import upload

_UNIT = 2.0**40  # mass of the most likely token; the masses of 2**18 tokens sum up below 2**63
_KEY_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Sampling parameters of B sequences, on the device.

    temperature, top_p, min_p  [B] fp32
    top_k                      [B] int64; 0: all
    seed                       [B] int64
    position                   [B] int64: index that the token will have in its sequence
    adjustments, rows          of which these rows are the sequences'; for Kind.ADJUSTED
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    adjustments: Adjustments | None = None
    rows: slice | torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        given: object,
        position: torch.Tensor,
        pick: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        *,
        adjustments: Adjustments | None = None,
        rows: slice | torch.Tensor | None = None,
    ) -> Choice:
        """Choice by tensors that `given` has, such as Slots, by the names of the sampling parameters.

        pick  gives the sequences' part of such a tensor
        """
        tensors = {name: pick(getattr(given, name)) for name in SAMPLING}
        return cls(**tensors, position=position, adjustments=adjustments, rows=rows)

    @classmethod
    def of_requests(
        cls,
        params: Sequence[SamplingParams],
        position: torch.Tensor,
        *,
        adjustments: Adjustments | None = None,
        rows: torch.Tensor | None = None,
    ) -> Choice:
        """Choice for a sequence of each of these requests."""
        values = {name: torch.tensor([getattr(one, name) for one in params], dtype=DTYPES[name]) for name in SAMPLING}
        tensors = {name: upload(x, position.device) for name, x in values.items()}
        return cls(**tensors, position=position, adjustments=adjustments, rows=rows)


def choose_tokens(
    head: VocabParallelHead, logits: torch.Tensor, choice: Choice, kind: Kind, *, fused: bool = False
) -> torch.Tensor:
    """Choose token ids [B] int64, the same on every rank, from this rank's logits [B, V'/W]. Collective.

    EXCLUDED for a row whose tokens are all excluded, NOT_FINITE for one with a logit that is NaN or +inf.

    kind   union of the sequences' kinds (params.py)
    fused  by weft.ops' kernels; otherwise by the torch operations below, on fp32 logits
    """
    if Kind.ADJUSTED in kind:
        guided = Kind.GUIDED in kind
        logits = choice.adjustments.adjust(logits, choice.rows, choice.position, guided=guided, fused=fused)
    if Kind.SAMPLED not in kind:
        return head.argmax(logits, fused=fused)
    if fused:
        return _draw_fused(head, logits, choice, kind)
    ids = torch.arange(head.start, head.start + head.local_size, device=logits.device)
    # The noise is multiplied by the temperature, not the logits divided by it: 0 is then greedy, and nothing overflows.
    scores = logits + choice.temperature[:, None] * gumbel_noise(choice.seed, choice.position, ids)
    if Kind.NUCLEUS in kind:
        finite = logits < torch.inf
        best = _over_ranks(head, logits.amax(dim=-1)).amax(dim=0)
        if Kind.TRUNCATED in kind:
            least = torch.maximum(least_of_top_k(head, logits, choice), least_of_min_p(best, choice))
            logits = keep(logits, least)
        scores = scores.masked_fill(logits == float("-inf"), float("-inf"))
        least = least_of_top_p(head, logits, best, choice)
        scores = scores.masked_fill(ordered_keys(logits) < least[:, None], float("-inf"))
        scores = scores.masked_fill(~finite, torch.nan)  # the key of a NaN is any
    return head.argmax(scores, fused=False)


def _draw_fused(head: VocabParallelHead, logits: torch.Tensor, choice: Choice, kind: Kind) -> torch.Tensor:
    floor = None
    if Kind.NUCLEUS in kind:
        best = _over_ranks(head, ops.sample_argmax(logits, head.start))[..., 0].flatten(0, 1).amax(dim=0)
        if Kind.TRUNCATED in kind:
            all_kept = (choice.top_k == 0).float()
            least = _narrowed(head, logits, best, choice, all_kept, choice.top_k.clone(), count=True)
            floor = torch.maximum(least, least_of_min_p(best, choice))
        least = _narrowed(head, logits, best, choice, choice.top_p, torch.empty_like(choice.seed), floor=floor)
        floor = least if floor is None else torch.maximum(floor, least)
    pairs = ops.sample_argmax(logits, head.start, choice.temperature, choice.seed, choice.position, floor)
    return ops.join_argmax(_over_ranks(head, pairs))


def _narrowed(
    head: VocabParallelHead,
    logits: torch.Tensor,
    best: torch.Tensor,
    choice: Choice,
    share: torch.Tensor,
    wanted: torch.Tensor,
    count: bool = False,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Key [B] int32 of the least logit to keep by top_p, or if ``count`` by top_k.

    floor  least key of the logits that count; None: all do
    """
    least = torch.full_like(choice.seed, LOWEST, dtype=torch.int32)
    for shift in SHIFTS:
        above = ops.top_p_mass(logits, best, choice.temperature, least, shift, count, floor)
        narrow(_over_ranks(head, above), share, least, wanted, shift, count)
    return least


def keep(logits: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """The logits whose keys are at least ``least`` [B]; -inf in place of the rest."""
    return logits.masked_fill(ordered_keys(logits) < least[:, None], float("-inf"))


def least_of_min_p(best: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Key [B] of the least logit that min_p keeps; ``best``: the greatest logits of all ranks."""
    kept = choice.min_p > 0
    return ordered_keys(torch.where(kept, best + choice.temperature * choice.min_p.clamp(min=1e-30).log(), -torch.inf))


def least_of_top_k(head: VocabParallelHead, logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Key [B] of the top_k-th greatest logit of all ranks; where top_k is 0 the lowest key.

    Equal logits are kept too.
    """
    least = _bisected(head, logits, (logits > float("-inf")).long(), choice.top_k)
    return torch.where(choice.top_k == 0, LOWEST, least)


def least_of_top_p(head: VocabParallelHead, logits: torch.Tensor, best: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Key [B] of the least logit that top_p keeps; where top_p is 1 the lowest key.

    Equally likely ids are kept together or not at all. Probabilities are integers, in units of 2**-40 of the greatest one.
    """
    likelihood = torch.exp((logits - best[:, None]) / choice.temperature.clamp(min=1e-20)[:, None])
    mass = (likelihood.double() * _UNIT).long()
    total = _over_ranks(head, mass.sum(dim=-1)).sum(dim=0)
    wanted = (choice.top_p.double() * total).ceil().long().clamp(min=1)
    return torch.where(choice.top_p == 1, LOWEST, _bisected(head, logits, mass, wanted))


def _bisected(head: VocabParallelHead, logits: torch.Tensor, mass: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Greatest key [B] from which on the ``mass`` of all ranks is at least ``wanted``.

    The lowest key if there is none. By bisection over the 2**32 possible keys, with one sum over all ranks per step.
    """
    keys = ordered_keys(logits)
    # mass of keys >= low is at least `wanted`, that of keys >= high is less.
    low = torch.full_like(wanted, LOWEST)
    high = torch.full_like(wanted, 1 << 31)
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        above = _over_ranks(head, (mass * (keys >= middle[:, None])).sum(dim=-1)).sum(dim=0)
        enough = above >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def _over_ranks(head: VocabParallelHead, x: torch.Tensor) -> torch.Tensor:
    """Gather the x of all ranks: [W, ...]."""
    return all_gather(x[None], head.team, head.mode)


WIDTH = 2 + 2 * MOST_LOGPROBS
# Rows computed at once, of a long prompt: their logits are copied in fp32.
ROWS = 256
# Logits of a block at most: the k likeliest tokens of a row lie in k blocks.
BLOCK = 64
LOWEST_ID = 0x7FFFFFFF


def token_logprobs(head: VocabParallelHead, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows [B, WIDTH] of tokens [B] under logits [B, V'/W], the same on every rank. Collective.

    Ranks exchange their MOST_LOGPROBS greatest logits, sums and a count per row.
    """
    if len(tokens) > ROWS:
        pairs = zip(logits.split(ROWS), tokens.split(ROWS), strict=True)
        return torch.cat([token_logprobs(head, *pair) for pair in pairs])
    index = tokens - head.start
    owned = (index >= 0) & (index < head.local_size)
    own = logits.gather(1, torch.where(owned, index, 0)[:, None]).float()
    value = torch.where(owned[:, None], own, -torch.inf)
    likelihoods = invariant_likelihoods if head.mode == "invariant" else _likelihoods
    value, total, top, ids = likelihoods(head, logits, value)
    at_least = (logits >= value).sum(dim=1, dtype=torch.float32)
    rank = all_gather(at_least[None], head.team, head.mode).sum(dim=0)
    rows = torch.full((len(tokens), WIDTH), -torch.inf, device=logits.device)
    count = top.shape[1]
    rows[:, 0], rows[:, 1] = (value - total)[:, 0], rank
    rows[:, 2 : 2 + count] = top - total
    rows[:, 2 + MOST_LOGPROBS : 2 + MOST_LOGPROBS + count] = ids
    return rows


def _likelihoods(head: VocabParallelHead, logits: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(value [B, 1], log of the sum of exp [B, 1], greatest logits [B, k], their ids [B, k]).

    Over all ranks; collective.
    value  -inf but on the rank that has the token
    """
    logits, most = logits.float(), min(MOST_LOGPROBS, head.local_size)
    top, ids = logits.topk(most, dim=1)
    greatest = top[:, :1].clamp(min=torch.finfo(torch.float32).min)  # a rank's ids may all be padding
    total = (logits - greatest).exp().sum(dim=1, keepdim=True)
    parts = torch.cat((value, greatest, total, top, (ids + head.start).float()), dim=1)
    value, greatest, total, top, ids = all_gather(parts[None], head.team, head.mode).split((1, 1, 1, most, most), dim=2)
    value, most_of_all = value.amax(dim=0), greatest.amax(dim=0)
    total = most_of_all + (total * (greatest - most_of_all).exp()).sum(dim=0).log()
    # Of equal ones the lowest rank's come first, on every rank.
    top, order = top.transpose(0, 1).flatten(1).sort(dim=1, descending=True, stable=True)
    ids = ids.transpose(0, 1).flatten(1).gather(1, order)
    return value, total, top[:, :MOST_LOGPROBS], ids[:, :MOST_LOGPROBS]


def invariant_likelihoods(
    head: VocabParallelHead, logits: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The result of `_likelihoods`, whose bits depend on the logits of a row alone.

    logits  equal slices of the padded vocabulary, by rank
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

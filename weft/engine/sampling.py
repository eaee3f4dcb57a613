"""The next token of each sequence, chosen on the device from logits that stay where they are, split over the ranks.

    greedy       argmax over words of logit
    temperature  argmax over words of logit + temperature * g(word)     g: Gumbel noise; the argmax is distributed as softmax
    top_p        the same, among the most likely words that together reach top_p

The ranks exchange a (value, word) a sequence, and for top_p sums of probabilities, never logits. The noise is a function of
(seed of the request, position of the token, word), so equal logits give the same choice, whatever the world size and the
rest of the batch. All ranks choose alike: what they compare has been exchanged, and sums are of integers, in no order that
matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft import ops
from weft.engine.params import Kind
from weft.ops.vocab.top_p_mass import LOWEST, SHIFTS, narrow
from weft.parallel.vocabulary import VocabParallelHead, all_gather

# Steps of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as signed integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIT = 2.0**40  # the mass of the likeliest word; those of 2**18 words sum up below 2**63
_KEY_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What decides over the next token of each of B sequences; on the device.

    temperature, top_p  [B] fp32
    seed                [B] int64
    position            [B] int64: the place that the token will have in its sequence
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def choose_tokens(
    head: VocabParallelHead, logits: torch.Tensor, choice: Choice, kind: Kind, *, fused: bool = False
) -> torch.Tensor:
    """This rank's logits [B, V'/W] → the chosen words [B] int64, the same on every rank.

    kind   the greatest of the sequences' kinds (params.py); lesser ones among them are served right
    fused  by weft.ops' kernels; else by the torch operations below, on fp32 logits. Collective
    """
    if kind == Kind.GREEDY:
        return head.argmax(logits, fused=fused)
    if fused:
        return _draw_fused(head, logits, choice, kind)
    words = torch.arange(head.start, head.start + head.local_size, device=logits.device)
    # Times the temperature, and not the logits divided by it: 0 is then greedy and nothing overflows.
    scores = logits + choice.temperature[:, None] * gumbel(choice.seed, choice.position, words)
    if kind == Kind.NUCLEUS:
        scores = scores.masked_fill(~likeliest(head, logits, choice.temperature, choice.top_p), float("-inf"))
    return head.argmax(scores, fused=False)


def _draw_fused(head: VocabParallelHead, logits: torch.Tensor, choice: Choice, kind: Kind) -> torch.Tensor:
    floor = None
    if kind == Kind.NUCLEUS:
        best = _over_ranks(head, ops.best_words(logits, head.start))[..., 0].flatten(0, 1).amax(dim=0)
        floor = torch.full_like(choice.seed, LOWEST, dtype=torch.int32)
        wanted = torch.empty_like(choice.seed)
        for shift in SHIFTS:
            above = ops.likelihood_above(logits, best, choice.temperature, floor, shift)
            narrow(_over_ranks(head, above), choice.top_p, floor, wanted, shift)
    pairs = ops.best_words(logits, head.start, choice.temperature, choice.seed, choice.position, floor)
    return ops.join_words(_over_ranks(head, pairs))


def gumbel(seed: torch.Tensor, position: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """[B, n] fp32: -log(-log u) with u uniform in (0, 1), from 32 random bits of (seed[B], position[B], words[n])."""
    stream = _mix(_mix(seed) + position)
    bits = (_mix(stream[:, None] + words * _GAMMA) >> 32) & 0xFFFFFFFF
    # 1 - u rather than u, since the greatest noise, which wins, comes from the u next to 1.
    rest = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-rest))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """64 well mixed bits of each int64, a bijection."""
    x = x + _GAMMA
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def likeliest(
    head: VocabParallelHead, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """[B, V'/W] bool: the words whose more likely ones together stay below top_p, of this rank; all where top_p is 1.

    Of equally likely words all are kept or none. Probabilities are integers, in units of 2**-40 of the likeliest one. The least
    logit that is kept is found by bisection over the 2**32 values that it may have: one sum over all ranks each.
    """
    best = _over_ranks(head, logits.amax(dim=-1)).amax(dim=0)
    likelihood = torch.exp((logits - best[:, None]) / temperature.clamp(min=1e-20)[:, None])
    mass = (likelihood.double() * _UNIT).long()
    keys = _ordered(logits)
    total = _over_ranks(head, mass.sum(dim=-1)).sum(dim=0)
    wanted = (top_p.double() * total).ceil().long().clamp(min=1)
    # mass of keys >= low is at least `wanted`, that of keys >= high is less.
    low = torch.full_like(total, -(1 << 31))
    high = torch.full_like(total, 1 << 31)
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        above = _over_ranks(head, (mass * (keys >= middle[:, None])).sum(dim=-1)).sum(dim=0)
        enough = above >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return (keys >= low[:, None]) | (top_p == 1)[:, None]


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int32 that compare as the fp32 x do."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _over_ranks(head: VocabParallelHead, x: torch.Tensor) -> torch.Tensor:
    """x of each rank → [W, ...]"""
    return all_gather(x[None], head.team, head.mode)

"""Sampling of the next token of each sequence, on the device, from logits split over the ranks.

    greedy       argmax over token ids of logit
    temperature  argmax over token ids of logit + temperature * g(token id)    g: Gumbel noise; so distributed as softmax
    top_p        the same, among the most likely token ids that together reach top_p

Ranks exchange one (value, token id) per sequence, and for top_p sums of probabilities, never logits. The noise is a function of
(seed of the request, position of the token, token id), so equal logits give the same choice for every world size and batch. All
ranks choose alike: they compare exchanged values, and sums are of integers, so their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft import ops
from weft.engine.params import Kind
from weft.ops.vocab.sample_argmax import gumbel_noise
from weft.ops.vocab.top_p_mass import LOWEST, SHIFTS, narrow
from weft.parallel.vocabulary import VocabParallelHead, all_gather

_UNIT = 2.0**40  # mass of the most likely token; the masses of 2**18 tokens sum up below 2**63
_KEY_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Sampling parameters of B sequences, on the device.

    temperature, top_p  [B] fp32
    seed                [B] int64
    position            [B] int64: index that the token will have in its sequence
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def choose_tokens(
    head: VocabParallelHead, logits: torch.Tensor, choice: Choice, kind: Kind, *, fused: bool = False
) -> torch.Tensor:
    """Choose token ids [B] int64, the same on every rank, from this rank's logits [B, V'/W]. Collective.

    kind   greatest of the sequences' kinds (params.py); it serves the lesser ones too
    fused  by weft.ops' kernels; otherwise by the torch operations below, on fp32 logits
    """
    if kind == Kind.GREEDY:
        return head.argmax(logits, fused=fused)
    if fused:
        return _draw_fused(head, logits, choice, kind)
    ids = torch.arange(head.start, head.start + head.local_size, device=logits.device)
    # The noise is multiplied by the temperature, not the logits divided by it: 0 is then greedy, and nothing overflows.
    scores = logits + choice.temperature[:, None] * gumbel_noise(choice.seed, choice.position, ids)
    if kind == Kind.NUCLEUS:
        scores = scores.masked_fill(~nucleus(head, logits, choice.temperature, choice.top_p), float("-inf"))
    return head.argmax(scores, fused=False)


def _draw_fused(head: VocabParallelHead, logits: torch.Tensor, choice: Choice, kind: Kind) -> torch.Tensor:
    floor = None
    if kind == Kind.NUCLEUS:
        best = _over_ranks(head, ops.sample_argmax(logits, head.start))[..., 0].flatten(0, 1).amax(dim=0)
        floor = torch.full_like(choice.seed, LOWEST, dtype=torch.int32)
        wanted = torch.empty_like(choice.seed)
        for shift in SHIFTS:
            above = ops.top_p_mass(logits, best, choice.temperature, floor, shift)
            narrow(_over_ranks(head, above), choice.top_p, floor, wanted, shift)
    pairs = ops.sample_argmax(logits, head.start, choice.temperature, choice.seed, choice.position, floor)
    return ops.join_argmax(_over_ranks(head, pairs))


def nucleus(
    head: VocabParallelHead, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Mask [B, V'/W] of this rank's most likely token ids that together reach top_p; all where top_p is 1.

    Equally likely ids are kept together or not at all. Probabilities are integers, in units of 2**-40 of the greatest one. The
    least kept logit is found by bisection over its 2**32 possible values, with one sum over all ranks per step.
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
    """Keys, int32, in the order of the fp32 values x."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _over_ranks(head: VocabParallelHead, x: torch.Tensor) -> torch.Tensor:
    """Gather the x of all ranks: [W, ...]."""
    return all_gather(x[None], head.team, head.mode)

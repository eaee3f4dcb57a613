"""Choices of experts from logits, on the device: scores, their keys, and the k greatest of each row.

Choices are made by comparing 32-bit keys that order as the scores do, with the expert after them, k rounds of the greatest
one, the lowest expert first among equals. So ties have one answer, and rows with NaN end too.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# Added to a sum of weights before they are divided by it, as DeepSeek-V3 does: it changes no sum that is not almost 0.
TINY = tl.constexpr(1e-20)
# Keys below all numbers' keys: of NaN, of experts outside the chosen groups, of experts that are taken.
NAN_KEY, OUTSIDE_KEY, TAKEN_KEY = tl.constexpr(-(2**31) + 2), tl.constexpr(-(2**31) + 1), tl.constexpr(-(2**31))
# Below all pairs of a key and an expert.
TAKEN_PAIR = tl.constexpr(-(2**63))


class Scoring(NamedTuple):
    """Compile-time form of a routing.

    softmax      scores are softmax(logits), else sigmoid(logits)
    biased       choices, but not weights, are by score + bias
    groups       groups of experts, of which ``group_limit`` are chosen first; 1: none are
    renormalize  weights are divided by their sum
    """

    softmax: bool
    biased: bool
    renormalize: bool
    groups: int
    group_limit: int


@triton.jit
def key_of(x):
    """int32 keys that order as the fp32 numbers ``x`` do; -0.0 as 0.0, NaN below all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), NAN_KEY)


@triton.jit
def first_greatest(key, index):
    """[rows, 1]: the lowest ``index`` [1, n] of the greatest ``key`` [rows, n] of each row."""
    greatest = tl.max(key, axis=1, keep_dims=True)
    return tl.min(tl.where(key == greatest, index, 2**30), axis=1, keep_dims=True)


@triton.jit
def in_chosen_groups(score, key, expert, E, SCORING: tl.constexpr):
    """``key`` with OUTSIDE_KEY for experts outside the SCORING.group_limit best of SCORING.groups groups.

    A group is as good as the sum of its two best scores with a bias, as its best one without.
    """
    # Triton takes no field of a tuple as the bound of static_range.
    GROUPS: tl.constexpr = SCORING.groups
    LIMIT: tl.constexpr = SCORING.group_limit
    group = expert // (E // GROUPS)
    of_group = tl.full(score.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        in_group = tl.where(group == g, key, OUTSIDE_KEY)
        best = first_greatest(in_group, expert)
        value = tl.sum(tl.where(expert == best, score, 0.0), axis=1, keep_dims=True)
        if SCORING.biased:
            second = first_greatest(tl.where(expert == best, OUTSIDE_KEY, in_group), expert)
            value += tl.sum(tl.where(expert == second, score, 0.0), axis=1, keep_dims=True)
        of_group = tl.where(group == g, value, of_group)
    group_key = tl.where(expert < E, key_of(of_group), TAKEN_KEY)
    inside = tl.zeros(score.shape, tl.int1)
    for _ in tl.static_range(LIMIT):
        chosen = first_greatest(group_key, group)
        inside = inside | (group == chosen)
        group_key = tl.where(group == chosen, TAKEN_KEY, group_key)
    return tl.where(inside, key, tl.minimum(key, OUTSIDE_KEY))


@triton.jit
def turned(expert):
    """Numbers of 31 bits that order experts the other way round, and the experts of such numbers."""
    return 2147483647 - expert


@triton.jit
def choices_of(x, bias, E, SCORING: tl.constexpr, K: tl.constexpr):
    """(score, place, chosen, weight) of the rows of logits ``x`` fp32 [rows, n].

    x       -inf from expert E on; n is a power of two
    bias    of ``route_kernel``
    score   fp32 [rows, n]
    place   int32 [rows, n]: 1 + j for choice j, 0 for the other experts
    chosen  int32 [rows, 16]: the expert of each choice; weight fp32 [rows, 16]: its score; 0 from K on
    """
    ROWS: tl.constexpr = x.shape[0]
    expert = tl.arange(0, x.shape[1])[None, :]
    exists = expert < E
    if SCORING.softmax:
        # A NaN makes its row's sum NaN, and so all its weights, as torch's softmax does.
        grown = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        score = grown / tl.sum(grown, axis=1, keep_dims=True)
    else:
        score = tl.where(exists, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    # Without a bias logits order as scores do, and differ where rounded scores do not.
    rank_by = x
    if SCORING.biased:
        rank_by = score + tl.load(bias + expert, mask=exists, other=0.0)
    key = tl.where(exists, key_of(rank_by), TAKEN_KEY)
    if SCORING.groups > 1:
        key = in_chosen_groups(rank_by, key, expert, E, SCORING)
    # One reduction a round finds the greatest key and the lowest expert with it.
    pair = key.to(tl.int64) * 4294967296 + turned(expert)
    choice = tl.arange(0, 16)[None, :]
    chosen = tl.zeros([ROWS, 16], tl.int32)
    weight = tl.zeros([ROWS, 16], tl.float32)
    place = tl.zeros(x.shape, tl.int32)
    for j in tl.static_range(K):
        greatest = tl.max(pair, axis=1, keep_dims=True)
        place = tl.where(pair == greatest, j + 1, place)
        pair = tl.where(pair == greatest, TAKEN_PAIR, pair)
        best = turned(greatest.to(tl.int32))
        chosen = tl.where(choice == j, best, chosen)
        weight = tl.where(choice == j, tl.sum(tl.where(expert == best, score, 0.0), axis=1, keep_dims=True), weight)
    return score, place, chosen, weight

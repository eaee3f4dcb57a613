"""moe_combine in one kernel and one hop: partial sums that are their own flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.knobs import halved, knob
from weft.runtime.codec import exchangeable
from weft.transport.exchange import Body, launch
from weft.transport.plans import PushPlan
from weft.transport.push import send_order

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CombineWords:
    """All partial sums, by one kernel. row_bytes, num_warps: of ``PushPlan``."""

    row_bytes: int = knob(256, near=halved(128))
    num_warps: int = knob(1, near=halved(1, 16))

    @property
    def push(self) -> PushPlan:
        return PushPlan(transport="lamport", row_bytes=self.row_bytes, num_warps=self.num_warps)


class Pairs(NamedTuple):
    """y [W * most * k, H], ids and weights [W * most, k] of all ranks' tokens, up to ``most`` of each.

    weights  None: y has a row for each token [W * most, H], which is sent as it is
    """

    y: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None


class Lengths(NamedTuple):
    """Compile-time sizes: elements of a row, k, experts of a rank.

    Numbers of tokens are not: prompts have many, and each would be compiled for.
    tp  neighbouring ranks that hold slices of the same experts
    """

    width: int
    choices: int
    experts: int
    tp: int = 1


@triton.jit
def choice_of(pairs, token, j, LENGTHS: tl.constexpr, there, team):
    """(pair, whether its expert is here, its weight or 0) of choice j of tokens."""
    pair = token.to(tl.int64) * LENGTHS.choices + j
    id = tl.load(pairs.ids + pair, mask=there, other=-1)
    mine = (id >= 0) & (id // LENGTHS.experts == wl.rank(team) // LENGTHS.tp)
    weight = 0.0
    if pairs.weights is not None:
        weight = tl.load(pairs.weights + pair, mask=there, other=0.0).to(tl.float32)
    return pair, mine, weight


@triton.jit
def sums_of_token(pairs, token, column, LENGTHS: tl.constexpr, there, team):
    """[owners, BLOCK] weighted sums in fp32 of a tile's columns, which lie in one token of each owner

    token, there  [owners]

    All ids are loaded, then all rows, then they are added up: one behind the other takes k times the memory's latency.
    """
    CHOICES: tl.constexpr = LENGTHS.choices
    choices, rows, chosen = (), (), there & (token < 0)
    for j in tl.static_range(CHOICES):
        choices += (choice_of(pairs, token, j, LENGTHS, there, team),)
    if pairs.weights is None:
        for j in tl.static_range(CHOICES):
            chosen = chosen | choices[j][1]
        at = pairs.y + token.to(tl.int64)[:, None] * LENGTHS.width + column
        total = tl.load(at, mask=chosen[:, None], other=0.0).to(tl.float32)
    else:
        for j in tl.static_range(CHOICES):
            at = pairs.y + choices[j][0][:, None] * LENGTHS.width + column
            rows += (tl.load(at, mask=choices[j][1][:, None], other=0.0),)
        total = tl.zeros((token.shape[0], column.shape[1]), tl.float32)
        for j in tl.static_range(CHOICES):
            weighted = rows[j].to(tl.float32) * choices[j][2][:, None]
            total += tl.where(choices[j][1][:, None], weighted, 0.0)
    return total


@triton.jit
def sums_of_elements(pairs, token, column, LENGTHS: tl.constexpr, there, team):
    """``sums_of_token`` of tiles that go across tokens: token, column, there [owners, BLOCK]."""
    total, chosen = tl.zeros(there.shape, tl.float32), there & (token < 0)
    # Not unrolled: ids and weights of each element and choice would not fit the registers.
    for j in range(LENGTHS.choices):
        pair, mine, weight = choice_of(pairs, token, j, LENGTHS, there, team)
        chosen = chosen | mine
        if pairs.weights is not None:
            row = tl.load(pairs.y + pair * LENGTHS.width + column, mask=mine, other=0.0).to(tl.float32)
            total += tl.where(mine, row * weight, 0.0)
    if pairs.weights is None:
        total = tl.load(pairs.y + token.to(tl.int64) * LENGTHS.width + column, mask=chosen, other=0.0).to(tl.float32)
    return total


@triton.jit
def partials_of(pairs, most, owner, tile, there, LENGTHS: tl.constexpr, BLOCK: tl.constexpr, team):
    """[owners, BLOCK] weighted sums in fp32 of what this rank has for tile ``tile`` of their tokens

    owner, there  [owners]: a rank, and whether its sums are wanted
    """
    first, columns = tile * BLOCK, tl.arange(0, BLOCK)[None, :]
    if LENGTHS.width % BLOCK == 0:
        # Not a remainder, of which the compiler forgets that 16 bytes are together.
        local = first // LENGTHS.width
        token, column = owner * most + local, first - local * LENGTHS.width + columns
        there = there & (first < most * LENGTHS.width)
        total = sums_of_token(pairs, token, column, LENGTHS, there, team)
    else:
        place = first + columns
        token, column = owner[:, None] * most + place // LENGTHS.width, place % LENGTHS.width
        there = there[:, None] & (place < most * LENGTHS.width)
        total = sums_of_elements(pairs, token, column, LENGTHS, there, team)
    return total


@triton.jit
def partials_for_each(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, BLOCK] sums for the tile of each peer's tokens."""
    owners, sent = send_order(team, ROWS), tl.arange(0, ROWS) < wl.num_ranks(team) - 1
    return partials_of(message.x, message.most, owners, tile, sent, message.SIZES, BLOCK, team)


@triton.jit
def own_partials(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] sums for the tile of this rank's tokens."""
    me = tl.full((1,), wl.rank(team), tl.int32)
    return partials_of(message.x, message.most, me, tile, me >= 0, message.SIZES, BLOCK, team).reshape(BLOCK)


@triton.jit
def store_sum(received, message, tile, team):
    """Store the sum of the ranks' partial sums, ranks ascending."""
    ranks = tl.arange(0, received.shape[0])[:, None]
    place = tile * received.shape[1] + tl.arange(0, received.shape[1])
    received, total = received.to(tl.float32), tl.zeros((received.shape[1],), tl.float32)
    for source in tl.static_range(wl.num_ranks(team)):
        # Each rank's row alone: a sum over all of them would have an order of the compiler's choice.
        total += tl.sum(tl.where(ranks == source, received, 0.0), axis=0)
    inside = place < message.tokens * message.SIZES.width
    tl.store(message.out + place, total.to(message.out.dtype.element_ty), mask=inside)


# out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank's tokens        x: ``Pairs``, out [T, H]
# Zeros are sent for tokens without an expert here.
# every rank   | push tile 0, one row to each | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
BODY = Body(name="combine_words_kernel", send=partials_for_each, own=own_partials, store=store_sum)


def combine_words(
    design: CombineWords,
    team: Team,
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    tokens: int,
    tp: int,
) -> torch.Tensor:
    """[tokens, H] of this rank's tokens. weights: of ``Pairs``; experts: of each rank; tp: of ``Lengths``."""
    (rows, k), H = ids.shape, y.shape[1]
    out, most = y.new_empty((tokens, H)), rows // team.size
    pairs = Pairs(y.contiguous(), ids.contiguous(), None if weights is None else weights.contiguous())
    lengths, tokens = Lengths(H, k, experts, tp), (tokens, most)
    launch(BODY, (pairs, out, most * H), y.dtype, team, design.push, tokens=tokens, sizes=lengths)
    return out

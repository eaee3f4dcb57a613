"""moe_combine in one kernel and one hop: partial sums that are their own flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.arithmetic import cdiv
from weft.runtime.codec import exchangeable
from weft.transport.plans import PushPlan
from weft.transport.push import clears_in_order, keep_epoch, launch, my_slot, receive, send, send_order

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CombineWords:
    """All partial sums, by one kernel. row_bytes, num_warps: of ``PushPlan``."""

    row_bytes: int = 256
    num_warps: int = 1

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
def send_partials(
    pairs,
    most,
    tile,
    slot,
    epoch,
    team,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """Send to each peer the sums for its tile ``tile`` of BLOCK elements."""
    owners, sent = send_order(team, ROWS), tl.arange(0, ROWS) < wl.num_ranks(team) - 1
    rows = partials_of(pairs, most, owners, tile, sent, LENGTHS, BLOCK, team)
    send(rows.to(slot.dtype.element_ty), slot, epoch, team, TRANSPORT, BLOCK)


@triton.jit(do_not_specialize=["T", "most"])
def combine_words_kernel(
    pairs,
    out,
    T,
    buffer,
    epochs,
    team,
    most,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank's T

    grid     (programs,), each over every programs-th tile of BLOCK elements of a rank's tokens

    pairs: ``Pairs``; out [T, H]; buffer, epochs: ``Slots``; most: tokens of a rank, T or more; LENGTHS: ``Lengths``

    One send and receive a tile; signals, order, reuse: weft.transport.push. Zeros are sent for tokens without an expert here.

    every rank   | push tile 0, one row to each | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns, ranks = tl.arange(0, BLOCK), tl.arange(0, ROWS)[:, None]
    tiles = tl.cdiv(most * LENGTHS.width, BLOCK)
    ordered = clears_in_order(slot, tl.cdiv(tiles, programs), BLOCK)
    send_partials(pairs, most, program, slot, epoch, team, LENGTHS, BLOCK, ROWS, TRANSPORT)
    for tile in range(program, tiles, programs):
        if tile + programs < tiles:
            send_partials(pairs, most, tile + programs, slot, epoch + 1, team, LENGTHS, BLOCK, ROWS, TRANSPORT)
        place = tile * BLOCK + columns
        me = tl.full((1,), wl.rank(team), tl.int32)
        own = (
            partials_of(pairs, most, me, tile, me >= 0, LENGTHS, BLOCK, team).reshape(BLOCK).to(buffer.dtype.element_ty)
        )
        received = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, BLOCK).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(world):
            # Each rank's row alone: a sum over all of them would have an order of the compiler's choice.
            total += tl.sum(tl.where(ranks == source, received, 0.0), axis=0)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=place < T * LENGTHS.width)
        epoch += 1
    keep_epoch(epochs, epoch - 1)


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
    tiles = cdiv(most * H * y.itemsize, design.row_bytes)
    pairs = Pairs(y.contiguous(), ids.contiguous(), None if weights is None else weights.contiguous())
    lengths = Lengths(H, k, experts, tp)
    launch(combine_words_kernel, pairs, out, tokens, tiles, team, design.push, most, LENGTHS=lengths)
    return out

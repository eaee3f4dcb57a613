"""moe_combine in one kernel and one hop: partial sums that are their own flag, for few tokens."""

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
from weft.transport.push import clears_in_order, is_sent, keep_epoch, launch, my_slot, receive, send, send_order

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CombineWords:
    """All partial sums, by one kernel: for few tokens. row_bytes, num_warps: of ``PushPlan``."""

    row_bytes: int = 256
    num_warps: int = 1

    @property
    def push(self) -> PushPlan:
        return PushPlan(transport="lamport", row_bytes=self.row_bytes, num_warps=self.num_warps)


class Pairs(NamedTuple):
    """y [W * tokens * k, H], ids and weights [W * tokens, k] of all ranks' tokens.

    weights  None: y has a row for each token [W * tokens, H], which is sent as it is
    """

    y: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None


class Lengths(NamedTuple):
    """Compile-time sizes: most tokens of a rank, elements of a row, k, experts of a rank.

    tp  neighbouring ranks that hold slices of the same experts
    """

    tokens: int
    width: int
    choices: int
    experts: int
    tp: int = 1


@triton.jit
def partials_at(pairs, owner, place, LENGTHS: tl.constexpr, mask, team):
    """Weighted sums in fp32 of the results that this rank has for tokens of ``owner``.

    place  in the owner's [tokens, width]; all three broadcast against each other
    """
    token, column = owner * LENGTHS.tokens + place // LENGTHS.width, place % LENGTHS.width
    mask = mask & (place < LENGTHS.tokens * LENGTHS.width)
    total = tl.zeros(mask.shape, tl.float32)
    chosen = mask & (place < 0)
    # Not unrolled: the loads of all choices at once would not fit the registers.
    for j in range(LENGTHS.choices):
        pair = token.to(tl.int64) * LENGTHS.choices + j
        id = tl.load(pairs.ids + pair, mask=mask, other=-1)
        mine = (id >= 0) & (id // LENGTHS.experts == wl.rank(team) // LENGTHS.tp)
        if pairs.weights is None:
            chosen = chosen | mine
        else:
            weight = tl.load(pairs.weights + pair, mask=mine, other=0.0).to(tl.float32)
            row = tl.load(pairs.y + pair * LENGTHS.width + column, mask=mine, other=0.0).to(tl.float32)
            total += tl.where(mine, row * weight, 0.0)
    if pairs.weights is None:
        at = pairs.y + token.to(tl.int64) * LENGTHS.width + column
        total = tl.load(at, mask=chosen, other=0.0).to(tl.float32)
    return total


@triton.jit
def send_partials(
    pairs,
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
    place = (tile * BLOCK + tl.arange(0, BLOCK))[None, :]
    rows = partials_at(pairs, send_order(team, ROWS)[:, None], place, LENGTHS, is_sent(team, ROWS) & (place >= 0), team)
    send(rows.to(slot.dtype.element_ty), slot, epoch, team, TRANSPORT, BLOCK)


@triton.jit(do_not_specialize=["T"])
def combine_words_kernel(
    pairs,
    out,
    T,
    buffer,
    epochs,
    team,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank's T

    grid     (programs,), each over every programs-th tile of BLOCK elements of a rank's tokens

    pairs: ``Pairs``; out [T, H]; buffer, epochs: ``Slots``; LENGTHS: ``Lengths``

    One send and receive a tile; signals, order, reuse: weft.transport.push. Zeros are sent for tokens without an expert here.

    every rank   | push tile 0, one row to each | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns, ranks = tl.arange(0, BLOCK), tl.arange(0, ROWS)[:, None]
    TILES: tl.constexpr = (LENGTHS.tokens * LENGTHS.width + BLOCK - 1) // BLOCK
    ordered = clears_in_order(slot, tl.cdiv(TILES, programs), BLOCK)
    send_partials(pairs, program, slot, epoch, team, LENGTHS, BLOCK, ROWS, TRANSPORT)
    for tile in range(program, TILES, programs):
        if tile + programs < TILES:
            send_partials(pairs, tile + programs, slot, epoch + 1, team, LENGTHS, BLOCK, ROWS, TRANSPORT)
        place = tile * BLOCK + columns
        own = partials_at(pairs, wl.rank(team), place, LENGTHS, place >= 0, team).to(buffer.dtype.element_ty)
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
    out, lengths = y.new_empty((tokens, H)), Lengths(rows // team.size, H, k, experts, tp)
    tiles = cdiv(lengths.tokens * out.stride(0) * y.itemsize, design.row_bytes)
    pairs = Pairs(y.contiguous(), ids.contiguous(), None if weights is None else weights.contiguous())
    launch(combine_words_kernel, pairs, out, tokens, tiles, team, design.push, LENGTHS=lengths)
    return out

"""Exchange of a message between all ranks, tile by tile: the kernel of collectives of one hop.

What is sent and stored is up to three functions (``Body``), which read a ``Message``:

    SEND(message, tile, team, BLOCK, ROWS)     the tile's [ROWS, BLOCK] by ``send_order``, or [BLOCK], the same for all ranks
    OWN(message, tile, team, BLOCK, ROWS)      [BLOCK], what this rank keeps of its tile; None: what SEND has returned
    STORE(received, message, tile, team)       stores received [ROWS, BLOCK], row s from rank s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import Team
from weft.transport.plans import PushPlan
from weft.transport.push import (
    Prepared,
    clears_in_order,
    count_tiles,
    is_rank,
    is_sent,
    keep_epoch,
    my_slot,
    receive,
    send,
    send_order,
    sum_of_ranks,
    tile_rest,
)
from weft.triton_api import JITFunction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Body:
    """Functions of an exchange.

    name  of the kernel in profiles and reports, different for each body
    """

    name: str
    send: JITFunction
    own: JITFunction | None
    store: JITFunction


class Message(NamedTuple):
    """Arguments of the functions of an exchange.

    x, out  tensors, or tuples of tensors
    n       elements that each rank sends to a peer, int64; elements beyond are sent as zeros, since whole rows are sent
    tokens, most  two numbers for which no further kernel is compiled, or None
    SIZES   compile-time sizes
    """

    x: tl.tensor
    out: tl.tensor
    n: tl.tensor
    tokens: tl.tensor
    most: tl.tensor
    SIZES: tl.constexpr


@triton.jit(do_not_specialize=["tokens", "most"], repr=lambda made: made.constants["KERNEL"])
def exchange_kernel(
    x,
    out,
    n,
    buffer,  # Slots, in the dtype that is sent
    epochs,
    team,
    tokens,
    most,
    KERNEL: tl.constexpr,
    SEND: tl.constexpr,
    OWN: tl.constexpr,
    STORE: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """STORE(SEND of each rank for this one)

    grid      (programs,), each over every programs-th tile of BLOCK elements

    signals   ``send``: a row of a stage at every peer; the words are their own flag
    waits     ``receive``, before STORE: all rows of its stage but this rank's. Words of the stage are of this epoch, since it
              was cleared before any was written, so STORE needs no further wait
    order     sends are one ahead. Epochs count tiles: n is equal on all ranks, and so are a program's tiles and their order
    reuse     of a stage: weft.transport.push
    progress  a program sends a tile before it waits for the peers' tile of that number; all programs are resident

    program p  | send p | send p + P | receive, store p | send p + 2P | receive, store p + P | ...            of P programs
    """
    program, programs, length = tl.program_id(0), tl.num_programs(0), tl.cast(n, tl.int64)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    tiles = count_tiles(length, BLOCK)
    ordered = clears_in_order(slot, tl.cdiv(tiles, programs), BLOCK)
    epoch = exchange_tiles(
        Message(x, out, length, tokens, most, SIZES),  # in place: a constant that is assigned becomes a number
        program, tiles, slot, epoch, ordered, team, SEND, OWN, STORE, BLOCK, ROWS, TRANSPORT,
    )  # fmt: skip
    keep_epoch(epochs, epoch - 1)


@triton.jit
def exchange_tiles(
    message,
    first,
    tiles,
    slot,
    epoch,
    ordered,
    team,
    SEND: tl.constexpr,
    OWN: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """Exchange this program's tiles from ``first`` < ``tiles`` on; returns the epoch after the last.

    epoch  that in which the first tile is sent
    """
    programs = tl.num_programs(0)
    following = send_tile(message, first, slot, epoch, team, SEND, OWN, BLOCK, ROWS, TRANSPORT)
    for tile in range(first, tiles, programs):
        kept = following
        if tile + programs < tiles:
            following = send_tile(message, tile + programs, slot, epoch + 1, team, SEND, OWN, BLOCK, ROWS, TRANSPORT)
        if OWN is None:
            own = kept
        else:
            own = OWN(message, tile, team, BLOCK, ROWS).to(slot.dtype.element_ty)
        received = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, BLOCK)
        STORE(received, message, tile, team)
        epoch += 1
    return epoch


@triton.jit
def send_tile(
    message,
    tile,
    slot,
    epoch,
    team,
    SEND: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """Send a tile to all ranks; returns it, or its number where OWN reads it again."""
    block = SEND(message, tile, team, BLOCK, ROWS).to(slot.dtype.element_ty)
    if len(block.shape) == 1:
        send(tl.broadcast_to(block[None, :], (ROWS, BLOCK)), slot, epoch, team, TRANSPORT, BLOCK)
    else:
        send(block, slot, epoch, team, TRANSPORT, BLOCK)
    if OWN is None:
        return block
    else:
        return tile


@triton.jit
def place_of(message, tile, BLOCK: tl.constexpr):
    """(start of a tile in a part, int64; its columns [BLOCK]; mask of columns before the part's end)."""
    columns = tl.arange(0, BLOCK)
    start = tl.cast(tile, tl.int64) * BLOCK
    return start, columns, columns < tile_rest(message.n, start, BLOCK)


@triton.jit
def whole(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tile of x [n]: for all ranks, and what this one keeps."""
    start, columns, inside = place_of(message, tile, BLOCK)
    return tl.load(message.x + start + columns, mask=inside, other=0)


@triton.jit
def part_for_each(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tile's columns of x [W, n], row s for rank s."""
    start, columns, inside = place_of(message, tile, BLOCK)
    rows = message.x + start + send_order(team, ROWS)[:, None] * message.n + columns[None, :]
    return tl.load(rows, mask=is_sent(team, ROWS) & inside[None, :], other=0)


@triton.jit
def own_part(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tile's columns of x [W, n] in this rank's row."""
    start, columns, inside = place_of(message, tile, BLOCK)
    return tl.load(message.x + start + wl.rank(team) * message.n + columns, mask=inside, other=0)


@triton.jit
def side_by_side(received, message, tile, team):
    """out [W, n] = the ranks' tiles, by rank."""
    start, columns, inside = place_of(message, tile, received.shape[1])
    place = message.out + start + tl.arange(0, received.shape[0])[:, None] * message.n + columns[None, :]
    mask = is_rank(team, received.shape[0]) & inside[None, :]
    tl.store(place, received.to(message.out.dtype.element_ty), mask=mask)


@triton.jit
def summed(received, message, tile, team):
    """out [n] = the sum of the ranks' tiles."""
    start, columns, inside = place_of(message, tile, received.shape[1])
    tl.store(message.out + start + columns, sum_of_ranks(received).to(message.out.dtype.element_ty), mask=inside)


def prepare(
    body: Body, n: int, dtype: torch.dtype, team: Team, plan: PushPlan, sizes: object = None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``launch`` of one size without numbers of tokens, as a function of x and out."""
    prepared = _prepared(body, dtype, team, plan, sizes, (None, None))
    return prepared.launch.of_pair(min(cdiv(n, prepared.block), prepared.programs), n)


def launch(
    body: Body,
    arguments: tuple[Any, Any, int],
    dtype: torch.dtype,
    team: Team,
    plan: PushPlan,
    tokens: tuple[int, int] | None = None,
    sizes: object = None,
) -> None:
    """Run ``exchange_kernel`` with a program for each tile, or as many as can be resident.

    arguments  x, out and n of a ``Message``, whose elements are sent in ``dtype``; tokens: its tokens and most
    """
    x, out, n = arguments
    if tokens is None:
        prepared = _prepared(body, dtype, team, plan, sizes, (None, None))
        prepared.launch(min(cdiv(n, prepared.block), prepared.programs), x, out, n)
    else:
        n = cdiv(n, 16) * 16  # for other lengths another kernel would be compiled
        prepared = _prepared(body, dtype, team, plan, sizes, ())
        prepared.launch(min(cdiv(n, prepared.block), prepared.programs), x, out, n, *tokens)


def _prepared(body: Body, dtype: torch.dtype, team: Team, plan: PushPlan, sizes: object, fixed: tuple) -> Prepared:
    known = team.workspace("exchanges", dict)
    # By the name of the body: to hash a JITFunction, Triton walks through all functions that it calls.
    prepared = known.get(key := (body.name, plan, dtype, team.is_traced, sizes))
    if prepared is None:
        functions = {"KERNEL": body.name, "SEND": body.send, "OWN": body.own, "STORE": body.store, "SIZES": sizes}
        prepared = known[key] = Prepared.make(exchange_kernel, team, plan, dtype, functions, fixed)
    return prepared

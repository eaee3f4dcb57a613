"""Exchange of a message between all ranks, tile by tile: the loop that every one-hop push kernel runs.

A kernel hands ``exchange`` its message, a tuple that only its own functions read, and three functions:

    SEND(message, tile, team, BLOCK, ROWS)     the tile's [ROWS, BLOCK] by ``send_order``, or [BLOCK], the same for all ranks
    OWN(message, tile, team, BLOCK, ROWS)      [BLOCK], what this rank keeps of its own tile; None: what SEND has returned
    STORE(received, message, tile, team)       stores received [ROWS, BLOCK], row s from rank s

all_gather      whole             whole        side_by_side        reduce_scatter      part_for_each    own_part    summed
all_to_all      part_for_each     own_part     side_by_side        all_reduce          summand          summand     summed

    program p  | send p | send p + P | receive, store p | send p + 2P | receive, store p + P | ...            of P programs

    signals   ``send``: a row of a stage at every peer, the words their own flag
    waits     ``receive``: all rows of its stage but this rank's. It returns words of that epoch and no earlier ones, since a
              stage is cleared before it is written again, so STORE needs no further wait
    order     of the sends: one ahead, for which weft.transport.push proves when a stage may be written again.
              Epochs count tiles, so a message must have as many tiles on all ranks, and a program those of equal number
    progress  a program sends tile t before it waits for a peer's tile t; all programs are resident (``launch``)
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.transport.push import (
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


@triton.jit
def exchange(
    message,
    tiles,
    buffer,
    epochs,
    team,
    SEND: tl.constexpr,
    OWN: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """Exchange ``tiles`` tiles, each of BLOCK elements for a peer; program p every programs-th one from p on.

    buffer, epochs  of ``Slots``. The kernel has loaded nothing before: the previous kernel may still run.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    ordered = clears_in_order(slot, tl.cdiv(tiles, programs), BLOCK)
    epoch = exchange_tiles(
        message, program, tiles, slot, epoch, ordered, team, SEND, OWN, STORE, BLOCK, ROWS, TRANSPORT
    )
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
    """Exchange this program's tiles from ``first`` < ``tiles`` on, the first sent as ``epoch``; returns the next epoch."""
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
    """Send a tile to all ranks; returns what its ``receive`` needs of it: the tile, or its number where OWN reads it again."""
    block = SEND(message, tile, team, BLOCK, ROWS).to(slot.dtype.element_ty)
    if len(block.shape) == 1:
        send(tl.broadcast_to(block[None, :], (ROWS, BLOCK)), slot, epoch, team, TRANSPORT, BLOCK)
    else:
        send(block, slot, epoch, team, TRANSPORT, BLOCK)
    if OWN is None:
        return block
    else:
        return tile


class Message(NamedTuple):
    """Message of a collective. Elements beyond n are sent as zeros, so that whole rows are sent.

    x, out  [n] or [W, n], a part for each rank
    n       elements of a part, int64
    """

    x: tl.tensor
    out: tl.tensor
    n: tl.tensor


@triton.jit
def exchange_parts(
    x,
    out,
    n,
    buffer,
    epochs,
    team,
    SEND: tl.constexpr,
    OWN: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """``exchange`` of a ``Message``."""
    n = tl.cast(n, tl.int64)
    tiles = count_tiles(n, BLOCK)
    exchange(Message(x, out, n), tiles, buffer, epochs, team, SEND, OWN, STORE, BLOCK, ROWS, TRANSPORT)


@triton.jit
def place_of(message, tile, BLOCK: tl.constexpr):
    """(start of a tile in a part, int64; its columns [BLOCK]; mask of those before the part's end)."""
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

"""Design "pipelined" of moe_dispatch and moe_combine: rows and sums by copy engines, in pieces.

They carry one piece while the next rows are rounded to fp8, or the next sums are computed.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, E4M3, quantized
from weft.ops.knobs import counts, design_type, either, halved, knob, powers
from weft.ops.moe.exchange.exchange_op import (
    CombineArguments,
    DispatchArguments,
    PushRows,
    Sizes,
    channel_of,
    chosen_of,
    dense,
    kept_tensors,
)
from weft.ops.moe.exchange.push import Mail, partial_of, send_choices
from weft.ops.moe.moe_sum import NO_SUMMAND, add_up
from weft.ops.moe.routing import Routing
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.transport import copy_channel
from weft.transport.copy_channel import MAX_CHUNKS

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Relative sizes of pieces, from few large ones to many small ones.
PIECES = (1,), (1, 1), (1, 3), (1, 2, 1), (1, 1, 1, 1), (1, 3, 3, 1), (1, 2, 4, 4, 4, 1), (1, 1, 1, 1, 1, 1, 1, 1)
# Tokens whose rows of 16 bits begin at a multiple of 16 bytes, whatever their width.
ALIGNED_TOKENS = 8


def pieces_knob(*default: int) -> Any:
    """Knob of relative sizes of 1 to MAX_CHUNKS pieces."""
    rule = f"are not 1 to {MAX_CHUNKS} relative sizes of at least 1"

    def legal(pieces: tuple[int, ...]) -> str | None:
        return None if 1 <= len(pieces) <= MAX_CHUNKS and min(pieces) >= 1 else rule

    return knob(default, legal, either(*PIECES))


def piece_ends(pieces: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Number of ``tokens`` up to the end of each piece of these relative sizes; none is empty.

    All but the last are multiples of ALIGNED_TOKENS.
    """
    shares = accumulate(pieces)
    ends = (cdiv(tokens * share, sum(pieces) * ALIGNED_TOKENS) * ALIGNED_TOKENS for share in shares)
    return tuple(sorted({min(end, tokens) for end in ends} - {0}))


@design_type
class CombinePieces:
    """Copy engines carry the sums of a piece of tokens while the sums of the next one are computed.

    pieces        relative sizes of the pieces of a peer's tokens, at most MAX_CHUNKS. A small first one leaves early;
                  after a small last one little is left to add up
    chunk, block  tokens and columns that a program of the last kernel adds up at a time, powers of two; num_warps: its warps
    per_sm        programs of the last kernel for each SM
    """

    pieces: tuple[int, ...] = pieces_knob(1, 3, 3, 1)
    chunk: int = knob(1, powers(), halved())
    block: int = knob(1024, powers(), halved(16))
    num_warps: int = knob(4, powers(), halved(1, 16))
    per_sm: int = knob(8, counts(), halved(1, 16))


@triton.jit(do_not_specialize=["T"])
def add_pieces_kernel(
    y, ids, weights, received, out, T, landed, team, SIZES: tl.constexpr, ENDS: tl.constexpr, PIECES: tl.constexpr
):
    """out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank

    grid: (programs,), each over every programs-th tile of SIZES.chunk tokens and SIZES.block columns, tokens ascending

    y [W * tokens * k, H]; ids, weights [W * tokens, k] of all ranks; out [T, H]; SIZES: ``Sizes``
    Without weights (None) y is [W * tokens, H] and its rows are what is summed.
    received  [W, tokens, H], symmetric: [s] what rank s has for this rank's tokens; rows of tokens without an expert there, and
              this rank's own, are not read
    landed    channel: signals the arrival of piece i of rank s; begin_kernel has begun the call
    ENDS      number of tokens up to the end of each of the PIECES pieces

    signals   copy engine of rank s, after each piece i
    waits     before a program's first load of a piece: piece i of all other ranks, in whose engines earlier pieces come first.
              What this rank has is computed from y before the wait, and needs none
    order     ranks ascending, in fp32, each rank's sum rounded to y's dtype as it is where it travels; rounded once more
    reuse     of a half of ``received``: CopyChannel
    progress  programs wait for copy engines only, so they need not all be resident
    """
    world: tl.constexpr = wl.num_ranks(team)
    CHUNK: tl.constexpr = SIZES.chunk
    BLOCK: tl.constexpr = SIZES.block
    BLOCKS: tl.constexpr = (SIZES.width + SIZES.block - 1) // SIZES.block
    me = wl.rank(team)
    wl.follow_previous_kernel()
    call, arrived = wl.current_call(landed), 0
    for tile in range(tl.program_id(0), tl.cdiv(T, CHUNK) * BLOCKS, tl.num_programs(0)):
        first = tile // BLOCKS * CHUNK
        local = first + tl.arange(0, CHUNK)
        column = tile % BLOCKS * BLOCK + tl.arange(0, BLOCK)[None, :]
        token, there, inside = me * SIZES.tokens + local, local < T, column < SIZES.width
        chosen = chosen_of(ids, token, there, me, SIZES)
        own = partial_of(y, ids, weights, token, chosen, column, SIZES, team).to(out.dtype.element_ty).to(tl.float32)
        last, piece = tl.minimum(first + CHUNK, T) - 1, 0
        for number in tl.static_range(PIECES):
            piece += (last >= ENDS[number]).to(tl.int32)
        if piece >= arrived:
            for step in range(1, world):
                wl.chunk_wait(call, (me + step) % world, piece, team)
            arrived = piece + 1
        total = tl.zeros((CHUNK, BLOCK), tl.float32)
        for source in tl.static_range(world):
            sent = chosen_of(ids, token, there, source, SIZES) & (me != source)
            row = received + (source * SIZES.tokens + local).to(tl.int64)[:, None] * SIZES.width + column
            row = tl.load(row, mask=sent & inside, other=0.0).to(tl.float32)
            total += tl.where(me == source, own, row)
        target = out + local.to(tl.int64)[:, None] * SIZES.width + column
        tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & inside)


def combine_pieces(design: CombinePieces, team: Team, given: CombineArguments) -> torch.Tensor:
    """[tokens, H] of this rank's tokens.

    Rank r serves r + 1, r + 2, … (mod W), so that every rank receives from one peer at a time. The sums of all pieces stay
    until the copy engine has been joined.

    signals  copy engine of rank r, after each piece: flags[r, piece] = epoch at the tokens' rank
    waits    the copy engine, before a piece's copy: fork, so all work before it, the piece's moe_sum the last, has ended
             add_pieces_kernel, before it loads a piece of a rank: that flag
    reuse    of a half of the received sums: CopyChannel

    kernels  | begin | sum 0 | sum 1 | sum 2 |                | own sums, sum of ranks 0 | 1 | 2 |
    copy                     | piece 0 | piece 1 | piece 2 |                     two ranks, three pieces
    """
    (rows, k), H, world, me = given.ids.shape, given.y.shape[1], team.size, team.rank
    held, tokens = given.held(team), given.tokens
    sizes = Sizes.of(design, rows // world, H, k, held.count, tp=given.tp)
    most, ends = sizes.tokens, piece_ends(design.pieces, sizes.tokens)
    y, ids, weights = dense(*(x if x is None else x.detach() for x in (given.y, given.ids, given.weights)))
    channel = channel_of(team, "moe_combine", y.dtype, rows * H)
    received = channel.begin(team)[: rows * H].view(rows, H)
    out = y.new_empty((tokens, H))
    sums = None if weights is None else y.new_empty(((world - 1) * most, H))
    for step in range(1, world):
        owner = (me + step) % world
        for number, (begin, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
            piece = slice(owner * most + begin, owner * most + end)
            if weights is None:
                source = y[piece]
            else:
                source = sums[(step - 1) * most + begin : (step - 1) * most + end]
                pairs = y[piece.start * k : piece.stop * k]
                add_up(pairs, Routing(ids[piece], weights[piece]), (held.first, held.count), NO_SUMMAND, source)
            team.copy_engine.fork()
            channel.send(team, received[me * most + begin : me * most + end], source, me, number, owner)
    if tokens > 0:
        constants = {"SIZES": sizes, "ENDS": ends, "PIECES": len(ends), "num_warps": design.num_warps}
        constants |= launch_options(team.caps)
        launch = launch_of(team, add_pieces_kernel, (sizes, design), lambda: constants)
        programs = min(cdiv(tokens, sizes.chunk) * cdiv(H, sizes.block), design.per_sm * team.caps.sms)
        launch(programs, y, ids, weights, received, out, tokens, channel.landed.view, team.view)
    team.copy_engine.join()
    return out


@design_type
class DispatchPieces:
    """Copy engines carry all rows to all ranks, a piece of fp8 rows while the next one is rounded.

    pieces        relative sizes of the pieces of fp8 rows for the first peer, at most MAX_CHUNKS. A small first one leaves
                  early. Later peers get all rows in one piece, as all peers do rows of x's dtype
    chunk, block  tokens and columns of a program that rounds, powers of two; num_warps: its warps
    """

    pieces: tuple[int, ...] = pieces_knob(1, 3)
    chunk: int = knob(2, powers(), halved())
    block: int = knob(1024, powers(), halved(16))
    num_warps: int = knob(4, powers(), halved(1, 16))


def mail_channel(team: Team, sizes: Sizes, dtype: torch.dtype) -> copy_channel.CopyChannel:
    """Receive buffers [2, …] of a ``Mail``: rows in fp8 where ``sizes`` has scales, else in ``dtype``."""
    (tokens, width, k, W), fp8 = (sizes.tokens, sizes.width, sizes.choices, team.size), sizes.scales > 0
    rows = team.empty((2, W, tokens, width), E4M3 if fp8 else dtype, name="rows")
    ids = team.empty((2, W, tokens, k), torch.int32, name="ids")
    weights = team.empty((2, W, tokens, k), dtype, name="weights")
    scales = [team.empty((2, W, tokens, sizes.scales), torch.float32, name="scales")] if fp8 else []
    return copy_channel.CopyChannel.make(team, (rows, ids, weights, *scales), W)


@triton.jit(do_not_specialize=["begin", "T"])
def place_tokens_kernel(x, ids, weights, begin, T, mail, team, SIZES: tl.constexpr):
    """Store choices, and scales of fp8 rows, at all ranks, and fp8 rows in this rank's own place.

    grid: (cdiv(tokens, SIZES.chunk), cdiv(H, SIZES.block) in fp8, else 1), tokens from ``begin`` on

    x [T, H], ids int32 and weights [T, k]; mail: ``Mail``; SIZES: ``Sizes``. Rows of x's dtype are left to the copy engine.
    Tokens from T on have ids of -1 and no row.

    signals  none: the copy engine's flag comes after this kernel's end, by fork, and so after its stores at peers
    waits    none: begin_kernel comes before it
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    local = begin + tl.program_id(0) * SIZES.chunk + tl.arange(0, SIZES.chunk)
    wl.follow_previous_kernel()
    if tl.program_id(1) == 0:
        for step in range(world):
            send_choices(ids, weights, T, local, (me + step) % world, mail, SIZES, team)
    if SIZES.scales > 0:
        start = tl.program_id(1) * SIZES.block
        column = start + tl.arange(0, SIZES.block)[None, :]
        there = (local < T)[:, None]
        mask = there & (column < SIZES.width)
        row = tl.load(x + local.to(tl.int64)[:, None] * SIZES.width + column, mask=mask, other=0.0)
        row, scale = quantized(row)
        slot = (me * SIZES.tokens + local).to(tl.int64)[:, None]
        tl.store(mail.rows + slot * SIZES.width + column, row, mask=mask)
        block = start // COLUMNS + tl.arange(0, SIZES.block // COLUMNS)[None, :]
        for step in range(world):
            place = wl.symm_at(mail.scales, (me + step) % world, team) + slot * SIZES.scales + block
            tl.store(place, scale, mask=there & (block < SIZES.scales))


def dispatch_pieces(design: DispatchPieces, team: Team, given: DispatchArguments) -> list[torch.Tensor]:
    """[rows, ids, weights, and scales of fp8 rows] of all ranks: this call's half of the receive buffers.

    Rank r serves r + 1, r + 2, … (mod W), so that every rank receives from one peer at a time. Only rows pass the copy engine,
    with one flag for each peer: the kernel stores choices and scales at the peers, since each copy takes microseconds to start.

    signals  copy engine of rank r, after all rows for a peer: flags[r, 0] = epoch there
    waits    the copy engine, before a piece's copy: fork, so all work before it, place_tokens_kernel the last, has ended
             wait_kernel, at the end: flags[s, 0] of every peer s, so what runs next reads all rows
    reuse    of a half of the receive buffers: CopyChannel. What a rank has received is read before its next call begins

    kernels  | begin | round 0 | round 1 |                                           | wait |
    copy                       | to r+1, 0 | to r+1, 1 | flag | to r+2 | flag |                    rank r of 3, fp8
    """
    most, fp8 = given.max_tokens, given.fp8
    x, ids, weights = (tensor.detach().contiguous() for tensor in (given.x, *given.routing))
    (T, H), k, world, me = x.shape, ids.shape[1], team.size, team.rank
    experts = given.experts * given.tp // world
    sizes = Sizes.of(design, most, H, k, experts, fp8=fp8, tp=given.tp)
    # The number of flags does not depend on the fields of the design: calls with any fields share the buffers.
    key = "moe_dispatch pieces", sizes._replace(chunk=0, block=0, experts=0, tp=1), x.dtype
    channel = team.workspace(key, lambda: mail_channel(team, sizes, x.dtype))
    mail = Mail(*channel.begin_each(team))
    channel.halves.written()
    constants = {"SIZES": sizes, "num_warps": design.num_warps, **launch_options(team.caps)}
    launch = launch_of(team, place_tokens_kernel, (sizes, design), lambda: constants)
    own = mail.rows[me, :T]
    source = own if fp8 else x
    peers = [(me + step) % world for step in range(1, world)]
    cuts = piece_ends(design.pieces, T)[:-1] if fp8 and peers else ()
    for begin, end in zip((0, *cuts), (*cuts, most), strict=True):
        grid = cdiv(end - begin, sizes.chunk), cdiv(H, sizes.block) if fp8 else 1
        launch(grid, x, ids, weights, begin, T, mail, team.view)
        team.copy_engine.fork()
        if end in cuts:
            team.copy_engine.put(own[begin:end], source[begin:end], peers[0])
    for peer in peers:
        first = begin if peer == peers[0] else 0
        channel.send(team, own[first:], source[first:], me, 0, peer)
    if not fp8:
        own.copy_(x)
    if peers:
        copy_channel.await_chunk(channel.landed, 0, (me + 1) % world, world - 1)
    team.copy_engine.join()
    arrived = [buffer.flatten(0, 1) for buffer in mail if buffer is not None]
    copies = PushRows()
    sizes = Sizes.of(copies, most, H, k, experts, tp=given.tp)
    return kept_tensors(copies, sizes, team, arrived) if given.kept else arrived

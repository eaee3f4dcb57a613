"""Design "pipelined" of moe_combine: sums of a piece of tokens travel while the next are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.knobs import check_knobs, counts, halved, knob, powers
from weft.ops.moe.arrival import channel_of
from weft.ops.moe.combine_rows import partial_of
from weft.ops.moe.exchange import Sizes, chosen_of, piece_ends, pieces_knob
from weft.ops.moe.moe_sum import NO_SUMMAND, add_up
from weft.ops.moe.routing import Experts
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CombinePieces:
    """Copy engines carry the sums of a piece of tokens while those of the next one are computed.

    pieces        relative sizes of the pieces of a peer's tokens, at most MAX_CHUNKS. A small first one leaves early;
                  behind a small last one little is left to add up
    chunk, block  tokens and columns that a program of the last kernel adds up at a time, powers of two; num_warps: its warps
    per_sm        programs of the last kernel for each SM
    """

    pieces: tuple[int, ...] = pieces_knob(1, 3, 3, 1)
    chunk: int = knob(1, powers(), halved())
    block: int = knob(1024, powers(), halved(16))
    num_warps: int = knob(4, powers(), halved(1, 16))
    per_sm: int = knob(8, counts(), halved(1, 16))
    __post_init__ = check_knobs


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

    signals   copy engine of rank s, behind each piece i
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


def combine_pieces(
    design: CombinePieces,
    team: Team,
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: Experts,
    tokens: int,
    tp: int,
) -> torch.Tensor:
    """[tokens, H] of this rank's tokens.

    weights: of ``add_pieces_kernel``, without which y's rows travel as they are; experts: this rank's; tp: of ``Sizes``

    Rank r serves r + 1, r + 2, … (mod W), so that every rank receives from one peer at a time. The sums of all pieces stay
    until the copy engine has been joined.

    signals  copy engine of rank r, behind each piece: flags[r, piece] = epoch at the tokens' rank
    waits    the copy engine, before a piece's copy: fork, so all work before it, the piece's moe_sum the last, has ended
             add_pieces_kernel, before it loads a piece of a rank: that flag
    reuse    of a half of the received sums: CopyChannel

    kernels  | begin | sum 0 | sum 1 | sum 2 |                | own sums, sum of ranks 0 | 1 | 2 |
    copy                     | piece 0 | piece 1 | piece 2 |                     two ranks, three pieces
    """
    (rows, k), H, world, me = ids.shape, y.shape[1], team.size, team.rank
    sizes = Sizes.of(design, rows // world, H, k, experts.count, tp=tp)
    most, ends = sizes.tokens, piece_ends(design.pieces, sizes.tokens)
    y, ids, weights = (None if tensor is None else tensor.detach().contiguous() for tensor in (y, ids, weights))
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
                pairs, held = y[piece.start * k : piece.stop * k], (experts.first, experts.count)
                add_up(pairs, ids[piece], weights[piece], held, NO_SUMMAND, source)
            team.copy_engine.fork()
            channel.send(team, received[me * most + begin : me * most + end], source, me, number, owner)
    if tokens > 0:
        launch = launch_of(
            team,
            add_pieces_kernel,
            (sizes, design),
            lambda: {
                "SIZES": sizes,
                "ENDS": ends,
                "PIECES": len(ends),
                "num_warps": design.num_warps,
                **launch_options(team.caps),
            },
        )
        programs = min(cdiv(tokens, sizes.chunk) * cdiv(H, sizes.block), design.per_sm * team.caps.sms)
        launch(programs, y, ids, weights, received, out, tokens, channel.landed.view, team.view)
    team.copy_engine.join()
    return out

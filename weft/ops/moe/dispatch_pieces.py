"""Design "pipelined" of moe_dispatch: copy engines carry rows while the next are rounded to fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, E4M3, quantized
from weft.ops.knobs import check_knobs, halved, knob, powers
from weft.ops.moe.dispatch_rows import Mail, send_choices
from weft.ops.moe.exchange import (
    DispatchArguments,
    PushRows,
    Sizes,
    copy_chosen,
    piece_ends,
    pieces_knob,
)
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.transport.copy_channel import CopyChannel, await_chunk

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPieces:
    """Copy engines carry all rows to all ranks, a piece of fp8 rows while the next one is rounded.

    pieces        relative sizes of the pieces of fp8 rows for the first peer, at most MAX_CHUNKS. A small first one leaves
                  early. Later peers get all rows in one piece, as all peers do those of x's dtype
    chunk, block  tokens and columns of a program that rounds, powers of two; num_warps: its warps
    """

    pieces: tuple[int, ...] = pieces_knob(1, 3)
    chunk: int = knob(2, powers(), halved())
    block: int = knob(1024, powers(), halved(16))
    num_warps: int = knob(4, powers(), halved(1, 16))
    __post_init__ = check_knobs


def channel_of(team: Team, sizes: Sizes, dtype: torch.dtype) -> CopyChannel:
    """Receive buffers [2, …] of a ``Mail``: rows in fp8 where ``sizes`` has scales, else in ``dtype``."""
    (tokens, width, k, W), fp8 = (sizes.tokens, sizes.width, sizes.choices, team.size), sizes.scales > 0
    rows = team.empty((2, W, tokens, width), E4M3 if fp8 else dtype, name="rows")
    ids = team.empty((2, W, tokens, k), torch.int32, name="ids")
    weights = team.empty((2, W, tokens, k), dtype, name="weights")
    scales = [team.empty((2, W, tokens, sizes.scales), torch.float32, name="scales")] if fp8 else []
    return CopyChannel.make(team, (rows, ids, weights, *scales), W)


@triton.jit(do_not_specialize=["begin", "T"])
def place_tokens_kernel(x, ids, weights, begin, T, mail, team, SIZES: tl.constexpr):
    """Store choices, and scales of fp8 rows, at all ranks, and fp8 rows in this rank's own place.

    grid: (cdiv(tokens, SIZES.chunk), cdiv(H, SIZES.block) in fp8, else 1), tokens from ``begin`` on

    x [T, H], ids int32 and weights [T, k]; mail: ``Mail``; SIZES: ``Sizes``. Rows of x's dtype are left to the copy engine.
    Tokens from T on have ids of -1 and no row.

    signals  none: the copy engine's flag is behind this kernel's end, by fork, and so behind its stores at peers
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

    signals  copy engine of rank r, behind all rows for a peer: flags[r, 0] = epoch there
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
    # The number of flags does not depend on the fields of the design: calls with any of them share the buffers.
    key = "moe_dispatch pieces", sizes._replace(chunk=0, block=0, experts=0, tp=1), x.dtype
    channel = team.workspace(key, lambda: channel_of(team, sizes, x.dtype))
    mail = Mail(*channel.begin_each(team))
    channel.halves.written()
    launch = launch_of(
        team,
        place_tokens_kernel,
        (sizes, design),
        lambda: {"SIZES": sizes, "num_warps": design.num_warps, **launch_options(team.caps)},
    )
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
        await_chunk(channel.landed, 0, (me + 1) % world, world - 1)
    team.copy_engine.join()
    arrived = [buffer.flatten(0, 1) for buffer in mail if buffer is not None]
    if given.kept:
        chosen, rows = PushRows(), Sizes.of(PushRows(), most, H, k, experts, tp=given.tp)
        arrived[:3] = copy_chosen(chosen, rows, team, *arrived[:2]), arrived[1].clone(), arrived[2].clone()
    return arrived

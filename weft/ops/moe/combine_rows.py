"""moe_combine in one kernel: weighted sums to the tokens' ranks, a flag behind each chunk of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.moe.exchange import PushRows, Sizes, chosen_of, launch_rows, mailboxes
from weft.transport.halves import await_chunk, begin_half, end_half

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class Partials(NamedTuple):
    """One half of the receive buffers, symmetric: rows [W, tokens, H], [s] written by rank s.

    This rank's own part is not used.
    """

    rows: torch.Tensor


@triton.jit
def partial_of(y, ids, weights, token, chosen, column, SIZES: tl.constexpr, team):
    """[chunk, block] fp32: weighted sums of the results that this rank has; without weights its rows.

    token  [chunk], numbers among all ranks' tokens
    """
    # Triton takes fields of a tuple neither as a shape nor as a bound of static_range.
    CHUNK: tl.constexpr = SIZES.chunk
    BLOCK: tl.constexpr = SIZES.block
    CHOICES: tl.constexpr = SIZES.choices
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    if weights is None:
        at = y + token.to(tl.int64)[:, None] * SIZES.width + column
        total += tl.load(at, mask=chosen & (column < SIZES.width), other=0.0).to(tl.float32)
    else:
        for j in tl.static_range(CHOICES):
            pair = token.to(tl.int64)[:, None] * SIZES.choices + j
            id = tl.load(ids + pair, mask=chosen, other=-1)
            mine = (id >= 0) & (id // SIZES.experts == wl.rank(team) // SIZES.tp)
            weight = tl.load(weights + pair, mask=mine, other=0.0).to(tl.float32)
            row = tl.load(y + pair * SIZES.width + column, mask=mine & (column < SIZES.width), other=0.0).to(tl.float32)
            total += tl.where(mine, row * weight, 0.0)
    return total


@triton.jit(do_not_specialize=["T"])
def moe_combine_kernel(y, ids, weights, out, T, partials, half, team, SIZES: tl.constexpr, CHUNKS: tl.constexpr):
    """out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank

    grid: (programs,), each over every programs-th chunk of SIZES.chunk tokens of each rank

    y [W * tokens * k, H]; ids, weights [W * tokens, k] of all ranks; out [T, H]; partials: ``Partials``; SIZES: ``Sizes``
    Without weights (None) y is [W * tokens, H] and its rows are what is summed.

    signals   those of ``begin_half``
              program p, to every peer s: landed[me, c] = this call, once its partial rows of chunk c of rank s lie there, also
              if none
    waits     that of ``begin_half``, before any store: the peer has ended the call that read this half last
              landed[r, c] >= this call for every peer r, before the rows of this program's chunk c are read
    order     ranks ascending, in fp32, each rank's sum rounded to y's dtype. This rank's is not stored: it is computed where it
              is added, and rounded as the others are
    reuse     of a half: weft.transport.halves
    progress  a program waits for program 0 and for the one of the same number at its peers: all must be resident
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    CHUNK: tl.constexpr = SIZES.chunk
    BLOCK: tl.constexpr = SIZES.block
    me = wl.rank(team)
    wl.follow_previous_kernel()
    call = begin_half(half, team)
    for chunk in range(program, CHUNKS, programs):
        local = chunk * SIZES.chunk + tl.arange(0, SIZES.chunk)
        for step in range(1, world):
            owner = (me + step) % world
            began = wl.begin_put(team)
            token = owner * SIZES.tokens + local
            chosen = chosen_of(ids, token, local < SIZES.tokens, me, SIZES)
            rows = (
                wl.symm_at(partials.rows, owner, team) + (me * SIZES.tokens + local).to(tl.int64)[:, None] * SIZES.width
            )
            for begin in range(0, SIZES.width, SIZES.block):
                column = begin + tl.arange(0, SIZES.block)[None, :]
                total = partial_of(y, ids, weights, token, chosen, column, SIZES, team)
                tl.store(rows + column, total.to(rows.dtype.element_ty), mask=chosen & (column < SIZES.width))
            wl.end_put(began, partials.rows, 0, owner, team)
            wl.chunk_notify(call, owner, chunk, team)
    for chunk in range(program, CHUNKS, programs):
        await_chunk(call, chunk, team)
        began = wl.begin_tile(team)
        local = chunk * SIZES.chunk + tl.arange(0, SIZES.chunk)
        token = me * SIZES.tokens + local
        for begin in range(0, SIZES.width, SIZES.block):
            column = begin + tl.arange(0, SIZES.block)[None, :]
            chosen = chosen_of(ids, token, local < T, me, SIZES)
            own = partial_of(y, ids, weights, token, chosen, column, SIZES, team)
            own = own.to(out.dtype.element_ty).to(tl.float32)
            total = tl.zeros((CHUNK, BLOCK), tl.float32)
            for source in range(world):
                sent = chosen_of(ids, token, local < T, source, SIZES) & (me != source)
                row = partials.rows + (source * SIZES.tokens + local).to(tl.int64)[:, None] * SIZES.width + column
                row = tl.load(row, mask=sent & (column < SIZES.width), other=0.0).to(tl.float32)
                total += tl.where(me == source, own, row)
            target = out + local.to(tl.int64)[:, None] * SIZES.width + column
            tl.store(target, total.to(out.dtype.element_ty), mask=(local < T)[:, None] & (column < SIZES.width))
        wl.end_tile(began, chunk, 0, team)
    end_half(half, call)


def combine_rows(
    design: PushRows,
    team: Team,
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    tokens: int,
    tp: int,
) -> torch.Tensor:
    """[tokens, H] of this rank's tokens.

    weights: of ``moe_combine_kernel``; experts: of each rank; tp: of ``Sizes``
    """
    (rows, k), H = ids.shape, y.shape[1]
    out, sizes = y.new_empty((tokens, H)), Sizes.of(design, rows // team.size, H, k, experts, tp=tp)
    shapes = {"rows": ((team.size, sizes.tokens, H), y.dtype)}
    boxes = team.workspace(("moe_combine", design, sizes, y.dtype), lambda: mailboxes(team, sizes.chunks, shapes))
    buffers, half = boxes.next()
    boxes.written()
    launch_rows(moe_combine_kernel, design, sizes, team, (y, ids, weights, out), tokens, Partials(*buffers), half)
    return out

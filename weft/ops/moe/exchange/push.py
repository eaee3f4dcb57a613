"""Design "push" of moe_dispatch and moe_combine: stores of rows and sums, a flag after each chunk.

Rows go to the ranks that need them, weighted sums to the tokens' ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, E4M3, quantized
from weft.ops.moe.exchange.exchange_op import (
    MAX_PROGRAMS,
    CombineArguments,
    DispatchArguments,
    PushRows,
    Sizes,
    chosen_of,
    dense,
    kept_tensors,
)
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.transport.halves import Half, Halves, await_chunk, begin_half, end_half
from weft.triton_api import JITFunction

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def mailboxes(team: Team, chunks: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Halves:
    """Symmetric buffers [2, *shape] of these names, with a flag for each chunk of a rank. Collective."""
    buffers = tuple(team.empty((2, *shape), dtype, name=name) for name, (shape, dtype) in shapes.items())
    return Halves.make(team, buffers, team.size, chunks, MAX_PROGRAMS)


def launch_rows(
    kernel: JITFunction, design: PushRows, sizes: Sizes, team: Team, given: tuple, buffers: NamedTuple, half: Half
) -> None:
    """Launch a kernel of ``PushRows`` with as many programs as chunks, or as can be resident.

    given  its first arguments: tensors, of which strided ones are copied, then T
    """
    programs = min(sizes.chunks, MAX_PROGRAMS, team.max_programs(design.num_warps))
    options = {"CHUNKS": sizes.chunks, "num_warps": design.num_warps, "launch_cooperative_grid": True}
    constants = {"SIZES": sizes, **options, **launch_options(team.caps)}
    launch = launch_of(team, kernel, (sizes, design), lambda: constants)
    *tensors, T = given
    launch(programs, *dense(*tensors), T, buffers, half, team.view)


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
            held = (id >= 0) & (id // SIZES.experts == wl.rank(team) // SIZES.tp)
            weight = tl.load(weights + pair, mask=held, other=0.0).to(tl.float32)
            row = tl.load(y + pair * SIZES.width + column, mask=held & (column < SIZES.width), other=0.0).to(tl.float32)
            total += tl.where(held, row * weight, 0.0)
    return total


@triton.jit(do_not_specialize=["T"])
def moe_combine_kernel(y, ids, weights, out, T, partials, half, team, SIZES: tl.constexpr, CHUNKS: tl.constexpr):
    """out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank

    grid: (programs,), each over every programs-th chunk of SIZES.chunk tokens of each rank

    y [W * tokens * k, H]; ids, weights [W * tokens, k] of all ranks; out [T, H]; partials: ``Partials``; SIZES: ``Sizes``
    Without weights (None) y is [W * tokens, H] and its rows are what is summed.

    signals   as ``begin_half``
              program p, to every peer s: landed[me, c] = this call, once its partial rows of chunk c of rank s lie there, also
              if none
    waits     that of ``begin_half``, before any store: the peer has ended the call that read this half last
              landed[r, c] >= this call for every peer r, before the rows of this program's chunk c are read
    order     ranks ascending, in fp32, each rank's sum rounded to y's dtype. This rank's is not stored: it is computed where it
              is added, and rounded as the received sums are
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


def combine_rows(design: PushRows, team: Team, given: CombineArguments) -> torch.Tensor:
    """[tokens, H] of this rank's tokens."""
    y, ids, (rows, k), H = given.y, given.ids, given.ids.shape, given.y.shape[1]
    out = y.new_empty((given.tokens, H))
    sizes = Sizes.of(design, rows // team.size, H, k, given.held(team).count, tp=given.tp)
    shapes = {"rows": ((team.size, sizes.tokens, H), y.dtype)}
    boxes = team.workspace(("moe_combine", design, sizes, y.dtype), lambda: mailboxes(team, sizes.chunks, shapes))
    buffers, half = boxes.next()
    boxes.written()
    arguments = y, ids, given.weights, out, given.tokens
    launch_rows(moe_combine_kernel, design, sizes, team, arguments, Partials(*buffers), half)
    return out


class Mail(NamedTuple):
    """One half of the receive buffers, symmetric.

    rows [W, tokens, H], ids and weights [W, tokens, k], scales [W, tokens, SIZES.scales] of fp8 rows
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None = None


@triton.jit
def send_choices(ids, weights, T, local, peer, mail, SIZES: tl.constexpr, team):
    """Store to ``peer`` the choices of this rank's tokens ``local`` [chunk]; ids of -1 from token T on."""
    there, choice = local < T, tl.arange(0, SIZES.padded)[None, :]
    slot = wl.rank(team) * SIZES.tokens + local
    at, of_token = local.to(tl.int64)[:, None] * SIZES.choices + choice, choice < SIZES.choices
    target = slot.to(tl.int64)[:, None] * SIZES.choices + choice
    exists = (local < SIZES.tokens)[:, None] & of_token
    id = tl.load(ids + at, mask=there[:, None] & of_token, other=-1)
    weight = tl.load(weights + at, mask=there[:, None] & of_token, other=0.0)
    tl.store(wl.symm_at(mail.ids, peer, team) + target, id, mask=exists)
    tl.store(wl.symm_at(mail.weights, peer, team) + target, weight, mask=exists)


@triton.jit
def send_chunk(x, ids, weights, T, chunk, peer, mail, SIZES: tl.constexpr, team):
    """Store to ``peer`` the choices of this rank's tokens in ``chunk``, and the rows that it needs."""
    local = chunk * SIZES.chunk + tl.arange(0, SIZES.chunk)
    there, slot = local < T, wl.rank(team) * SIZES.tokens + local
    send_choices(ids, weights, T, local, peer, mail, SIZES, team)
    chosen = chosen_of(ids, local, there, peer, SIZES)
    rows = wl.symm_at(mail.rows, peer, team)
    for begin in range(0, SIZES.width, SIZES.block):
        column = begin + tl.arange(0, SIZES.block)[None, :]
        mask = chosen & (column < SIZES.width)
        row = tl.load(x + local.to(tl.int64)[:, None] * SIZES.width + column, mask=mask, other=0.0)
        if SIZES.scales > 0:
            row, scale = quantized(row)
            block = begin // COLUMNS + tl.arange(0, SIZES.block // COLUMNS)[None, :]
            place = wl.symm_at(mail.scales, peer, team) + slot.to(tl.int64)[:, None] * SIZES.scales + block
            tl.store(place, scale, mask=chosen & (block < SIZES.scales))
        tl.store(rows + slot.to(tl.int64)[:, None] * SIZES.width + column, row, mask=mask)


@triton.jit(do_not_specialize=["T"])
def moe_dispatch_kernel(x, ids, weights, T, mail, half, team, SIZES: tl.constexpr, CHUNKS: tl.constexpr):
    """Store this rank's T choices at all ranks, and each row at the ranks with an expert it chose.

    grid: (programs,), each over every programs-th chunk of SIZES.chunk tokens

    x [T, H], ids int32 and weights [T, k]; mail: ``Mail``; half: ``Half``; SIZES: ``Sizes``

    signals   as ``begin_half``
              program p, to every peer: landed[me, c] = this call, once its part of chunk c lies there, also if it has no rows
    waits     that of ``begin_half``, before any store: the peer has ended what read this half last
              landed[s, c] >= this call for every peer s and this program's chunks, at the end: what runs next reads all rows
    reuse     of a half: weft.transport.halves
    progress  a program waits for program 0 and for the one of the same number at its peers: all must be resident
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    wl.follow_previous_kernel()
    call = begin_half(half, team)
    for chunk in range(program, CHUNKS, programs):
        for step in range(1, world + 1):
            peer = (me + step) % world
            began = wl.begin_put(team)
            send_chunk(x, ids, weights, T, chunk, peer, mail, SIZES, team)
            if step < world:
                wl.end_put(began, mail.rows, 0, peer, team)
                wl.chunk_notify(call, peer, chunk, team)
    for chunk in range(program, CHUNKS, programs):
        await_chunk(call, chunk, team)
    end_half(half, call)


def dispatch_rows(design: PushRows, team: Team, given: DispatchArguments) -> list[torch.Tensor]:
    """[rows, ids, weights, and scales of fp8 rows] of all ranks: this call's half of the receive buffers."""
    x, (ids, weights), most = given.x, given.routing, given.max_tokens
    (T, H), k, W = x.shape, ids.shape[1], team.size
    sizes = Sizes.of(design, most, H, k, given.experts * given.tp // W, fp8=given.fp8, tp=given.tp)
    of_choices = (W, most, k)
    shapes = {"rows": ((W, most, H), E4M3 if given.fp8 else x.dtype)}
    shapes |= {"ids": (of_choices, torch.int32), "weights": (of_choices, x.dtype)}
    if given.fp8:
        shapes["scales"] = ((W, most, sizes.scales), torch.float32)
    boxes = team.workspace(("moe_dispatch", design, sizes, x.dtype), lambda: mailboxes(team, sizes.chunks, shapes))
    buffers, half = boxes.next()
    boxes.written()
    launch_rows(moe_dispatch_kernel, design, sizes, team, (x, ids, weights, T), Mail(*buffers), half)
    arrived = [buffer.flatten(0, 1) for buffer in buffers]
    return kept_tensors(design, sizes, team, arrived) if given.kept else arrived

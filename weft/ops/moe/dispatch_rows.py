"""moe_dispatch in one kernel: rows to the ranks that need them, a flag behind each chunk of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, E4M3, quantized
from weft.ops.moe.exchange import (
    DispatchArguments,
    PushRows,
    Sizes,
    chosen_of,
    copy_chosen,
    launch_rows,
    mailboxes,
)
from weft.transport.halves import await_chunk, begin_half, end_half

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


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

    signals   those of ``begin_half``
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
    launch_rows(moe_dispatch_kernel, design, sizes, team, (x, ids, weights), T, Mail(*buffers), half)
    arrived = [buffer.flatten(0, 1) for buffer in buffers]
    if given.kept:
        arrived[:3] = copy_chosen(design, sizes, team, *arrived[:2]), arrived[1].clone(), arrived[2].clone()
    return arrived

"""All-gather: every rank gets all ranks' tensors, one after the other along dimension 0.

out[s * m : (s + 1) * m] = x_s                      x_s: [m, ...], out: [W * m, ...]; every bit as it was sent
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.exchange import (
    MAX_REGISTERS,
    count_tiles,
    exchange,
    is_rank,
    keep_epoch,
    my_slot,
    signal_slots,
    tile_rest,
)
from weft.ops.registration import WORDS, check_has_rows, check_tensor
from weft.runtime.team import Team, find_team


@triton.jit
def all_gather_kernel(
    x,  # [n] words
    out,  # [W, n]
    n,
    buffer,  # Slots, in x's dtype
    arrived,
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out[s] = x of rank s.                     grid: (programs,), each over every programs-th tile of BLOCK words

    One exchange a tile; signals, order, reuse: weft.ops.exchange.

    rank 0   | load tile | push to all | flags | wait for all | store W tiles |
    rank 1   | load tile | push to all | flags | wait for all | store W tiles |
    """
    program = tl.program_id(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    arrived += program * wl.num_ranks(team)
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    length = tl.cast(n, tl.int64)
    sources = tl.arange(0, ROWS)[:, None] * length
    for tile in range(program, count_tiles(length, BLOCK), tl.num_programs(0)):
        start = tl.cast(tile, tl.int64) * BLOCK
        inside = columns < tile_rest(length, start, BLOCK)
        rows = tl.broadcast_to(tl.load(x + start + columns, mask=inside, other=0)[None, :], (ROWS, BLOCK))
        received = exchange(rows, slot, arrived, epoch, team, TRANSPORT)
        tl.store(out + start + sources + columns[None, :], received, mask=is_rank(team, ROWS) & inside[None, :])
        epoch += 1
    keep_epoch(epochs, epoch - 1, TRANSPORT)


def run(x: torch.Tensor, team: Team) -> torch.Tensor:
    """``x`` checked, any strides. Returns a new contiguous tensor of shape [W * x.shape[0], ...]."""
    out = x.new_empty((team.size * x.shape[0], *x.shape[1:]))
    if team.size == 1:
        return out.copy_(x)
    n = x.numel()
    if n == 0:
        return out
    words = WORDS[x.itemsize]
    slots = signal_slots(team)
    block = slots.row_bytes // x.itemsize
    all_gather_kernel[(min(triton.cdiv(n, block), slots.programs),)](
        x.contiguous().view(words), out.view(words), n, slots.buffer.view(words), slots.arrived, slots.epochs,
        team.view, BLOCK=block, ROWS=triton.next_power_of_2(team.size), TRANSPORT="signals",
        num_warps=slots.num_warps, maxnreg=MAX_REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out


@torch.library.custom_op("weft::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, team: str) -> torch.Tensor:
    return run(x, find_team(team))


@_all_gather.register_fake
def _(x, team):
    return x.new_empty((find_team(team).size * x.shape[0], *x.shape[1:]))


def _remember(ctx, inputs, output):
    ctx.team = inputs[1]


def _backward(ctx, grad):
    # Rank s used my x in its part of out: the sum over ranks of what they ask of my part.
    return torch.ops.weft.reduce_scatter(grad, ctx.team), None


_all_gather.register_autograd(_backward, setup_context=_remember)


def all_gather(x: torch.Tensor, team: Team) -> torch.Tensor:
    """All ranks' ``x`` along dimension 0, on every rank: a new contiguous tensor [W * x.shape[0], ...].

    ``x``: at least one dimension, any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or 8 bytes, on
    ``team.device``; the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph it
    replays correctly, after one call outside. ValueError for wrong arguments. The backward is a reduce-scatter.
    """
    check_tensor("all_gather", "x", x, team)
    check_has_rows("all_gather", "x", x)
    return torch.ops.weft.all_gather(x, team.name)

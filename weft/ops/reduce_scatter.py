"""Reduce-scatter: rank r gets part r of the sum of all ranks' tensors.

out_r[...] = round(sum over s of x_s[r * m : (r + 1) * m])      x: [W * m, ...], out: [m, ...]; fp32, rounded once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.dispatch import choose
from weft.ops.exchange import (
    MAX_REGISTERS,
    count_tiles,
    exchange,
    is_rank,
    keep_epoch,
    lamport_slots,
    my_slot,
    send_order,
    signal_slots,
    sum_of_ranks,
    tile_rest,
)
from weft.ops.registration import FLOATS, check_even, check_tensor
from weft.runtime.team import Team, find_team


@triton.jit
def reduce_scatter_kernel(
    x,  # [W, n]
    out,  # [n]
    n,
    buffer,  # Slots, in x's dtype
    arrived,
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out = sum over ranks of their x[my rank].    grid: (programs,), each over every programs-th tile of BLOCK columns

    One exchange a tile; signals, order, reuse: weft.ops.exchange. Elements beyond n are sent as zeros.

    rank 0   | load W tiles | push one to each | wait for all | sum | store |
    rank 1   | load W tiles | push one to each | wait for all | sum | store |
    """
    program = tl.program_id(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    arrived += program * wl.num_ranks(team)
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    length = tl.cast(n, tl.int64)
    to_peer = send_order(team, ROWS)[:, None] * length
    for tile in range(program, count_tiles(length, BLOCK), tl.num_programs(0)):
        start = tl.cast(tile, tl.int64) * BLOCK
        inside = columns < tile_rest(length, start, BLOCK)
        rows = tl.load(x + start + to_peer + columns[None, :], mask=is_rank(team, ROWS) & inside[None, :], other=0)
        received = exchange(rows, slot, arrived, epoch, team, TRANSPORT)
        tl.store(out + start + columns, sum_of_ranks(received, x.dtype.element_ty), mask=inside)
        epoch += 1
    keep_epoch(epochs, epoch - 1, TRANSPORT)


def run(x: torch.Tensor, team: Team, transport: str) -> torch.Tensor:
    """``x`` checked, any strides. Returns a new contiguous tensor of shape [x.shape[0] / W, ...]."""
    out = x.new_empty((x.shape[0] // team.size, *x.shape[1:]))
    if team.size == 1:
        return out.copy_(x)
    n = out.numel()
    if n == 0:
        return out
    slots = lamport_slots(team, x.itemsize) if transport == "lamport" else signal_slots(team)
    block = slots.row_bytes // x.itemsize
    reduce_scatter_kernel[(min(triton.cdiv(n, block), slots.programs),)](
        x.contiguous(), out, n, slots.buffer.view(x.dtype), slots.arrived, slots.epochs, team.view,
        BLOCK=block, ROWS=triton.next_power_of_2(team.size), TRANSPORT=transport,
        num_warps=slots.num_warps, maxnreg=MAX_REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out


@torch.library.custom_op("weft::reduce_scatter", mutates_args=())
def _reduce_scatter(x: torch.Tensor, team: str) -> torch.Tensor:
    members = find_team(team)
    decision = choose("reduce_scatter", x.nbytes, x.dtype, members.size, members.caps)
    return run(x, members, decision.transport)


@_reduce_scatter.register_fake
def _(x, team):
    return x.new_empty((x.shape[0] // find_team(team).size, *x.shape[1:]))


def _remember(ctx, inputs, output):
    ctx.team = inputs[1]


def _backward(ctx, grad):
    # My x reached every rank's out, each with one part.
    return torch.ops.weft.all_gather(grad, ctx.team), None


_reduce_scatter.register_autograd(_backward, setup_context=_remember)


def reduce_scatter(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Part r of the sum of all ranks' ``x`` on rank r: a new contiguous tensor [x.shape[0] / W, ...] of ``x``'s dtype.

    ``x``: [W * m, ...], any strides, fp16, bf16 or fp32, on ``team.device``; the same shape and dtype on all ranks.
    The same bits from run to run. -0.0 may come out as +0.0. Captured in a CUDA graph it replays correctly, after one
    call outside. ValueError for wrong arguments. The backward is an all-gather.
    """
    check_tensor("reduce_scatter", "x", x, team, FLOATS)
    check_even("reduce_scatter", "x", x, team)
    return torch.ops.weft.reduce_scatter(x, team.name)

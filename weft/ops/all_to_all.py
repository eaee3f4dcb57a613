"""All-to-all with even splits: part s of my tensor goes to rank s, part s of the result came from rank s.

out_r[s * m : (s + 1) * m] = x_s[r * m : (r + 1) * m]       x, out: [W * m, ...]; every bit as it was sent
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
    send_order,
    signal_slots,
    tile_rest,
)
from weft.ops.registration import WORDS, check_even, check_tensor
from weft.runtime.team import Team, find_team


@triton.jit
def all_to_all_kernel(
    x,  # [W, n] words
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
    """out[s] = x[my rank] of rank s.          grid: (programs,), each over every programs-th tile of BLOCK columns

    One exchange a tile; signals, order, reuse: weft.ops.exchange.

    rank 0   | load W tiles | push one to each | flags | wait for all | store W tiles |
    rank 1   | load W tiles | push one to each | flags | wait for all | store W tiles |
    """
    program = tl.program_id(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    arrived += program * wl.num_ranks(team)
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    length = tl.cast(n, tl.int64)
    to_peer = send_order(team, ROWS)[:, None] * length
    from_peer = tl.arange(0, ROWS)[:, None] * length
    for tile in range(program, count_tiles(length, BLOCK), tl.num_programs(0)):
        start = tl.cast(tile, tl.int64) * BLOCK
        mask = is_rank(team, ROWS) & (columns < tile_rest(length, start, BLOCK))[None, :]
        rows = tl.load(x + start + to_peer + columns[None, :], mask=mask, other=0)
        received = exchange(rows, slot, arrived, epoch, team, TRANSPORT)
        tl.store(out + start + from_peer + columns[None, :], received, mask=mask)
        epoch += 1
    keep_epoch(epochs, epoch - 1, TRANSPORT)


def run(x: torch.Tensor, team: Team) -> torch.Tensor:
    """``x`` checked, any strides. Returns a new contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    if team.size == 1:
        return out.copy_(x)
    n = x.numel() // team.size
    if n == 0:
        return out
    words = WORDS[x.itemsize]
    slots = signal_slots(team)
    block = slots.row_bytes // x.itemsize
    all_to_all_kernel[(min(triton.cdiv(n, block), slots.programs),)](
        x.contiguous().view(words), out.view(words), n, slots.buffer.view(words), slots.arrived, slots.epochs,
        team.view, BLOCK=block, ROWS=triton.next_power_of_2(team.size), TRANSPORT="signals",
        num_warps=slots.num_warps, maxnreg=MAX_REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out


@torch.library.custom_op("weft::all_to_all", mutates_args=())
def _all_to_all(x: torch.Tensor, team: str) -> torch.Tensor:
    return run(x, find_team(team))


@_all_to_all.register_fake
def _(x, team):
    return x.new_empty(x.shape)


def _remember(ctx, inputs, output):
    ctx.team = inputs[1]


def _backward(ctx, grad):
    # The parts go back where they came from.
    return torch.ops.weft.all_to_all(grad, ctx.team), None


_all_to_all.register_autograd(_backward, setup_context=_remember)


def all_to_all(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Part s of ``x`` goes to rank s; part s of the result came from rank s: a new contiguous tensor of ``x``'s shape.

    ``x``: [W * m, ...], any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or 8 bytes, on ``team.device``;
    the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph it replays
    correctly, after one call outside. ValueError for wrong arguments. The backward is an all-to-all.
    """
    check_tensor("all_to_all", "x", x, team)
    check_even("all_to_all", "x", x, team)
    return torch.ops.weft.all_to_all(x, team.name)

"""All-reduce: every rank gets the sum of all ranks' tensors, bitwise the same on all of them and from run to run.

out[...] = round(sum over s of x_s[...])            summed in fp32, rounded once to x.dtype
one_shot   x tile --to all--> sum                           1 crossing, W - 1 times the bytes out of each rank
two_shot   W tiles --one to each--> sum --to all--> out     2 crossings, 2 (W - 1) / W times the bytes
"""

from __future__ import annotations

from dataclasses import dataclass

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
from weft.ops.registration import FLOATS, check_choice, check_tensor
from weft.runtime.team import Team, find_team

ALGORITHMS = ("auto", "one_shot", "two_shot")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceConfig:
    """algorithm: "one_shot" or "two_shot". transport: "lamport" or "signals" (weft.ops.exchange)."""

    algorithm: str
    transport: str


def default_config(algorithm: str, nbytes: int, dtype: torch.dtype, team: Team) -> AllReduceConfig:
    decision = choose("all_reduce", nbytes, dtype, team.size, team.caps, algorithm=algorithm)
    return AllReduceConfig(algorithm=decision.algorithm, transport=decision.transport)


@triton.jit
def all_reduce_kernel(
    x,  # [n]
    out,  # [n]
    n,
    buffer,  # Slots, in x's dtype
    arrived,
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out = sum over ranks of x.                                   grid: (programs,), each over every programs-th tile

    one-shot   a tile is BLOCK elements; one exchange a tile
    two-shot   a tile is W * BLOCK elements, part s summed by rank s; two exchanges a tile
    signals, order, reuse: weft.ops.exchange. Elements beyond n are sent as zeros, so that every exchange is whole.

    rank 0   | load tile | push to all | clear | sum | (push sum to all) | store |
    rank 1   | load tile | push to all | clear | sum | (push sum to all) | store |
    """
    world: tl.constexpr = wl.num_ranks(team)
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    arrived += program * world
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    end = tl.cast(n, tl.int64)
    if TWO_SHOT:
        to_peer = send_order(team, ROWS)[:, None] * BLOCK + columns[None, :]
        from_peer = tl.arange(0, ROWS)[:, None] * BLOCK + columns[None, :]
        for tile in range(program, count_tiles(end, world * BLOCK), tl.num_programs(0)):
            start = tl.cast(tile, tl.int64) * (world * BLOCK)
            rest = tile_rest(end, start, world * BLOCK)
            rows = tl.load(x + start + to_peer, mask=is_rank(team, ROWS) & (to_peer < rest), other=0)
            part = sum_of_ranks(exchange(rows, slot, arrived, epoch, team, TRANSPORT), dtype)
            rows = tl.broadcast_to(part[None, :], (ROWS, BLOCK))
            whole = exchange(rows, slot, arrived, epoch + 1, team, TRANSPORT)
            tl.store(out + start + from_peer, whole, mask=is_rank(team, ROWS) & (from_peer < rest))
            epoch += 2
    else:
        for tile in range(program, count_tiles(end, BLOCK), tl.num_programs(0)):
            start = tl.cast(tile, tl.int64) * BLOCK
            inside = columns < tile_rest(end, start, BLOCK)
            rows = tl.broadcast_to(tl.load(x + start + columns, mask=inside, other=0)[None, :], (ROWS, BLOCK))
            received = exchange(rows, slot, arrived, epoch, team, TRANSPORT)
            tl.store(out + start + columns, sum_of_ranks(received, dtype), mask=inside)
            epoch += 1
    keep_epoch(epochs, epoch - 1, TRANSPORT)


def run(x: torch.Tensor, team: Team, config: AllReduceConfig) -> torch.Tensor:
    """``x`` checked, any strides. Returns a new contiguous tensor of its shape."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if team.size == 1:
        return out.copy_(x)
    n = x.numel()
    if n == 0:
        return out
    two_shot = config.algorithm == "two_shot"
    slots = lamport_slots(team, x.itemsize) if config.transport == "lamport" else signal_slots(team)
    block = slots.row_bytes // x.itemsize
    tiles = triton.cdiv(n, block * team.size if two_shot else block)
    all_reduce_kernel[(min(tiles, slots.programs),)](
        x.contiguous(), out, n, slots.buffer.view(x.dtype), slots.arrived, slots.epochs, team.view,
        BLOCK=block, ROWS=triton.next_power_of_2(team.size), TWO_SHOT=two_shot, TRANSPORT=config.transport,
        num_warps=slots.num_warps, maxnreg=MAX_REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out


@torch.library.custom_op("weft::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, team: str, algorithm: str) -> torch.Tensor:
    members = find_team(team)
    return run(x, members, default_config(algorithm, x.nbytes, x.dtype, members))


@_all_reduce.register_fake
def _(x, team, algorithm):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember(ctx, inputs, output):
    ctx.team, ctx.algorithm = inputs[1:]


def _backward(ctx, grad):
    # Every rank's x reaches every rank's out, so the gradients of all outs meet in it.
    return torch.ops.weft.all_reduce(grad, ctx.team, ctx.algorithm), None, None


_all_reduce.register_autograd(_backward, setup_context=_remember)


def all_reduce(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """The sum of all ranks' ``x``, on every rank: a new contiguous tensor of ``x``'s shape and dtype.

    x          any shape and strides, fp16, bf16 or fp32, on ``team.device``; the same shape and dtype on all ranks
    algorithm  "auto" (weft.ops.explain says what and why), "one_shot" or "two_shot"

    Bitwise equal on all ranks and from run to run. -0.0 may come out as +0.0. A team's collectives share workspaces, so
    one stream orders them. Captured in a CUDA graph it replays correctly, after one call outside (which makes the
    workspace). ValueError for wrong arguments. The backward is an all-reduce.
    """
    check_tensor("all_reduce", "x", x, team, FLOATS)
    check_choice("all_reduce", "algorithm", algorithm, ALGORITHMS)
    return torch.ops.weft.all_reduce(x, team.name, algorithm)

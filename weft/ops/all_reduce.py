"""All-reduce: every rank gets the sum of all ranks' tensors, bitwise the same on all of them and from run to run.

out[...] = round(sum over s of x_s[...])            summed in fp32, rounded once to x.dtype
one_shot   x tile --to all--> sum                           1 crossing, W - 1 times the bytes out of each rank
two_shot   W tiles --one to each--> sum --to all--> out     2 crossings, 2 (W - 1) / W times the bytes
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.dispatch import Plan, choose
from weft.ops.exchange import (
    count_tiles,
    exchange,
    is_rank,
    is_sent,
    keep_epoch,
    launch,
    my_slot,
    send_order,
    sum_of_ranks,
    tile_rest,
)
from weft.ops.registration import FLOATS, check_choice, check_tensor
from weft.runtime.team import Team, find_team

ALGORITHMS = ("auto", "one_shot", "two_shot")


@triton.jit
def all_reduce_kernel(
    x,  # [n]
    out,  # [n]
    n,
    buffer,  # Slots, in x's dtype
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    TWO_SHOT: tl.constexpr,
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
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    end = tl.cast(n, tl.int64)
    if TWO_SHOT:
        to_peer = send_order(team, ROWS)[:, None] * BLOCK + columns[None, :]
        from_peer = tl.arange(0, ROWS)[:, None] * BLOCK + columns[None, :]
        mine = wl.rank(team) * BLOCK + columns
        for tile in range(program, count_tiles(end, world * BLOCK), tl.num_programs(0)):
            start = tl.cast(tile, tl.int64) * (world * BLOCK)
            rest = tile_rest(end, start, world * BLOCK)
            rows = tl.load(x + start + to_peer, mask=is_sent(team, ROWS) & (to_peer < rest), other=0)
            own = tl.load(x + start + mine, mask=mine < rest, other=0)
            part = sum_of_ranks(exchange(rows, own, slot, epoch, tile != program, team, TRANSPORT, BLOCK)).to(dtype)
            rows = tl.broadcast_to(part[None, :], (ROWS, BLOCK))
            whole = exchange(rows, part, slot, epoch + 1, True, team, TRANSPORT, BLOCK)
            tl.store(out + start + from_peer, whole, mask=is_rank(team, ROWS) & (from_peer < rest))
            epoch += 2
    else:
        for tile in range(program, count_tiles(end, BLOCK), tl.num_programs(0)):
            start = tl.cast(tile, tl.int64) * BLOCK
            inside = columns < tile_rest(end, start, BLOCK)
            own = tl.load(x + start + columns, mask=inside, other=0)
            rows = tl.broadcast_to(own[None, :], (ROWS, BLOCK))
            received = exchange(rows, own, slot, epoch, tile != program, team, TRANSPORT, BLOCK)
            tl.store(out + start + columns, sum_of_ranks(received).to(dtype), mask=inside)
            epoch += 1
    keep_epoch(epochs, epoch - 1)


def run(x: torch.Tensor, team: Team, algorithm: str, plan: Plan) -> torch.Tensor:
    """``x`` checked, any strides. Returns a new contiguous tensor of its shape."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if team.size == 1:
        return out.copy_(x)
    if x.numel() > 0:
        two_shot = algorithm == "two_shot"
        tiles = triton.cdiv(x.nbytes, plan.row_bytes * (team.size if two_shot else 1))
        launch(all_reduce_kernel, x.contiguous(), out, x.numel(), tiles, team, plan, TWO_SHOT=two_shot)
    return out


@torch.library.custom_op("weft::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, team: str, algorithm: str) -> torch.Tensor:
    members = find_team(team)
    decision = choose("all_reduce", x.nbytes, x.dtype, members.size, members.caps, algorithm=algorithm)
    return run(x, members, decision.algorithm, decision.plan)


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

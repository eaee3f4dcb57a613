"""All-to-all with even splits: part s of my tensor goes to rank s, part s of the result came from rank s.

out_r[s * m : (s + 1) * m] = x_s[r * m : (r + 1) * m]       x, out: [W * m, ...]; every bit as it was sent
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.collectives.copy_engine import chosen, exchange, on_lines
from weft.ops.custom_op import custom_op
from weft.ops.registration import as_words, check_choice, check_even, check_tensor
from weft.runtime.arithmetic import cdiv
from weft.runtime.team import Team, find_team
from weft.transport.plans import CopyPlan, Plan, word_of
from weft.transport.push import (
    clears_in_order,
    count_tiles,
    is_rank,
    keep_epoch,
    launch,
    my_slot,
    receive,
    send_columns,
    tile_rest,
)

ALGORITHMS = ("auto", "push", "copy_engine")


@triton.jit
def all_to_all_kernel(
    x,  # [W, n] words
    out,  # [W, n]
    n,
    buffer,  # Slots, in x's dtype
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """out[s] = x[my rank] of rank s.          grid: (programs,), each over every programs-th tile of BLOCK columns

    One exchange a tile; signals, order, reuse: weft.transport.push.

    every rank   | push tile 0, one row to each | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    length = tl.cast(n, tl.int64)
    from_peer = tl.arange(0, ROWS)[:, None] * length
    mine = wl.rank(team) * length
    tiles = count_tiles(length, BLOCK)
    ordered = clears_in_order(slot, tl.cdiv(tiles, programs), BLOCK)
    send_columns(x, length, program, slot, epoch, team, BLOCK, ROWS, TRANSPORT)
    for tile in range(program, tiles, programs):
        if tile + programs < tiles:
            send_columns(x, length, tile + programs, slot, epoch + 1, team, BLOCK, ROWS, TRANSPORT)
        start = tl.cast(tile, tl.int64) * BLOCK
        inside = columns < tile_rest(length, start, BLOCK)
        own = tl.load(x + start + mine + columns, mask=inside, other=0).to(buffer.dtype.element_ty)
        received = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, BLOCK)
        place = out + start + from_peer + columns[None, :]
        tl.store(place, received.to(x.dtype.element_ty), mask=is_rank(team, ROWS) & inside[None, :])
        epoch += 1
    keep_epoch(epochs, epoch - 1)


def run(x: torch.Tensor, team: Team, plan: Plan | CopyPlan) -> torch.Tensor:
    """``x`` checked, any strides. Returns a new contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    if team.size == 1:
        return out.copy_(x)
    if x.numel() > 0:
        words = as_words(x.detach(), word_of(x.nbytes // team.size))
        if isinstance(plan, CopyPlan):
            sources, outs = (t.view(team.size, -1).unbind() for t in (on_lines(words), as_words(out, words.dtype)))
            exchange(sources, outs, team, plan)
            return out
        n = words.numel() // team.size
        tiles = cdiv(n * max(2, words.itemsize), plan.row_bytes)
        launch(all_to_all_kernel, words, as_words(out, words.dtype), n, tiles, team, plan)
    return out


@custom_op("all_to_all")
def _all_to_all(x: torch.Tensor, team: str, algorithm: str = "auto") -> torch.Tensor:
    members = find_team(team)
    return run(x, members, chosen("all_to_all", x, members, algorithm).plan)


@_all_to_all.register_fake
def _(x, team, algorithm="auto"):
    return x.new_empty(x.shape)


def _remember(ctx, inputs, output):
    ctx.team, ctx.algorithm = inputs[1:]


def _backward(ctx, grad):
    # The parts go back where they came from.
    return torch.ops.weft.all_to_all.default(grad, ctx.team, ctx.algorithm), None, None


_all_to_all.register_autograd(_backward, setup_context=_remember)


def all_to_all(x: torch.Tensor, team: Team, algorithm: str = "auto") -> torch.Tensor:
    """Part s of ``x`` goes to rank s; part s of the result came from rank s: a new contiguous tensor of ``x``'s shape.

    ``x``: [W * m, ...], any strides, fp16, bf16, fp32 or any other type of 1, 2, 4 or 8 bytes, on ``team.device``;
    the same shape and dtype on all ranks. Bits arrive as they were sent. Captured in a CUDA graph it replays
    correctly, after one call outside with its shape, dtype and algorithm. ValueError for wrong arguments. The backward is
    an all-to-all.

    ``algorithm``: "auto" (weft.ops.explain says what and why), "push" or "copy_engine" (weft.ops.collectives.copy_engine).
    """
    check_tensor("all_to_all", "x", x, team)
    check_even("all_to_all", "x", x, team)
    check_choice("all_to_all", "algorithm", algorithm, ALGORITHMS)
    return torch.ops.weft.all_to_all.default(x, team.name, algorithm)

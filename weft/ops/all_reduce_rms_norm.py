"""All-reduce, residual and RMSNorm in one kernel: what stands between the two halves of a tensor-parallel layer.

hidden[t, :] = round(sum over s of x_s[t, :] + residual[t, :])                  summed in fp32, rounded once to x.dtype
normed[t, :] = round(hidden[t, :] / sqrt(mean(hidden[t, :]^2) + eps) * weight)  from the rounded hidden, in fp32
one_shot   a row --to all--> sum, norm                          1 crossing
two_shot   W rows --one to each--> sum --to all--> W norms      2 crossings, fewer bytes
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.dispatch import Plan, choose
from weft.ops.exchange import is_rank, is_sent, keep_epoch, launch, my_slot, receive, send, send_order, sum_of_ranks
from weft.ops.registration import FLOATS, check_choice, check_has_rows, check_tensor
from weft.runtime.team import Team, find_team

ALGORITHMS = ("auto", "one_shot", "two_shot")
MAX_ROW_BYTES = 65536


@triton.jit
def norm(hidden, weight, eps, WIDTH: tl.constexpr):
    """``hidden`` [ROWS, BLOCK], 0 from column WIDTH on: each row over its root mean square, times ``weight``, in fp32."""
    h = hidden.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) / WIDTH + eps)
    return h * scale[:, None] * weight.to(tl.float32)[None, :]


@triton.jit
def all_reduce_rms_norm_kernel(
    x,  # [n, WIDTH]
    normed,  # [n, WIDTH]
    n,
    buffer,  # Slots, in x's dtype
    epochs,
    team,
    hidden,  # [n, WIDTH]
    residual,  # [n, WIDTH]
    weight,  # [WIDTH]
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    WIDTH: tl.constexpr,
    TWO_SHOT: tl.constexpr,
):
    """hidden = sum over ranks of x + residual, normed = norm(hidden) * weight.
    grid: (programs,), each over every programs-th tile

    one-shot   a tile is a row; one exchange a tile
    two-shot   a tile is W rows, row s summed by rank s; two exchanges a tile
    signals, order, reuse: weft.ops.exchange, with a workspace of this WIDTH's own. Rows beyond n are sent as zeros.

    rank 0   | load rows | push | receive | sum, residual | (push sum to all) | norm | store both |
    rank 1   | load rows | push | receive | sum, residual | (push sum to all) | norm | store both |
    """
    world: tl.constexpr = wl.num_ranks(team)
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    slot = my_slot(buffer, WIDTH, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0)
    if TWO_SHOT:
        ranks = tl.arange(0, ROWS)[:, None]
        for tile in range(program, tl.cdiv(n, world), tl.num_programs(0)):
            first = tl.cast(tile, tl.int64) * world
            rest = tl.cast(n - first, tl.int32)
            to_peer = send_order(team, ROWS)[:, None]
            there = is_sent(team, ROWS) & (to_peer < rest) & inside[None, :]
            rows = tl.load(x + (first + to_peer) * WIDTH + columns[None, :], mask=there, other=0)
            mine = (first + wl.rank(team)) * WIDTH + columns
            exists = inside & (wl.rank(team) < rest)
            own = tl.load(x + mine, mask=exists, other=0)
            before = tl.load(residual + mine, mask=exists, other=0).to(tl.float32)
            send(rows, slot, epoch, team, TRANSPORT, WIDTH)
            received = receive(own, slot, epoch, epoch - 1, team, ROWS, TRANSPORT, WIDTH)
            part = (sum_of_ranks(received) + before).to(dtype)
            send(tl.broadcast_to(part[None, :], (ROWS, BLOCK)), slot, epoch + 1, team, TRANSPORT, WIDTH)
            whole = receive(part, slot, epoch + 1, epoch, team, ROWS, TRANSPORT, WIDTH)
            place = (first + ranks) * WIDTH + columns[None, :]
            there = is_rank(team, ROWS) & (ranks < rest) & inside[None, :]
            tl.store(hidden + place, whole, mask=there)
            tl.store(normed + place, norm(whole, scale, eps, WIDTH).to(dtype), mask=there)
            epoch += 2
    else:
        for row in range(program, n, tl.num_programs(0)):
            place = tl.cast(row, tl.int64) * WIDTH + columns
            own = tl.load(x + place, mask=inside, other=0)
            before = tl.load(residual + place, mask=inside, other=0).to(tl.float32)
            send(tl.broadcast_to(own[None, :], (ROWS, BLOCK)), slot, epoch, team, TRANSPORT, WIDTH)
            received = receive(own, slot, epoch, epoch - 1, team, ROWS, TRANSPORT, WIDTH)
            total = (sum_of_ranks(received) + before).to(dtype)
            tl.store(hidden + place, total, mask=inside)
            result = tl.sum(norm(total[None, :], scale, eps, WIDTH), axis=0)
            tl.store(normed + place, result.to(dtype), mask=inside)
            epoch += 1
    keep_epoch(epochs, epoch - 1)


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, team: Team, algorithm: str, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """All checked, any strides. ``plan``: as ``plan_for_rows`` makes it. Returns new contiguous tensors."""
    normed, hidden = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    if rows > 0:
        two_shot = algorithm == "two_shot"
        tiles = triton.cdiv(rows, team.size) if two_shot else rows
        launch(
            all_reduce_rms_norm_kernel, x.contiguous(), normed, rows, tiles, team, plan,
            hidden, residual.contiguous(), weight.contiguous(), eps, WIDTH=width, TWO_SHOT=two_shot,
        )  # fmt: skip
    return normed, hidden


def plan_for_rows(width: int, itemsize: int) -> Plan:
    """A row of ``width`` elements a program, 32 bytes of it a thread, in 16 warps at most. A program an SM, so that a
    thread has 128 registers."""
    row_bytes = width * itemsize
    warps = triton.next_power_of_2(triton.cdiv(row_bytes, 1024))
    return Plan(transport="lamport", row_bytes=row_bytes, num_warps=min(16, warps), programs_per_sm=1)


@torch.library.custom_op("weft::all_reduce_rms_norm", mutates_args=())
def _all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, team: str, algorithm: str
) -> tuple[torch.Tensor, torch.Tensor]:
    members = find_team(team)
    algorithm = choose("all_reduce", x.nbytes, x.dtype, members.size, members.caps, algorithm=algorithm).algorithm
    plan = plan_for_rows(x.shape[-1], x.itemsize)
    return run(x, residual, weight, eps, members, algorithm, plan)


@_all_reduce_rms_norm.register_fake
def _(x, residual, weight, eps, team, algorithm):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, team: Team, algorithm: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(normed, hidden)``: hidden = the sum of all ranks' ``x`` + ``residual``, normed = RMSNorm(hidden) * ``weight``.

    x          [..., H], any strides, fp16, bf16 or fp32, on ``team.device``, H a multiple of 16 bytes and at most 64 KiB
    residual   the same on all ranks, of x's shape and dtype
    weight     [H] of x's dtype
    algorithm  "auto", "one_shot" or "two_shot", as of ``all_reduce``

    New contiguous tensors of x's shape and dtype, bitwise equal on all ranks and from run to run, whatever the
    algorithm. The same rules for streams, graphs and -0.0 as ``all_reduce``. ValueError for wrong arguments. No backward.
    """
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        check_tensor("all_reduce_rms_norm", name, tensor, team, (x.dtype,) if name != "x" else FLOATS)
    check_choice("all_reduce_rms_norm", "algorithm", algorithm, ALGORITHMS)
    check_has_rows("all_reduce_rms_norm", "x", x)
    for name, tensor, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        if tensor.shape != shape:
            raise ValueError(
                f"all_reduce_rms_norm: {name} has shape {tuple(tensor.shape)}; with x of {tuple(x.shape)} it must be "
                f"{tuple(shape)}"
            )
    row_bytes = x.shape[-1] * x.itemsize
    if row_bytes % 16 != 0 or not 0 < row_bytes <= MAX_ROW_BYTES:
        raise ValueError(
            f"all_reduce_rms_norm: rows of {x.shape[-1]} elements have {row_bytes} bytes, not a multiple of 16 from 16 to "
            f"{MAX_ROW_BYTES}; use all_reduce and torch's rms_norm"
        )
    return torch.ops.weft.all_reduce_rms_norm(x, residual, weight, eps, team.name, algorithm)

"""Rows that arrive while experts' GEMMs run, and sums that leave: what AG-MoE and MoE-RS share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import E4M3, check_e4m3, quantize_rows, scales_of
from weft.ops.case import Case
from weft.ops.moe.moe_op import MoeShape
from weft.ops.moe.moe_schedule import MOE_SCHEDULE, Lists
from weft.ops.moe.routing import Experts, Schedule
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.team.channel import ChannelView
from weft.runtime.team.shape import Shape
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel

if TYPE_CHECKING:
    from weft.ops.moe.grouped import GroupedCall, GroupedTiles
    from weft.plan.planned import Machine
    from weft.runtime.team.team import Team

# Most tiles that a program orders: 8 a thread of 4 warps.
MAX_HEAD = 1024


@triton.jit
def load_tiles(tiles, numbers, there):
    """(expert, number of its first pair, first row, pairs) of tiles of a schedule, by their numbers.

    there  mask, a block like ``numbers``
    """
    entry = tiles + numbers * 4
    expert, first = tl.load(entry, mask=there), tl.load(entry + 1, mask=there, other=0)
    return expert, first, tl.load(entry + 2, mask=there), tl.load(entry + 3, mask=there, other=1)


@triton.jit
def store_tiles(target, found, there):
    """Store what ``load_tiles`` has found at ``target``, a block of pointers to entries."""
    expert, first, row, count = found
    tl.store(target, expert, mask=there)
    tl.store(target + 1, first, mask=there)
    tl.store(target + 2, row, mask=there)
    tl.store(target + 3, count, mask=there)


@triton.jit(do_not_specialize=["tokens", "me"])
def order_tiles_kernel(ordered, schedule, tokens, me, CHOICES: tl.constexpr, HEAD: tl.constexpr):
    """ordered = schedule.tiles, of the first HEAD those of rank ``me``'s rows alone before the others

    grid: (cdiv(most tiles, HEAD),). In both parts of the head, and behind it, tiles keep their order. tokens: most of a rank.
    Each expert's pairs begin with those of rank ``me``, so a tile is of its rows alone if its last pair is.

    signals, waits  none
    """
    wl.follow_previous_kernel()
    head = tl.program_id(0) * HEAD
    tile = head + tl.arange(0, HEAD)
    there = tile < tl.load(schedule.tile_count)
    found = load_tiles(schedule.tiles, tile, there)
    _, first, _, count = found
    last = tl.load(schedule.pairs + first + count - 1, mask=there, other=0)
    early = there & ((last // CHOICES // tokens == me) | (head > 0))
    before, late = tl.cumsum(early.to(tl.int32), 0), tl.cumsum((there & ~early).to(tl.int32), 0)
    place = head + tl.where(early, before, tl.sum(early.to(tl.int32), axis=0) + late) - 1
    store_tiles(ordered + place * 4, found, there)


def order_tiles(team: Team, schedule: Schedule, tokens: int, head: int) -> Schedule:
    """``schedule`` with tiles of this rank's rows first among the first ``head``, a power of two."""
    ordered = torch.empty_like(schedule.tiles)
    constants = {"CHOICES": schedule.choices, "HEAD": head, **launch_options(team.caps)}
    launch = launch_of(team, order_tiles_kernel, (schedule.choices, head), lambda: constants)
    launch(cdiv(len(ordered), head), ordered, schedule, tokens, team.rank)
    return schedule._replace(tiles=ordered)


def head_for(call: GroupedCall, tokens: int, tiles: GroupedTiles, machine: Machine) -> int:
    """``Fused.head`` that keeps all programs busy while the other ranks' rows arrive.

    In the time in which an SM multiplies a tile of block * block_n, a tenth of that many rows arrive, by 380 GB/s and 500
    TFLOP/s of an H200, whatever K is. This rank's rows are 1/W of all. Not measured for this op.
    """
    world, programs = machine.world_size, machine.caps.sms * tiles.per_sm
    rounds = cdiv(10 * (world - 1) * tokens, call.block * tiles.block_n)
    wanted = cdiv(world * rounds * programs, cdiv(2 * call.N, tiles.block_n))
    return min(next_power_of_2(wanted), MAX_HEAD)


def first_rank(rank: int, shape: Shape) -> int:
    """Rank whose tokens the experts' lists at ``rank`` begin with.

    Itself; over several nodes the first one of its node.
    """
    return rank if shape.nodes == 1 else rank - rank % shape.node_size


def schedule_of(team: Team, ids: torch.Tensor, experts: Experts, most: int, block: int) -> Schedule:
    """Schedule of all ranks' tokens, those of ``first_rank`` first."""
    tickets = team.workspace("moe_schedule", lambda: team.local(1, torch.int32))
    start = first_rank(team.rank, team.shape) * most
    found = MOE_SCHEDULE.run(Lists(block=block), None, ids, experts.first, experts.count, start, tickets)
    return Schedule(*found, choices=ids.shape[1], block=block)


def send_rows(
    team: Team,
    channel: CopyChannel,
    rows: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    chunk: int,
    chunks: int,
) -> None:
    """Have the copy engine write this rank's rows at every peer, with a signal behind each chunk.

    rows, scales  this rank's and all ranks'; a chunk's scales go before its rows, so that one signal is behind both

    Also behind chunks without rows: peers do not know how many there are. Rank r serves r - 1, r - 2, …: the peer that needs
    these rows first comes first.
    """

    def part(number: int, mine: torch.Tensor, of_all: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        source = mine[number * chunk : (number + 1) * chunk]
        return of_all[team.rank * (len(of_all) // team.size) + number * chunk :][: len(source)], source

    for step in range(1, team.size):
        peer = (team.rank - step) % team.size
        for number in range(chunks):
            target, source = part(number, *rows)
            if scales is not None and len(source) > 0:
                team.copy_engine.put(*part(number, *scales), peer)
            channel.send(team, target, source, team.rank, number, peer)


def gather_rows(
    team: Team, op: str, x: torch.Tensor, most: int, chunk: int, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, ChannelView]:
    """Begin a call of the op's channel, and have copy engines bring all ranks' rows.

    Returns (rows [W * most, K] of all ranks, their scales if ``fp8``, this rank's rows, the channel). This rank's are not among
    all rows, but if fp8: they are rounded there.
    """
    (T, K), rows = x.shape, team.size * most
    mine, scales, own = slice(team.rank * most, team.rank * most + T), None, x
    if fp8:
        check_e4m3(op, team.caps)
        nbytes = rows * (K + 4 * scales_of(K))
        channel = channel_of(team, op, torch.uint8, nbytes)
        received = channel.begin(team)[:nbytes]
        gathered = received[: rows * K].view(E4M3).view(rows, K)
        scales = received[rows * K :].view(torch.float32).view(rows, -1)
        own, _ = quantize_rows(x, T, team.caps, (gathered[mine], scales[mine]))
    else:
        channel = channel_of(team, op, x.dtype, rows * K)
        gathered = channel.begin(team)[: rows * K].view(rows, K)
    team.copy_engine.fork()
    of_scales = None if scales is None else (scales[mine], scales)
    send_rows(team, channel, (own, gathered), of_scales, chunk, cdiv(most, chunk))
    return gathered, scales, own, channel.landed.view


def channel_of(team: Team, op: str, dtype: torch.dtype, size: int) -> CopyChannel:
    """The op's channel, with two halves of at least ``size`` elements."""

    def make(capacity: int) -> CopyChannel:
        return CopyChannel.make(team, team.empty((2, capacity), dtype=dtype), team.size)

    return grown_workspace(team, (op, dtype), size, make)


def case_start(case: Case, rank: int) -> int:
    """First token of the experts' lists at ``rank`` in a case of AG-MoE or MoE-RS."""
    nodes = case.field("nodes") or 1
    return first_rank(rank, Shape(nodes, case.world_size // nodes)) * case.sizes[0]


def case_experts(case: Case, rank: int) -> Experts:
    """Experts of ``rank`` in a case of AG-MoE or MoE-RS."""
    total = case.sizes[2]
    return Experts.slices(total) if case.field("layout") == "slices" else Experts.whole(total, rank, case.world_size)


def of_all_ranks(sizes: Sequence[int]) -> MoeShape:
    """Shape of the grouped GEMM of all ranks' tokens."""
    shape = MoeShape(*sizes)
    return shape._replace(tokens=shape.tokens * (shape.experts // shape.held))

"""Base of AG-MoE and MoE-RS, whose grouped GEMMs overlap with an exchange of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import E4M3, RowFormat, check_e4m3, quantize_rows, scales_of
from weft.ops.case import BF16, FP16, FP32, Case
from weft.ops.moe.exchange.exchange_op import TokensOp, channel_of, rows_sent
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedTiles
from weft.ops.moe.grouped.rule import tiles
from weft.ops.moe.grouped_matmul import GroupedOp
from weft.ops.moe.moe_op import MoeShape
from weft.ops.moe.moe_schedule import MOE_SCHEDULE, Lists
from weft.ops.moe.routing import Experts, Routing, Schedule
from weft.ops.op import Call
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.team.channel import ChannelView
from weft.runtime.team.shape import Shape
from weft.transport.copy_channel import CopyChannel

if TYPE_CHECKING:
    from weft.ops.moe.grouped.gemms import GroupedCall
    from weft.plan.planned import Machine
    from weft.runtime.team.team import Team

# A size of a case, or its name.
Size = TypeVar("Size")


class GatherArguments(NamedTuple):
    """Arguments of all_gather_grouped_matmul_silu_mul.

    total, first, count  this rank's experts; block: pairs of a tile of the schedule
    fp8                  rows are sent in fp8
    weight_scales, input_scale  of a gate_up in fp8
    kind, static_scale   of ``RowFormat`` of h; "": h is of 16 or 32 bits
    bias, alpha, limit   of ``GroupedArguments``
    """

    x: torch.Tensor
    routing: Routing
    gate_up: torch.Tensor
    total: int
    first: int
    count: int
    max_tokens: int
    block: int
    fp8: bool
    team: str
    algorithm: str
    weight_scales: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    kind: str = ""
    static_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def format(self) -> RowFormat | None:
        """Form in which h is written; None: in 16 or 32 bits."""
        return RowFormat(self.kind, self.static_scale) if self.kind else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of h where it is not in fp8."""
        return dtype_of_h(self.x.dtype, self.fp8, self.weight_scales is not None)

    def gemm(self, rows: torch.Tensor, schedule: Schedule, scales: torch.Tensor | None) -> GroupedArguments:
        """Arguments of the grouped GEMM of all ranks' rows."""
        of_weight = self.weight_scales, self.input_scale, self.bias, self.alpha, self.limit
        return GroupedArguments(rows, self.gate_up, schedule, True, scales, *of_weight)

    @property
    def experts(self) -> Experts:
        return Experts(self.total, self.first, self.count)


def dtype_of_h(of_rows: torch.dtype, sends_fp8: bool, fp8_weight: bool) -> torch.dtype:
    """Dtype of results of 16 or 32 bits: of rows that arrive in fp8, and such a weight, bf16."""
    return torch.bfloat16 if sends_fp8 and fp8_weight else of_rows


class ScatterArguments(NamedTuple):
    """Arguments of grouped_matmul_reduce_scatter. total, first, count: this rank's experts."""

    gemm: GroupedArguments
    routing: Routing
    total: int
    first: int
    count: int
    tokens: int
    team: str
    algorithm: str
    shared: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    @property
    def experts(self) -> Experts:
        return Experts(self.total, self.first, self.count)


class OverlapCall(Call, Protocol):
    """Call of an op that overlaps a grouped GEMM. held: experts of a rank."""

    held: int

    def gemm(self, machine: Machine) -> GroupedCall: ...


class OverlappedOp(TokensOp):
    """Op with a design whose GEMM runs under the exchange, and "sequential", of nested plans.

    Over several nodes ``ByNodes`` takes the place of the first.

    sizes of a case: max_tokens, k, experts, and two that ``gemm_sizes`` orders. Its field ``tokens`` has each rank's;
    ``layout`` is "slices", or else experts are whole.

    gemm        the op of this rank's GEMM alone
    overlapped  name of the other design, which has ``tiles``
    alone       why one rank has nothing to overlap
    h_in_fp8    field of a case of experts in fp8 whose rows between the two GEMMs are in fp8 too
    """

    gemm: ClassVar[GroupedOp]
    overlapped: ClassVar[str]
    alone: ClassVar[str]
    h_in_fp8: ClassVar[str]
    composed = ("sequential",)
    pinned = slice(1, 3)  # tiles of other rows take another shape, and other experts have other numbers of pairs

    def gemm_sizes(self, hidden: Size, features: Size) -> tuple[Size, Size]:
        """(N, K) of the GEMM, in which order a case has them too."""
        return (features, hidden) if self.gemm.gated else (hidden, features)

    def choose(self, call: OverlapCall, machine: Machine) -> Planned:
        if machine.nodes > 1:
            return self.over_nodes(call, machine)
        if machine.world_size == 1:
            return Planned("sequential", self.default("sequential", call, machine), f"one rank: {self.alone}")
        return super().choose(call, machine)

    def over_nodes(self, call: OverlapCall, machine: Machine) -> Planned:
        """Plan of a team of several nodes."""
        if call.design == self.overlapped:
            raise ValueError(
                f"{self.name}: algorithm={call.design!r} is of one node, and the team has {machine.nodes}; "
                f"pass 'auto' or 'sequential'"
            )
        name, reason = self.rule(call, machine)
        if call.design == "sequential":
            name, reason = call.design, f"asked for design={call.design!r}"
        elif name == self.overlapped:
            name, reason = "over_nodes", f"{machine.nodes} nodes: a GEMM for each node's rows while other rows cross"
        return Planned(name, self.default(name, call, machine), reason)

    def table_key(self, call: OverlapCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        gemm = call.gemm(machine)
        return self.row_name(call), (gemm.pairs, gemm.block, call.held, gemm.N, gemm.K), machine.world_size

    def space(self, call: OverlapCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from (self.default(name, call, machine) for name in self.algorithms[1:])
        base = self.default(self.overlapped, call, machine)
        for one in tiles(base.tiles, call.gemm(machine), machine.caps, quick, self.gemm.gated):
            yield replace(base, tiles=one)

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        return (one for one in super().around(design, machine) if not quick or one.tiles == design.tiles)

    # --- figures -----------------------------------------------------------------------------------------------------

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, *self.gemm_sizes(shape.hidden, shape.features)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        tokens, k, experts, *of_gemm = sizes
        # The order is the inverse of itself.
        hidden, _ = self.gemm_sizes(*of_gemm)
        return int(rows_sent((tokens, k, experts, hidden), world_size) * hidden * dtype.itemsize)

    def flops(self, sizes: Sequence[int]) -> int:
        return self.gemm.flops(MoeShape(*sizes).of_all_ranks)

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        return self.gemm.memory_bytes(MoeShape(*sizes).of_all_ranks, dtype)

    # --- cases -------------------------------------------------------------------------------------------------------

    def case_with(
        self, w: int, dtype: torch.dtype, sizes: tuple[int, ...], design: Any, tokens: tuple[int, ...], **fields: Any
    ) -> Case:
        """A case of sizes max_tokens, k, experts, hidden, features."""
        T, k, E, *of_gemm = sizes
        return self.case(w, dtype, T, k, E, *self.gemm_sizes(*of_gemm), design=design, tokens=tokens, **fields)

    def cases(self) -> Iterator[Case]:
        overlapped = self.overlapped
        yield self.case_with(1, BF16, (5, 2, 4, 24, 16), AUTO, (5,))
        for w in (2, 3, 4, 8):
            tokens = (3, 0, 2, 1, 3, 3, 0, 2)[:w]
            yield self.case_with(w, BF16, (3, 2, 24 if w == 3 else 8, 24, 16), overlapped, tokens)
        for w in (2, 3):
            yield self.case_with(w, BF16, (6, 2, 4, 24, 16), overlapped, (2, 6, 0)[:w], layout="slices")
        for dtype in (FP16, FP32):
            yield self.case_with(2, dtype, (5, 2, 4, 24, 16), overlapped, (3, 5))
        yield self.case_with(2, BF16, (7, 2, 6, 24, 16), "sequential", (7, 4))
        yield self.case_with(2, BF16, (6, 2, 4, 24, 16), "sequential", (0, 6), layout="slices")
        yield self.case_with(2, BF16, (3, 1, 4, 24, 16), overlapped, (0, 0))
        yield self.case_with(2, BF16, (5, 2, 4, 24, 16), overlapped, (5, 5), skew="some")
        small = GroupedTiles(block_n=32, block_k=32, columns=32, per_sm=2, num_warps=4, num_stages=2)
        yield from self.cases_of_tiles(small)

    @abstractmethod
    def cases_of_tiles(self, small: GroupedTiles) -> Iterator[Case]:
        """Cases of the overlapped design with other fields, from small tiles."""

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for T in (128, 1000):
                sizes, tokens = (T, 8, 64, 2048, 768), (T, T - 1, 0, T)[:w]
                for design in self.algorithms[1:]:
                    for layout in ("whole", "slices"):
                        yield self.case_with(w, BF16, sizes, design, tokens, layout=layout)
                    yield self.case_with(w, BF16, sizes, design, tokens, block_fp8=True, **{self.h_in_fp8: True})
                yield self.case_with(w, BF16, sizes, "sequential", tokens, channel_fp8=True)


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
def store_tiles(target, entries, there):
    """Store tiles as ``load_tiles`` gives them at ``target``, a block of pointers to entries."""
    expert, first, row, count = entries
    tl.store(target, expert, mask=there)
    tl.store(target + 1, first, mask=there)
    tl.store(target + 2, row, mask=there)
    tl.store(target + 3, count, mask=there)


@triton.jit(do_not_specialize=["tokens", "me"])
def order_tiles_kernel(ordered, schedule, tokens, me, CHOICES: tl.constexpr, HEAD: tl.constexpr):
    """ordered = schedule.tiles, of the first HEAD tiles of rank ``me``'s rows alone before the other tiles

    grid: (cdiv(most tiles, HEAD),). In both parts of the head, and after it, tiles keep their order. tokens: most of a rank.
    Each expert's list begins with pairs of rank ``me``, so a tile is of its rows alone if its last pair is.

    signals, waits  none
    """
    wl.follow_previous_kernel()
    head = tl.program_id(0) * HEAD
    tile = head + tl.arange(0, HEAD)
    there = tile < tl.load(schedule.tile_count)
    entries = load_tiles(schedule.tiles, tile, there)
    _, first, _, count = entries
    last = tl.load(schedule.pairs + first + count - 1, mask=there, other=0)
    early = there & ((last // CHOICES // tokens == me) | (head > 0))
    before, late = tl.cumsum(early.to(tl.int32), 0), tl.cumsum((there & ~early).to(tl.int32), 0)
    place = head + tl.where(early, before, tl.sum(early.to(tl.int32), axis=0) + late) - 1
    store_tiles(ordered + place * 4, entries, there)


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
    """Schedule of all ranks' tokens, tokens of ``first_rank`` first."""
    tickets = team.workspace("moe_schedule", lambda: team.local(1, torch.int32))
    start = first_rank(team.rank, team.shape) * most
    lists = MOE_SCHEDULE.run(Lists(block=block), None, ids, experts.first, experts.count, start, tickets)
    return Schedule(*lists, choices=ids.shape[1], block=block)


def send_rows(
    team: Team,
    channel: CopyChannel,
    rows: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    chunk: int,
    chunks: int,
) -> None:
    """Have the copy engine write this rank's rows at every peer, with a signal after each chunk.

    rows, scales  this rank's and all ranks'; a chunk's scales go before its rows, so that one signal follows both

    Also after chunks without rows: peers do not know their number. Rank r serves r - 1, r - 2, …: the peer that needs
    these rows first comes first.
    """

    def part(number: int, own_rows: torch.Tensor, of_all: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        source = own_rows[number * chunk : (number + 1) * chunk]
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
    place, scales, own = slice(team.rank * most, team.rank * most + T), None, x
    if fp8:
        check_e4m3(op, team.caps)
        nbytes = rows * (K + 4 * scales_of(K))
        channel = channel_of(team, op, torch.uint8, nbytes)
        received = channel.begin(team)[:nbytes]
        gathered = received[: rows * K].view(E4M3).view(rows, K)
        scales = received[rows * K :].view(torch.float32).view(rows, -1)
        own, _ = quantize_rows(x, T, team.caps, (gathered[place], scales[place]))
    else:
        channel = channel_of(team, op, x.dtype, rows * K)
        gathered = channel.begin(team)[: rows * K].view(rows, K)
    team.copy_engine.fork()
    of_scales = None if scales is None else (scales[place], scales)
    send_rows(team, channel, (own, gathered), of_scales, chunk, cdiv(most, chunk))
    return gathered, scales, own, channel.landed.view


def case_start(case: Case, rank: int) -> int:
    """First token of the experts' lists at ``rank`` in a case of AG-MoE or MoE-RS."""
    nodes = case.field("nodes") or 1
    return first_rank(rank, Shape(nodes, case.world_size // nodes)) * case.sizes[0]


def case_experts(case: Case, rank: int) -> Experts:
    """Experts of ``rank`` in a case of AG-MoE or MoE-RS."""
    total = case.sizes[2]
    return Experts.slices(total) if case.field("layout") == "slices" else Experts.whole(total, rank, case.world_size)

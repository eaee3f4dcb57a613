"""Design "fused" of grouped_matmul_reduce_scatter: slabs are summed and sent beside the next tiles.

All programs multiply the first slab of columns. From then on the first few of them, the senders, add up the choices of each
finished slab, store the sums at the tokens' ranks and add up the ranks, while the others multiply. Behind the GEMM all programs
share the last slab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int
from weft.ops.moe import grouped
from weft.ops.moe.grouped import GroupedTiles, multiply_tile
from weft.ops.moe.moe_sum import Shared, sum_choices
from weft.ops.moe.routing import Experts, Routing, Schedule
from weft.ops.moe.slabs import LEAST_COLUMNS, MOST_SLABS
from weft.ops.neighbours import moved, scaled
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.runtime.team.workspace import grown_workspace

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.runtime.team.team import Team

# Most slabs of columns.
SLABS = tl.constexpr(8)
# Columns that are added up at a time, at most.
BLOCK = 512


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSums:
    """One kernel, some of whose programs sum and send the slabs that are ready.

    senders  programs that do so from the second slab on, where there are more; all multiply the first and sum the last
    slabs    at most this many, of whole tiles, and at most SLABS
    rows     tokens that a program adds up at a time, a power of two
    """

    tiles: GroupedTiles
    senders: int = 32
    slabs: int = 4
    rows: int = 4

    def __post_init__(self) -> None:
        check_int("senders", self.senders, 1)
        check_int("slabs", self.slabs, 1, SLABS.value)
        if check_int("rows", self.rows, 1) & (self.rows - 1):
            raise ValueError(f"rows={self.rows} is not a power of two")

    def width(self, H: int) -> int:
        """Columns of a slab of [T, H], but of the last one, which may have fewer."""
        return cdiv(H, self.slabs * self.tiles.block_n) * self.tiles.block_n


class Buffers(NamedTuple):
    """Memory of one call, passed to the kernel as the argument ``buffers``.

    received  [2, capacity]  symmetric: by epoch rows [W, tokens, H], of which row s has what rank s sums for my tokens
    arrived   [flags]        symmetric: arrived[(s * SLABS + i) * programs + p] = epoch, once the sums of slab i that program p
                             of rank s has for me lie in received
    done      int64 [SLABS]  of this rank, in the heap for its name in traces: done[i] = epoch * 2**32, once all programs of the
                             grid have stored their tiles of slab i; of the last slab also all further ones
    epoch     [2]            of this rank
    """

    received: torch.Tensor
    arrived: torch.Tensor
    done: torch.Tensor
    epoch: torch.Tensor
    capacity: int


@triton.jit
def tiles_of(number, tiles, of_slab, senders):
    """(first, end, step) of this program's tiles of slab ``number``

    A slab has ``of_slab`` tiles, the last one what is left of ``tiles``. Those of the first slab are dealt to all programs, the
    others to all but the first ``senders``, in rounds that go on from slab to slab: the programs that the last round of the
    first slab has left out come first.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin, end = number * of_slab, tl.minimum((number + 1) * of_slab, tiles)
    if number == 0:
        first, step = program, programs
    else:
        step = programs - senders
        turn = (program + step - tl.maximum(of_slab % programs, senders)) % step
        first = begin + (turn + step - (begin - of_slab) % step) % step
        first = tl.where(program < senders, end, first)
    return first, end, step


@triton.jit
def count_slabs(done, begin, end):
    """Release: count this program in done[begin : end], behind all stores of its threads.

    High half: epochs in which all programs have come. Low half: programs that have come in this one; the first one adds what
    carries the last one over, so grids of any size share the counters.
    """
    number, programs = tl.arange(0, SLABS), tl.num_programs(0)
    arrival = tl.where(tl.program_id(0) == 0, 4294967296 - (programs - 1).to(tl.int64), 1)
    wl.gather_stores()
    wanted = (number >= begin) & (number < end)
    # Acquire order is for reports of weft check: without it they name this line, not a wait that is missing.
    tl.atomic_add(done + number, arrival + tl.zeros((SLABS,), tl.int64), mask=wanted, sem="acq_rel", scope="gpu")


@triton.jit(do_not_specialize=["T", "tokens", "first", "held", "slab", "senders"])
def grouped_matmul_sum_kernel(
    h,
    down,
    y,
    out,
    schedule,
    routing,
    shared,
    buffers,
    T,
    tokens,
    first,
    held,
    N,
    K,
    slab,
    senders,
    team,
    FORM: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum over ranks, ascending, of weighted sums of y[p] = h[i] @ down[e].T over t's pairs p

    grid: (programs,)

    h, down, schedule, FORM  of ``grouped_matmul_kernel`` for rows in the order of the schedule; slab: its tiles along N
    y        [W * tokens * CHOICES, N], this rank's: rows of other ranks' choices are neither written nor read
    routing  ``Routing`` of all ranks' tokens; first, held: this rank's experts; shared: ``Shared``, or one without rows
    out      [T, N]: of this rank, of ``tokens`` at most; buffers: ``Buffers``
    senders  programs 0 .. senders - 1 multiply the first slab alone; fewer than all, and at least 1 of several slabs. Where an
             SM has several programs they are on different SMs: GPUs give each SM one before any gets a second

    Tokens of a rank are dealt to the programs that sum a slab, in ranges: the senders, of the last slab all. Each program sums
    and sends its range of the tokens of ranks me + 1, me + 2, …, then sums its range of this rank's and adds up the ranks.

    signals   each program of the grid, behind its tiles of slab i, also if it has none: counts itself in done[i]
              program p, to every peer: arrived[me, i, p] = epoch, once its sums of slab i for the peer's tokens lie there
    waits     before the first load of slab i of y: done[i], so all programs have stored their tiles of it
              before the first load of slab i of ``received``: arrived[s, i, p] of all peers s. Program p there has the same
              range of tokens
    order     choices in theirs and then ``shared``, in fp32 and rounded once; ranks ascending, in fp32 and rounded once
    reuse     received (by epoch): rank s writes half b for owner o in call e and again in call e + 2. In between, s ended call
              e + 1, in which its program 0 waited for sums from o. o sent them after it ended call e, and so after it read
              half b. This holds for any sizes of the calls, and for tokens of 0: sums of all ``tokens`` are sent
              y is this call's alone
    progress  no tile waits, and a program counts all its tiles before it waits, so every done[i] comes. Before program p waits
              for peers' sums of slab i it has sent its own, for which it waited for done[i] and for sums of slabs before i
              alone. All programs must be resident

    workers  | s0 | s1 | s2 | s3 | sum 3 |                              four slabs
    senders  | s0 | sum 0 | sum 1 | sum 2 | sum 3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    FLATTEN: tl.constexpr = not TRANSPOSED
    wl.follow_previous_kernel()
    tile_rows, tile_columns = tl.load(schedule.tile_count), tl.cdiv(N, BLOCK_N)
    slabs = tl.cdiv(tile_columns, slab)
    tl.assume(K > 0)
    number = 0
    # Inside a for, Triton would not flatten the loop over tiles; a barrier within that one would end its pipelining.
    while number < slabs:
        first_tile, end_tile, step = tiles_of(number, tile_rows * tile_columns, tile_rows * slab, senders)
        for tile in tl.range(first_tile, end_tile, step, flatten=FLATTEN):
            multiply_tile(
                tile, tile_rows, h, None, None, down, y, schedule, N, K, slab, None, team, FORM, BLOCK_N, BLOCK_K, TRANSPOSED
            )  # fmt: skip
        count_slabs(buffers.done, number, tl.where(number == slabs - 1, SLABS, number + 1))
        number += 1
    program, programs, me = tl.program_id(0), tl.num_programs(0), wl.rank(team)
    now = wl.next_epoch(buffers.epoch)
    received = buffers.received + (now & 1).to(tl.int64) * buffers.capacity
    for number in range(tl.where(program < senders, 0, slabs - 1), slabs):
        summing = tl.where(number == slabs - 1, programs, senders)
        size = tl.cdiv(tokens, summing * ROWS) * ROWS
        low, high = program * size, tl.minimum(program * size + size, tokens)
        begin, end = number * slab * BLOCK_N, (number + 1) * slab * BLOCK_N
        if low < high:
            wl.wait(buffers.done + number, now.to(tl.int64) << 32, team)
            for step in range(1, world):
                owner = (me + step) % world
                began = wl.begin_put(team)
                rows = wl.symm_at(received, owner, team) + (me * tokens).to(tl.int64) * N
                for at in range(low, high, ROWS):
                    token = at + tl.arange(0, ROWS)[:, None]
                    # Tokens behind the last one repeat it: they are not stored.
                    of_all = owner * tokens + tl.minimum(token, tokens - 1)
                    for left in range(begin, tl.minimum(end, N), BLOCK):
                        column = left + tl.arange(0, BLOCK)[None, :]
                        inside = (token < high) & (column < end) & (column < N)
                        total = sum_choices(y, *routing, shared, of_all, column, inside, N, first, held, CHOICES)
                        tl.store(rows + token.to(tl.int64) * N + column, total.to(y.dtype.element_ty), mask=inside)
                wl.end_put(began, received, 0, owner, team)
                wl.notify(buffers.arrived + (me * SLABS + number) * programs + program, owner, now, team)
            for step in range(1, world):
                source = (me + step) % world
                wl.wait(buffers.arrived + (source * SLABS + number) * programs + program, now, team)
            for at in range(low, tl.minimum(high, T), ROWS):
                token = at + tl.arange(0, ROWS)[:, None]
                of_all = me * tokens + tl.minimum(token, tokens - 1)
                for left in range(begin, tl.minimum(end, N), BLOCK):
                    column = left + tl.arange(0, BLOCK)[None, :]
                    inside = (token < tl.minimum(high, T)) & (column < end) & (column < N)
                    own = sum_choices(y, *routing, shared, of_all, column, inside, N, first, held, CHOICES)
                    total = tl.zeros((ROWS, BLOCK), tl.float32)
                    for source in tl.static_range(world):
                        # Computed here: kept over the loops, addresses of all ranks would not fit the registers.
                        row = (source * tokens + token + wl.zero_here()).to(tl.int64) * N
                        found = tl.load(received + row + column, mask=inside & (source != me), other=0.0)
                        total += tl.where(source == me, own.to(y.dtype.element_ty), found).to(tl.float32)
                    tl.store(out + token.to(tl.int64) * N + column, total.to(out.dtype.element_ty), mask=inside)
    wl.advance_epoch(buffers.epoch, now)


def fused_sums_for(tiles: GroupedTiles, H: int, caps: Capabilities) -> FusedSums:
    """Default for rows of H columns; not measured.

    senders  an eighth of the programs: at 30 GB/s each, what 32 KB of loads under way bring, they read a slab of eight choices
             about as fast as the others multiply the next one (Qwen3-30B-A3B, two H100s)
    slabs    as wide as those of ``Slabs``
    rows     16 elements a thread at a time: with all loads of eight choices under way a thread has no more registers than the
             GEMM, and no stack (sm_90, up to eight ranks)
    """
    senders, slabs = caps.sms * tiles.per_sm // 8, min(MOST_SLABS, H // LEAST_COLUMNS)
    return FusedSums(tiles=tiles, senders=max(1, senders), slabs=max(1, slabs), rows=tiles.num_warps)


def fused_sums_around(design: FusedSums) -> Iterator[FusedSums]:
    """Neighbours of a design with these tiles."""
    yield from moved(
        design,
        senders=scaled(design.senders),
        slabs=scaled(design.slabs, 1, SLABS.value),
        rows=scaled(design.rows, 1, 16),
    )


def run_fused(
    design: FusedSums,
    team: Team,
    h: torch.Tensor,
    down: torch.Tensor,
    schedule: Schedule,
    routing: Routing,
    experts: Experts,
    tokens: int,
    shared: Shared,
) -> torch.Tensor:
    """The op of checked arguments; see ``grouped_matmul_sum_kernel``.

    shared  this rank's summand of all ranks' tokens, [W * most, H]
    """
    (rows, k), (held, H, K), tiles = routing.ids.shape, down.shape, design.tiles
    out, y = h.new_empty((tokens, H)), h.new_empty((rows * k, H))
    if rows == 0:
        return out
    programs = min(team.caps.sms * tiles.per_sm, team.max_programs(tiles.num_warps))
    senders = min(design.senders, programs - 1)
    # One program has no other beside which it could sum.
    width = design.width(H) if senders > 0 else cdiv(H, tiles.block_n) * tiles.block_n
    x, weight, form = grouped.operands(tiles, h, down, schedule, 0)
    block = min(BLOCK, next_power_of_2(width))
    if shared.rows is not None:
        shared = shared._replace(pitch=shared.rows.stride(0))

    def constants() -> dict[str, object]:
        sizes = {"BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "ROWS": design.rows, "BLOCK": block}
        fixed = {"FORM": form, "CHOICES": k, "TRANSPOSED": tiles.transposed, "launch_cooperative_grid": True}
        return (
            sizes | fixed | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **launch_options(team.caps)}
        )

    launch_of(team, grouped_matmul_sum_kernel, (design, form, k, block), constants)(
        programs,
        x,
        weight,
        y,
        out,
        schedule,
        Routing(*(tensor.contiguous() for tensor in routing)),
        shared,
        _buffers(team, h.dtype, rows * H),
        tokens,
        rows // team.size,
        experts.first,
        held,
        H,
        K,
        width // tiles.block_n,
        senders,
        team.view,
    )
    return out


def _buffers(team: Team, dtype: torch.dtype, size: int) -> Buffers:
    def make(capacity: int) -> Buffers:
        received = team.empty((2, capacity), dtype, name="received")
        # Of one warp each the most programs are resident.
        arrived = team.signals(team.size * SLABS.value * team.max_programs(1), name="arrived")
        done, epoch = team.zeros(SLABS.value, torch.int64, name="done"), team.local(2, torch.int32)
        return Buffers(received, arrived, done, epoch, capacity)

    return grown_workspace(team, ("grouped_matmul_reduce_scatter fused", dtype), size, make)

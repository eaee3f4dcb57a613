"""scatter and exchange: every rank computes a part of each tile, whose owner merges the ranks' parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_instance, check_int
from weft.kernels.gemm_tile import SplitK, halves, store_tile
from weft.kernels.tile_schedule import as_argument, buffer_of, first_tile, from_argument, make_tiles
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.runtime.team.channel import Channel
from weft.runtime.team.checks import FLOATS, agree, check_team, check_tensor
from weft.runtime.team.workspace import grown_workspace
from weft.tiles import marks
from weft.tiles.tile import (
    Geometry,
    Matrices,
    Tile,
    TileMap,
    check_body,
    check_map,
    check_operands,
    check_sizes,
    identity,
    launch_constants,
    numbers_for,
    programs_for,
    tile_of,
)
from weft.transport.halves import await_entered, enter

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


MAX_SPLIT = 16


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """Tile and compiler options of ``scatter`` and ``exchange``.

    rows, columns  of a tile, powers of two: the body's ROWS and COLUMNS
    group          tile rows that are computed column by column, for reuse in the L2
    split          of a scatter: programs that share a tile, each with its share of K (``Tile.share``), at most MAX_SPLIT; for
                   fewer tiles than SMs
    """

    rows: int = 128
    columns: int = 128
    group: int = 8
    split: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        check_sizes(self, rows=1, columns=1, group=1, num_warps=1, num_stages=1)
        check_int("split", self.split, 1, MAX_SPLIT)


class Inbox(NamedTuple):
    """Receive buffers of an exchange, passed to its kernel as the argument ``inbox``.

    received  [2, W - 1, slots, part] symmetric: halves by call; buffer d has the parts of rank me + 1 + d
    entered   [W] symmetric: entered[s] = e, once rank s has begun call e
    """

    received: tl.tensor
    entered: tl.tensor


@triton.jit
def exchange_kernel(
    first,
    second,
    out,
    operands,
    about,
    inbox,
    split,
    arrived,
    geometry,
    tiles,
    team,
    BODY: tl.constexpr,
    MERGE: tl.constexpr,
    STORE: tl.constexpr,
    OWNER_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    CUTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """STORE(merge of all ranks' BODY) of every own tile.        grid: (programs,), own tiles last

    first, second  ``Matrices``
    MERGE     folds the parts in rank order; None: STORE takes each rank's part
    CUTS      BODY returns one block, which is summed in 2**CUTS pieces; -1: a tuple of blocks, PART elements in all
    SPLIT     programs that share a tile, each with a share of its sum; the last one to leave its share adds all up and goes on
    split     ``SplitK`` with a place for each share of each tile; None if SPLIT is 1
    about     argument of OWNER_OF and ROWS_OF: the table of a ``TileMap``, or the operands
    arrived   channel with a chunk for each slot of a receive buffer
    geometry  ``Geometry``; tiles: ``Tiles`` of the affine map as an argument

    signals   every rank s, per tile of owner o: stores its part at o, then announces the tile's slot, during its next tile
              program 0, at its start: entered[me] = this call, at every peer
    waits     own tiles, after their body: the tile's slot of every peer
              a map, before the first store to a peer: entered[peer] >= this call - 1
    order     of a merge: rank 0, 1, …, own part unrounded, others in received's dtype; before it of a split tile: share
              0, 1, …, in fp32. The same every run
    reuse     of half h: rank s writes it for owner o in calls e and e + 2. Affine map: in call e + 1 s waited for a tile
              from o, which o sent after its call e, in which it read half h. A map may leave out ranks, so s waits for
              ``entered``: o has begun call e + 1, and so ended call e
    progress  a program announces all its parts before it waits for those of a tile; all programs are resident

    body  | o1 | o2 | o3 | own |                                        rank 0 of 4: tiles of the owners
    link       | o1 | o2 | o3 |
    merge                  | 0 1 2 3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    MAPPED: tl.constexpr = OWNER_OF is not None
    me = wl.rank(team)
    tiles = from_argument(tiles)
    call = wl.next_call(arrived)
    buffer_size = tl.cast(geometry.slots, tl.int64) * PART
    received = inbox.received + (call.now & 1) * (world - 1) * buffer_size
    if tl.program_id(0) == 0:
        for step in range(1, world):
            enter(inbox.entered, (me + step) % world, call.now, team)
    announced = -1  # slot of the last part that was stored at ``receiver``, until that is announced
    receiver = me
    for step in range(1, world + 1):
        owner = (me + step) % world
        if MAPPED:
            await_entered(inbox.entered, owner, tl.where(owner == me, -1, call.now - 2), team)
        first_of_owner = 0 if MAPPED else first_tile(owner, tiles, world)
        begin, end = numbers_for(owner, tiles, geometry.count, world, MAPPED, SPLIT)
        for item in range(begin, end, tl.num_programs(0)):
            number = item // SPLIT
            tile = tile_of(
                number, owner, about, geometry, tiles, 0, world, ROWS, OWNER_OF, ROWS_OF, CUTS >= 0, item % SPLIT, SPLIT
            )
            if tile.rows > 0:
                marks.begins_tile(tile, None, None, None, geometry, 0, 0, 0, world, COLUMNS)
                part = part_by(tile, operands, first, second, BODY, ROWS, COLUMNS)
                marks.ends_tile()
                if announced >= 0:
                    wl.chunk_notify(call, receiver, announced, team)
                    announced = -1
                slot = number - first_of_owner
                place = received + tl.cast(slot, tl.int64) * PART
                blocks = cut(part, CUTS)
                is_whole, shares = True, None
                if SPLIT > 1:
                    is_whole = leave_share(blocks, split, number, item, PART, SPLIT)
                    shares = split.partials + (number * SPLIT).to(tl.int64) * PART + 16 * wl.zero_here()
                if is_whole:
                    if owner == me:
                        for other in tl.static_range(1, world):
                            wl.chunk_wait(call, (me + other) % world, slot, team)
                        if CUTS >= 0:
                            add_up(place, blocks, shares, buffer_size, tile, out, geometry, team, COLUMNS, PART, SPLIT)
                        else:
                            merge_parts(
                                place, blocks, buffer_size, tile, out, operands, geometry, team, MERGE, STORE, OWNER_OF, ROWS,
                                COLUMNS,
                            )  # fmt: skip
                    else:
                        there = wl.symm_at(place + buffer_of(me, owner, world) * buffer_size, owner, team)
                        send(there, blocks, shares, PART, SPLIT)
                        announced, receiver = slot, owner
    if announced >= 0:
        wl.chunk_notify(call, receiver, announced, team)
    wl.advance_call(call)


@triton.jit
def part_by(tile, operands, first, second, BODY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Result of BODY, which gets the matrices if there are any."""
    if first is None:
        return BODY(tile, operands, ROWS, COLUMNS)
    else:
        return BODY(tile, operands, Matrices(first, second), ROWS, COLUMNS)


@triton.jit
def cut(part, CUTS: tl.constexpr):
    """The blocks of a part: the tuple itself, or 2**CUTS pieces of one block's columns.

    In pieces, so that a sum and a received part fit beside the accumulator.
    """
    if CUTS < 0:
        return part
    elif CUTS == 0:
        return (part,)
    elif CUTS == 1:
        return halves(part)
    else:
        left, right = halves(part)
        return halves(left) + halves(right)


@triton.jit
def offsets_in(block):
    """Offsets of a block's elements in memory, where they lie one after the other."""
    if len(block.shape) == 1:
        return tl.arange(0, block.shape[0])
    else:
        return tl.arange(0, block.shape[0])[:, None] * block.shape[1] + tl.arange(0, block.shape[1])[None, :]


@triton.jit
def send(place, blocks, shares, PART: tl.constexpr, SPLIT: tl.constexpr):
    """Store the blocks at ``place``, one after the other."""
    for block in tl.static_range(len(blocks)):
        x = whole_block(blocks, block, shares, PART, SPLIT)
        tl.store(place + offsets_in(x), x.to(place.dtype.element_ty))
        place += x.numel


@triton.jit
def whole_block(blocks, block: tl.constexpr, shares, PART: tl.constexpr, SPLIT: tl.constexpr):
    """This rank's block; of a split tile the sum of its shares, in their order, from ``shares`` on."""
    if SPLIT == 1:
        return blocks[block]
    else:
        at = shares + block * blocks[block].numel + offsets_in(blocks[block])
        total = tl.load(at)
        for share in tl.range(1, SPLIT + wl.zero_here(), num_stages=1):
            total += tl.load(at + share.to(tl.int64) * PART)
        return total


@triton.jit
def leave_share(blocks, split, number, item, PART: tl.constexpr, SPLIT: tl.constexpr):
    """Store a share of tile ``number`` at its place; True for the last program, which adds all up.

    The tile's arrival counter is left at 0 for the next kernel of this stream.
    """
    send(split.partials + item.to(tl.int64) * PART + 16 * wl.zero_here(), blocks, None, PART, 1)
    wl.gather_stores()
    is_last = tl.atomic_add(split.arrivals + number, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        tl.store(split.arrivals + number, 0)
    return is_last


@triton.jit
def part_of(source, place, blocks, buffer_size, team):
    """Part of rank ``source`` in the blocks' dtypes: this rank's blocks, or a peer's as they arrived."""
    me = wl.rank(team)
    place += buffer_of(source, me, wl.num_ranks(team)) * buffer_size
    found = ()
    for block in tl.static_range(len(blocks)):
        x = blocks[block]
        if source != me:
            x = tl.load(place + offsets_in(x)).to(x.dtype)
        found = found + (x,)
        place += x.numel
    return found


@triton.jit
def add_up(
    place, blocks, shares, buffer_size, tile, out, geometry, team, COLUMNS: tl.constexpr, PART: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Store the sum of all ranks' parts, piece by piece, in fp32 and in rank order."""
    world: tl.constexpr = wl.num_ranks(team)
    WIDTH: tl.constexpr = COLUMNS // len(blocks)
    for piece in tl.static_range(len(blocks)):
        own, total = whole_block(blocks, piece, shares, PART, SPLIT), tl.zeros(blocks[piece].shape, tl.float32)
        # A loop that is not unrolled: the addresses of all ranks' parts would spill beside the accumulator.
        for source in tl.range(0, world + wl.zero_here(), num_stages=1):
            (x,) = part_of(source, place, (own,), buffer_size, team)
            total += x.to(tl.float32)
        column = tile.column * COLUMNS + piece * WIDTH
        store_tile(out, total, tile.owner_row, column, 0, tile.owner_row + tile.rows, geometry.N)
        place += blocks[piece].numel


@triton.jit
def merge_parts(
    place, blocks, buffer_size, tile, out, operands, geometry, team,
    MERGE: tl.constexpr, STORE: tl.constexpr, OWNER_OF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """STORE of all ranks' parts folded by MERGE in rank order, or of each part if there is no MERGE."""
    world: tl.constexpr = wl.num_ranks(team)
    if MERGE is None:
        for source in tl.static_range(world):
            part = part_of(source, place, blocks, buffer_size, team)
            STORE(part, source, out, tile, operands, ROWS, COLUMNS)
    else:
        total = part_of(0, place, blocks, buffer_size, team)
        for source in tl.static_range(1, world):
            total = MERGE(total, part_of(source, place, blocks, buffer_size, team))
        if OWNER_OF is None:
            of_out = Tile(tile.number, tile.owner, tile.owner_row, tile.owner_row, tile.rows, tile.column)
            marks.begins_tile(of_out, out, None, None, geometry, 0, 0, 0, world, COLUMNS)
        STORE(total, wl.rank(team), out, tile, operands, ROWS, COLUMNS)
        if OWNER_OF is None:
            marks.ends_tile()


def scatter(
    body: Any,
    out: torch.Tensor,
    operands: Any,
    team: Team,
    *,
    matrices: Sequence[Any] = (),
    plan: ExchangePlan | None = None,
    map: TileMap | None = None,
) -> torch.Tensor:
    """Sum a tile's parts over the ranks at its owner, while later tiles are computed. Collective.

    body      ``@triton.jit`` function (tile, operands, ROWS, COLUMNS): returns this rank's part of the tile, a block
              [ROWS, COLUMNS]; with ``plan.split`` share ``tile.share`` of ``tile.shares`` of it
    out       [m, N], this rank's rows of the sum, contiguous: fp16, bf16 or fp32; the same shape and dtype on all ranks
    operands  argument of the body, such as a NamedTuple of tensors, numbers and ``tl.constexpr``
    matrices  at most two tensors or tensor descriptors, which Triton takes by themselves only: the body then gets
              ``Matrices`` behind its operands
    plan      the same on all ranks
    map       ``TileMap``, for other tiles than the panels of all W * m rows in rank order; every row of it belongs to its
              owner's ``out``

    The peers' tiles come first. Parts travel in out's dtype and are summed in fp32 in rank order, the owner's own unrounded.
    Shares of a split tile are added in fp32 in their order before that; they take ``plan.split`` * W * m * N * 4 bytes of this
    rank's own memory.
    Returns ``out``. Captured in a CUDA graph it replays correctly, after one call outside with these sizes. ValueError for
    arguments that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    plan = plan or ExchangePlan()
    check_instance("plan", plan, ExchangePlan, "a weft.tiles.ExchangePlan")
    check_tensor("tiles.scatter", "out", out, team, FLOATS)
    # A piece of at most 8192 elements: 64 registers of a thread of four warps.
    cuts = 0
    while cuts < 2 and plan.rows * plan.columns >> cuts > 8192 and plan.columns >> cuts > 16:
        cuts += 1
    functions = {"BODY": body, "MERGE": None, "STORE": None}
    _run(
        "tiles.scatter", functions, out, operands, matrices, team, plan, map, plan.rows * plan.columns, cuts, out.dtype
    )
    return out


def exchange(
    body: Any,
    store: Any,
    out: torch.Tensor,
    operands: Any,
    team: Team,
    *,
    part: int,
    merge: Any = None,
    dtype: torch.dtype = torch.float32,
    matrices: Sequence[Any] = (),
    plan: ExchangePlan | None = None,
    map: TileMap | None = None,
) -> torch.Tensor:
    """Bring all ranks' parts of a tile to its owner, which merges and stores them. Collective.

    body      ``@triton.jit`` function (tile, operands, ROWS, COLUMNS): returns this rank's part, a tuple of blocks
    store     ``@triton.jit`` function (part, source, out, tile, operands, ROWS, COLUMNS): stores the merged part, to the tile's
              rows and columns of ``out`` if there is no map; without ``merge`` that of each rank ``source``, in rank order
    merge     ``@triton.jit`` function (total, part) -> total, folded over the parts in rank order, rank 0's first
    part      elements of a part, all its blocks together
    dtype     in which parts travel; the owner's own part is not rounded to it
    out       this rank's, contiguous; the affine map has panels of its rows [m, N]
    operands, matrices, plan, map  as in ``scatter``

    The peers' tiles come first. Returns ``out``. Graphs and errors as in ``scatter``.
    """
    plan = plan or ExchangePlan()
    check_instance("plan", plan, ExchangePlan, "a weft.tiles.ExchangePlan")
    check_tensor("tiles.exchange", "out", out, team)
    check_body("store", store)
    if merge is not None:
        check_body("merge", merge)
    check_int("part", part, 1)
    if dtype not in FLOATS:
        raise ValueError(f"tiles.exchange: dtype={dtype} is not one of {', '.join(str(known) for known in FLOATS)}")
    if plan.split > 1:
        raise ValueError(f"tiles.exchange: split={plan.split} is for a scatter, whose body returns a sum; leave it out")
    functions = {"BODY": body, "MERGE": merge, "STORE": store}
    _run("tiles.exchange", functions, out, operands, matrices, team, plan, map, part, -1, dtype)
    return out


def _run(
    op: str,
    functions: dict[str, Any],
    out: torch.Tensor,
    operands: Any,
    matrices: Sequence[Any],
    team: Team,
    plan: ExchangePlan,
    map: TileMap | None,
    part: int,
    cuts: int,
    dtype: torch.dtype,
) -> None:
    check_team(op, team)
    check_map(op, map)
    check_body("body", functions["BODY"])
    given = check_operands(op, operands, matrices)
    if out.dim() != 2 or 0 in out.shape or not out.is_contiguous():
        raise ValueError(
            f"{op}: out has shape {tuple(out.shape)} and strides {out.stride()}; pass a contiguous matrix that is not empty"
        )
    m, N = out.shape
    count = map.tiles if map else None
    if team.size > 1:
        agree(op, team, ("out.shape[0]", "out.shape[1]", "dtype", "part", "plan"), (m, N, dtype, part, plan))
    if map is not None and map.positions:
        raise ValueError(f"{op}: positions=True is for a gather; leave it out")
    tiles = make_tiles(m, N, panels=team.size, block_m=plan.rows, block_n=plan.columns, group=plan.group)
    slots = count or tiles.count // team.size
    inbox, arrived = _workspace(team, dtype, part, slots, map is not None)
    total = count or tiles.count

    def constants() -> dict[str, Any]:
        switches = {"PART": part, "CUTS": cuts, "SPLIT": plan.split, "launch_cooperative_grid": True}
        return functions | switches | launch_constants(plan, map, team)

    key = *(id(function) for function in functions.values()), plan, part, cuts, *identity(map)
    launch = launch_of(team, exchange_kernel, key, constants)
    launch(
        programs_for(team, plan, total * plan.split),
        *given,
        out,
        operands,
        operands if map is None or map.table is None else map.table,
        inbox,
        _split_scratch(team, part, total * plan.split) if plan.split > 1 else None,
        arrived.view,
        Geometry(m, N, 0, total, map.covers or 0 if map else 0, inbox.received.shape[2] // part),
        as_argument(tiles),
        team.view,
    )


def _workspace(team: Team, dtype: torch.dtype, part: int, slots: int, mapped: bool) -> tuple[Inbox, Channel]:
    """Receive buffers for ``slots`` parts. Calls with a map have their own: they wait for ``entered``."""

    def make(capacity: int) -> tuple[Inbox, Channel]:
        received = team.empty((2, team.size - 1, capacity), dtype, name="received parts")
        return Inbox(received, team.signals((team.size,), name="entered")), team.channel(
            capacity // part, name="arrived"
        )

    return grown_workspace(team, ("tiles.exchange", dtype, part, mapped), slots * part, make)


def _split_scratch(team: Team, part: int, places: int) -> SplitK:
    """Places for shares of ``part`` elements; counters are 0 between kernels of the team's stream."""

    def make(capacity: int) -> SplitK:
        return SplitK(team.local((capacity,), torch.float32), team.local((capacity // part,), torch.int32))

    return grown_workspace(team, ("tiles.scatter shares", part), places * part, make)

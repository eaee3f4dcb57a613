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
from weft.kernels.tile_schedule import as_argument, at_place, buffer_of, first_tile, from_argument, make_tiles
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
    about_of,
    check_body,
    check_map,
    check_operands,
    check_sizes,
    covers_of,
    identity,
    launch_constants,
    programs_for,
    tile_of,
)
from weft.transport.halves import await_entered, enter
from weft.triton_api import JITFunction

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


MAX_SPLIT = 16


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """Tile and compiler options of ``scatter`` and ``exchange``.

    rows, columns  of a tile, powers of two: the body's ROWS and COLUMNS
    group          tile rows that are computed column by column, for reuse in the L2
    split          of a scatter: most programs that share a tile, each with its share of K (``Tile.share``), at most MAX_SPLIT.
                   Only tiles that do not fill a round of programs are shared, if they fill at most half of it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a tile that ranks send each other, and the functions that make, merge and store them.

    size  elements; cuts: -1 for a tuple of blocks, else as CUTS of the kernel
    """

    body: JITFunction
    merge: JITFunction | None = None
    store: JITFunction | None = None
    size: int
    cuts: int = -1
    dtype: torch.dtype

    def identity(self) -> tuple[int, ...]:
        """Key among a kernel's launches."""
        return id(self.body), id(self.merge), id(self.store), self.size, self.cuts


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
    SPLIT     programs that share a tile from place ``tiles.whole`` of the order on, each with a share of its sum; the last one
              to leave its share adds all up and goes on. With a map all tiles are shared or none
    split     ``SplitK`` with room for each share of the shared tiles; None if SPLIT is 1
    about     argument of OWNER_OF and ROWS_OF: the table of a ``TileMap``, or the operands
    arrived   channel with a chunk for each slot of a receive buffer
    geometry  ``Geometry``; tiles: ``Tiles`` of the affine map as an argument

    signals   every rank s, per tile of owner o: stores its part at o, then announces the tile's slot, during its next tile
              program 0, at its start: entered[me] = this call, at every peer
    waits     own tiles, after their body: the tile's slot of every peer
              a map, before the first store to a peer: entered[peer] >= this call - 1
    order     of a merge: rank 0, 1, …, own part unrounded, the rest in received's dtype; before it of a split tile: share
              0, 1, …, in fp32. The same every run
    reuse     of half h: rank s writes it for owner o in calls e and e + 2. Affine map: in call e + 1 s waited for a tile
              from o, which o sent after its call e, in which it read half h. A map may leave out ranks, so s waits for
              ``entered``: o has begun call e + 1, and so ended call e
    progress  a program announces all its parts before it waits for a tile's parts; all programs are resident

    body  | o1 | o2 | o3 | own |                                        rank 0 of 4: tiles of the owners
    link       | o1 | o2 | o3 |
    merge                  | 0 1 2 3 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    tiles = from_argument(tiles)
    call = wl.next_call(arrived)
    buffer_size = tl.cast(geometry.slots, tl.int64) * PART
    received = inbox.received + (call.now & 1) * (world - 1) * buffer_size
    if tl.program_id(0) == 0:
        for step in range(1, world):
            enter(inbox.entered, (me + step) % world, call.now, team)
    announced = tl.full((), -1, tl.int32)
    announced, receiver = run_items(
        first, second, out, operands, about, inbox, received, None, call, announced, me, geometry, tiles, team, BODY, MERGE,
        STORE, OWNER_OF, ROWS_OF, ROWS, COLUMNS, PART, CUTS, 1,
    )  # fmt: skip
    if SPLIT > 1:
        announced, receiver = run_items(
            first, second, out, operands, about, inbox, received, split, call, announced, receiver, geometry, tiles, team, BODY,
            MERGE, STORE, OWNER_OF, ROWS_OF, ROWS, COLUMNS, PART, CUTS, SPLIT,
        )  # fmt: skip
    if announced >= 0:
        wl.chunk_notify(call, receiver, announced, team)
    wl.advance_call(call)


@triton.jit
def run_items(
    first, second, out, operands, about, inbox, received, split, call, announced, receiver, geometry, tiles, team,
    BODY: tl.constexpr, MERGE: tl.constexpr, STORE: tl.constexpr, OWNER_OF: tl.constexpr, ROWS_OF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, CUTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute this program's whole tiles (SPLIT = 1), or its shares: ``exchange_kernel``'s loop.

    Returns ``announced``, the slot of the last part that was stored at ``receiver``, until that is announced; else -1.
    """
    world: tl.constexpr = wl.num_ranks(team)
    MAPPED: tl.constexpr = OWNER_OF is not None
    me = wl.rank(team)
    buffer_size = tl.cast(geometry.slots, tl.int64) * PART
    for step in range(1, world + 1):
        owner = (me + step) % world
        if MAPPED:
            await_entered(inbox.entered, owner, tl.where(owner == me, -1, call.now - 2), team)
        first_of_owner = 0 if MAPPED else first_tile(owner, tiles, world)
        begin, end = items_for(step, tiles, geometry.count, world, MAPPED, SPLIT)
        for item in range(begin, end, tl.num_programs(0)):
            place = item if SPLIT == 1 else tiles.whole + item // SPLIT
            number = place if MAPPED else at_place(place, first_tile((me + 1) % world, tiles, world), tiles)
            tile = tile_of(
                number, owner, about, geometry, tiles, 0, world, ROWS, OWNER_OF, ROWS_OF, CUTS >= 0, item % SPLIT, SPLIT
            )
            if tile.rows > 0:
                marks.begins_tile(tile, None, None, marks.Arrived(None, 0, 0, 0), geometry, world, COLUMNS)
                part = part_by(tile, operands, first, second, BODY, ROWS, COLUMNS)
                marks.ends_tile()
                if announced >= 0:
                    wl.chunk_notify(call, receiver, announced, team)
                    announced = -1
                slot = number - first_of_owner
                here = received + tl.cast(slot, tl.int64) * PART
                blocks = cut(part, CUTS)
                is_whole, shares = True, None
                if SPLIT > 1:
                    is_whole = leave_share(blocks, split, item, PART, SPLIT)
                    shares = split.partials + (item // SPLIT * SPLIT).to(tl.int64) * PART + 16 * wl.zero_here()
                if is_whole:
                    if owner == me:
                        for peer in tl.static_range(1, world):
                            wl.chunk_wait(call, (me + peer) % world, slot, team)
                        if CUTS >= 0:
                            add_up(here, blocks, shares, buffer_size, tile, out, geometry, team, COLUMNS, PART, SPLIT)
                        else:
                            merge_parts(
                                here, blocks, buffer_size, tile, out, operands, geometry, team, MERGE, STORE, OWNER_OF, ROWS,
                                COLUMNS,
                            )  # fmt: skip
                    else:
                        there = wl.symm_at(here + buffer_of(me, owner, world) * buffer_size, owner, team)
                        send(there, blocks, shares, PART, SPLIT)
                        announced, receiver = slot, owner
    return announced, receiver


@triton.jit
def items_for(step, tiles, count, world, MAPPED: tl.constexpr, SPLIT: tl.constexpr):
    """This program's first item of the tiles of rank me + step, and the limit.

    SPLIT = 1: an item is a place of the order below ``tiles.whole``; else a share of a later one. Program p of P takes the
    items p, p + P, p + 2 P, … With a map the order is that of the numbers; ``tile_of`` skips tiles of other ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    of_owner = tiles.count // world
    begin, end = (step - 1) * of_owner, step * of_owner
    if MAPPED:
        begin, end = 0, count
    if SPLIT == 1:
        begin, end = tl.minimum(begin, tiles.whole), tl.minimum(end, tiles.whole)
    else:
        begin, end = tl.maximum(begin - tiles.whole, 0) * SPLIT, tl.maximum(end - tiles.whole, 0) * SPLIT
    return begin + (program + programs - begin % programs) % programs, end


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
    """This rank's block; of a shared tile the sum of its shares, in their order, from ``shares`` on."""
    if SPLIT == 1:
        return blocks[block]
    else:
        at = shares + block * blocks[block].numel + offsets_in(blocks[block])
        total = tl.load(at)
        for share in tl.range(1, SPLIT + wl.zero_here(), num_stages=1):
            total += tl.load(at + share.to(tl.int64) * PART)
        return total


@triton.jit
def leave_share(blocks, split, item, PART: tl.constexpr, SPLIT: tl.constexpr):
    """Store a share of a tile at its place; True for the last program, which adds all up.

    The tile's arrival counter is left at 0 for the next kernel of this stream.
    """
    send(split.partials + item.to(tl.int64) * PART + 16 * wl.zero_here(), blocks, None, PART, 1)
    wl.gather_stores()
    is_last = tl.atomic_add(split.arrivals + item // SPLIT, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        tl.store(split.arrivals + item // SPLIT, 0)
    return is_last


@triton.jit
def part_of(source, place, blocks, buffer_size, team):
    """Part of rank ``source`` in the blocks' dtypes: this rank's blocks, or a peer's as they arrived."""
    me = wl.rank(team)
    place += buffer_of(source, me, wl.num_ranks(team)) * buffer_size
    part = ()
    for block in tl.static_range(len(blocks)):
        x = blocks[block]
        if source != me:
            x = tl.load(place + offsets_in(x)).to(x.dtype)
        part = part + (x,)
        place += x.numel
    return part


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
            marks.begins_tile(of_out, out, None, marks.Arrived(None, 0, 0, 0), geometry, world, COLUMNS)
        STORE(total, wl.rank(team), out, tile, operands, ROWS, COLUMNS)
        if OWNER_OF is None:
            marks.ends_tile()


def scatter(
    body: JITFunction,
    out: torch.Tensor,
    operands: object,
    team: Team,
    *,
    matrices: Sequence[object] = (),
    plan: ExchangePlan | None = None,
    map: TileMap | None = None,
) -> torch.Tensor:
    """Sum a tile's parts over the ranks at its owner, while later tiles are computed. Collective.

    body      ``@triton.jit`` function (tile, operands, ROWS, COLUMNS): returns this rank's part of the tile, a block
              [ROWS, COLUMNS]; with ``plan.split`` share ``tile.share`` of ``tile.shares`` of it
    out       [m, N], this rank's rows of the sum, contiguous: fp16, bf16 or fp32; the same shape and dtype on all ranks
    operands  argument of the body, such as a NamedTuple of tensors, numbers and ``tl.constexpr``
    matrices  at most two tensors or tensor descriptors, which Triton takes by themselves only: the body then gets
              ``Matrices`` after its operands
    plan      the same on all ranks
    map       ``TileMap``, for tiles that are not the panels of all W * m rows in rank order; every row of it belongs to its
              owner's ``out``

    The peers' tiles come first. Parts travel in out's dtype and are summed in fp32 in rank order, the owner's own unrounded.
    Shares of a tile are added in fp32 in their order before that; they take 4 bytes for each element of at most as many tiles
    as programs, of this rank's own memory.
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
    parts = Parts(body=body, size=plan.rows * plan.columns, cuts=cuts, dtype=out.dtype)
    return _run("tiles.scatter", parts, out, operands, matrices, team, plan, map)


def exchange(
    body: JITFunction,
    store: JITFunction,
    out: torch.Tensor,
    operands: object,
    team: Team,
    *,
    part: int,
    merge: JITFunction | None = None,
    dtype: torch.dtype = torch.float32,
    matrices: Sequence[object] = (),
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
    parts = Parts(body=body, merge=merge, store=store, size=part, dtype=dtype)
    return _run("tiles.exchange", parts, out, operands, matrices, team, plan, map)


def _run(
    op: str, parts: Parts, out: torch.Tensor, operands: object, matrices: Sequence[object], team: Team, plan: ExchangePlan,
    map: TileMap | None,
) -> torch.Tensor:  # fmt: skip
    check_team(op, team)
    check_map(op, map)
    check_body("body", parts.body)
    given = check_operands(op, operands, matrices)
    if out.dim() != 2 or 0 in out.shape or not out.is_contiguous():
        raise ValueError(
            f"{op}: out has shape {tuple(out.shape)} and strides {out.stride()}; pass a contiguous matrix that is not empty"
        )
    m, N = out.shape
    if team.size > 1:
        names = ("out.shape[0]", "out.shape[1]", "dtype", "part", "plan")
        agree(op, team, names, (m, N, parts.dtype, parts.size, plan))
    if map is not None and map.positions:
        raise ValueError(f"{op}: positions=True is for a gather; leave it out")
    tiles = make_tiles(m, N, panels=team.size, block_m=plan.rows, block_n=plan.columns, group=plan.group)
    total, slots = (tiles.count, tiles.count // team.size) if map is None else (map.tiles, map.tiles)
    inbox, arrived = _workspace(team, parts, slots, map is not None)
    whole, split = _shared(plan.split, total, programs_for(team, plan, total * plan.split))
    if map is not None and whole > 0:  # shares of a peer's tile would come after own whole tiles, which wait for peers
        whole, split = total, 1
    shared = (total - whole) * split

    def constants() -> dict[str, Any]:
        functions = {"BODY": parts.body, "MERGE": parts.merge, "STORE": parts.store}
        switches = {"PART": parts.size, "CUTS": parts.cuts, "SPLIT": split, "launch_cooperative_grid": True}
        return functions | switches | launch_constants(plan, map, team)

    launch = launch_of(team, exchange_kernel, (*parts.identity(), plan, split, *identity(map)), constants)
    launch(
        programs_for(team, plan, whole + shared),
        *given,
        out,
        operands,
        about_of(map, operands),
        inbox,
        _split_scratch(team, parts.size, shared) if split > 1 else None,
        arrived.view,
        Geometry(m, N, 0, total, covers_of(map), inbox.received.shape[2] // parts.size),
        as_argument(tiles._replace(whole=whole)),
        team.view,
    )
    return out


def _shared(split: int, tiles: int, programs: int) -> tuple[int, int]:
    """(tiles that are not shared, programs that share one of the rest)."""
    left = tiles % programs
    split = min(split, programs // left) if left else 1
    return (tiles - left, split) if split > 1 else (tiles, 1)


def _workspace(team: Team, parts: Parts, slots: int, mapped: bool) -> tuple[Inbox, Channel]:
    """Receive buffers for ``slots`` parts. Calls with a map have separate ones: they wait for ``entered``."""

    def make(capacity: int) -> tuple[Inbox, Channel]:
        received = team.empty((2, team.size - 1, capacity), parts.dtype, name="received parts")
        return Inbox(received, team.signals((team.size,), name="entered")), team.channel(
            capacity // parts.size, name="arrived"
        )

    return grown_workspace(team, ("tiles.exchange", parts.dtype, parts.size, mapped), slots * parts.size, make)


def _split_scratch(team: Team, part: int, places: int) -> SplitK:
    """Places for shares of ``part`` elements; counters are 0 between kernels of the team's stream."""

    def make(capacity: int) -> SplitK:
        return SplitK(team.local((capacity,), torch.float32), team.local((capacity // part,), torch.int32))

    return grown_workspace(team, ("tiles.scatter shares", part), places * part, make)

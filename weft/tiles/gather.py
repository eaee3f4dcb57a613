"""gather: tiles computed from all ranks' rows, in the order in which the rows arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_choice, check_instance, check_int
from weft.kernels.operands import can_describe, descriptor_or_self
from weft.kernels.tile_schedule import as_argument, from_argument, make_tiles
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.runtime.team.checks import agree, check_team, check_tensor
from weft.runtime.team.workspace import grown_workspace
from weft.tiles import marks
from weft.tiles.tile import (
    Geometry,
    Matrices,
    Shard,
    TileMap,
    about_of,
    check_body,
    check_map,
    check_operands,
    check_sizes,
    covers_of,
    identity,
    launch_constants,
    numbers_for,
    programs_for,
    tile_of,
)
from weft.transport.copy_channel import MAX_CHUNKS, CopyChannel
from weft.triton_api import JITFunction

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

TRANSPORTS = ("copy", "store")


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """Tile, transport and compiler options of ``gather``.

    rows, columns  of a tile, powers of two: the body's ROWS and COLUMNS
    chunks         signals for a rank's rows, at most MAX_CHUNKS
    transport      "copy": copy engines bring the rows, beside the kernel; "store": all its programs store them first
    step           columns of a block of the shard's tensor descriptor; 0: the body gets a pointer
    group          tile rows that are computed column by column, for reuse in the L2
    """

    rows: int = 128
    columns: int = 128
    chunks: int = 1
    transport: str = "copy"
    step: int = 0
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        check_sizes(self, rows=1, columns=1, step=0, group=1, num_warps=1, num_stages=1)
        check_int("chunks", self.chunks, 1, MAX_CHUNKS)
        check_choice("transport", self.transport, TRANSPORTS)


class Rows(NamedTuple):
    """Rows of a gather, passed to its kernel as the argument ``rows``.

    own, gathered  this rank's shard [rows, K], and all ranks' panels
    arrivals       int32 [W, MAX_CHUNKS], this rank's: programs that have stored their part of a chunk; 0 between kernels
    """

    own: tl.tensor
    gathered: tl.tensor
    arrivals: tl.tensor


@triton.jit
def gather_kernel(
    own_data,
    gathered_data,
    first,
    second,
    rows,
    out,
    operands,
    about,
    landed,
    geometry,
    tiles,
    team,
    BODY: tl.constexpr,
    OWNER_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACED: tl.constexpr,
    STORES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """BODY of every tile, tiles of own rows first.        grid: (programs,)

    own_data, gathered_data  of ``rows`` as bodies get them: pointers, or tensor descriptors, which Triton takes by themselves
    first, second  ``Matrices``
    rows      ``Rows``: gathered has a panel of whole tiles for each rank; the own shard is read in place
    about     argument of OWNER_OF and ROWS_OF: the table of a ``TileMap``, or the operands
    landed    channel: signals the arrival of chunk c of rank s; begin_kernel has begun the call
    geometry  ``Geometry``; tiles: ``Tiles`` of the affine map as an argument, whose panels and chunks all maps have

    signals   copy engine of rank s, after each chunk of its shard; STORES: the last program of rank s to store its part of it
    waits     before the first tile of rank s that needs chunk c: chunks 0 .. c of rank s; all chunks unless PLACED
    reuse     of a half of gathered: CopyChannel
    progress  copy engines: programs wait for them only, and need not be resident. STORES: a program stores before it waits,
              and all programs of all ranks are resident

    rows  | s1 | s2 | s3 |                          chunks that arrive
    body  | s0 | s1 | s2 | s3 |                                         rank 0 of 4: owners of the tiles
    """
    world: tl.constexpr = wl.num_ranks(team)
    MAPPED: tl.constexpr = OWNER_OF is not None
    me = wl.rank(team)
    tiles = from_argument(tiles)
    call = wl.current_call(landed)
    panel_rows, chunk_rows = tiles.rows * ROWS, tiles.chunk * ROWS
    programs = tl.num_programs(0)
    if STORES:
        store_chunks(rows, call, geometry, panel_rows, chunk_rows, team)
    # The own rows have a loop of their own: Triton allocates shared memory for the loads of both unless one follows the other.
    begin, end = numbers_for(me, tiles, geometry.count, world, MAPPED)
    for number in range(begin, end, programs):
        tile = tile_of(number, me, about, geometry, tiles, chunk_rows, world, ROWS, OWNER_OF, ROWS_OF, PLACED)
        if tile.rows > 0:
            arrived = marks.Arrived(rows.gathered, chunk_rows, panel_rows, 0)
            marks.begins_tile(tile, out, rows.own, arrived, geometry, world, COLUMNS)
            run_body(Shard(own_data, 0), out, tile, operands, first, second, BODY, ROWS, COLUMNS)
            marks.ends_tile()
    for step in range(1, world):
        owner = (me + step) % world
        if DESCRIBED:
            shard = Shard(gathered_data, owner * panel_rows)
        else:
            shard = Shard(gathered_data + tl.cast(owner, tl.int64) * panel_rows * geometry.K, 0)
        seen = 0  # chunks
        begin, end = numbers_for(owner, tiles, geometry.count, world, MAPPED)
        for number in range(begin, end, programs):
            tile = tile_of(number, owner, about, geometry, tiles, chunk_rows, world, ROWS, OWNER_OF, ROWS_OF, PLACED)
            if tile.rows > 0:
                limit = geometry.rows
                if PLACED:
                    limit = tl.maximum(tl.minimum(limit, tile.owner_row + tile.rows), 1)
                while seen < tl.cdiv(limit, chunk_rows):
                    wl.chunk_wait(call, owner, seen, team)
                    seen += 1
                arrived = marks.Arrived(rows.gathered, chunk_rows, panel_rows, seen)
                marks.begins_tile(tile, out, rows.own, arrived, geometry, world, COLUMNS)
                run_body(shard, out, tile, operands, first, second, BODY, ROWS, COLUMNS)
                marks.ends_tile()


@triton.jit
def run_body(shard, out, tile, operands, first, second, BODY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """BODY, with the matrices if there are any."""
    if first is None:
        BODY(shard, out, tile, operands, ROWS, COLUMNS)
    else:
        BODY(shard, out, tile, operands, Matrices(first, second), ROWS, COLUMNS)


@triton.jit
def store_chunks(rows, call, geometry, panel_rows, chunk_rows, team):
    """Store this rank's rows to the peers: each program a part of a chunk, which the last one announces.

    Rank r serves r - 1, r - 2, … : the peer that needs this shard next is first.
    """
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    program, programs = tl.program_id(0), tl.num_programs(0)
    chunks = tl.cdiv(geometry.rows, chunk_rows)
    for step in range(1, world):
        peer = (me + world - step) % world
        for chunk in range(0, chunks):
            first = chunk * chunk_rows
            elements = tl.minimum(chunk_rows, geometry.rows - first) * geometry.K
            # Multiples of 16 elements keep the alignment of the rows.
            each = tl.cdiv(elements, 16 * programs) * 16
            begin = tl.minimum(program * each, elements)
            count = tl.minimum(each, elements - begin)
            source = rows.own + tl.cast(first, tl.int64) * geometry.K + begin
            target = rows.gathered + tl.cast(me * panel_rows + first, tl.int64) * geometry.K + begin
            wl.put(target, source, count, peer, team)
            wl.gather_stores()
            arrivals = rows.arrivals + peer * chunks + chunk
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys") == programs - 1:
                tl.store(arrivals, 0)
                wl.chunk_notify(call, peer, chunk, team)


def gather(
    body: JITFunction,
    shard: torch.Tensor,
    out: torch.Tensor,
    operands: object,
    team: Team,
    *,
    matrices: Sequence[object] = (),
    plan: GatherPlan | None = None,
    map: TileMap | None = None,
) -> torch.Tensor:
    """Compute ``out`` from all ranks' rows, each tile as soon as its rows are here. Collective.

    body      ``@triton.jit`` function (shard, out, tile, operands, ROWS, COLUMNS): loads rows of ``tile.owner`` from ``shard``
              (``Shard``) and stores its tile of ``out``. ROWS and COLUMNS are constants
    shard     [m, K], this rank's rows; the same shape and dtype on all ranks
    out       [rows, N], this rank's, contiguous; the affine map has [W * m, N]: rows in rank order, every column
    operands  argument of the body, such as a NamedTuple of tensors, numbers and ``tl.constexpr``
    matrices  at most two tensors or tensor descriptors, which Triton takes by themselves only: the body then gets
              ``Matrices`` after its operands
    plan      the same on all ranks
    map       ``TileMap``, for tiles that are not panels in rank order

    Returns ``out``. Captured in a CUDA graph it replays correctly, after one call outside with these sizes. ValueError for
    arguments that do not fit, on all ranks where theirs differ; HeapExhausted.
    """
    plan = plan or GatherPlan()
    given = _check(body, shard, out, operands, matrices, team, plan, map)
    world, (m, K), N = team.size, shard.shape, out.shape[1]
    shard, described = shard.detach().contiguous(), bool(plan.step)
    if described and not can_describe(shard):
        shard = shard.clone()
    tiles = make_tiles(
        m, N, panels=world, block_m=plan.rows, block_n=plan.columns, group=plan.group, chunks=plan.chunks
    )
    panel = tiles.rows * plan.rows
    channel, arrivals = _workspace(team, shard.dtype, world * panel * K)
    gathered, stores = channel.buffers[0], plan.transport == "store"
    if world > 1:
        gathered = channel.begin(team)
    gathered = gathered[: world * panel * K].view(world * panel, K)
    if world > 1 and not stores:
        team.copy_engine.fork()
        _send(team, channel, shard, gathered, tiles.chunk * plan.rows, panel)
    count = tiles.count if map is None else map.tiles

    def constants() -> dict[str, Any]:
        placed = map is None or not map.positions
        switches = {"PLACED": placed, "STORES": stores, "DESCRIBED": described, "launch_cooperative_grid": stores}
        return {"BODY": body} | switches | launch_constants(plan, map, team)

    launch = launch_of(team, gather_kernel, (id(body), plan, described, *identity(map)), constants)
    launch(
        programs_for(team, plan, count),
        descriptor_or_self(shard, plan.rows, plan.step, described),
        descriptor_or_self(gathered, plan.rows, plan.step, described),
        *given,
        Rows(shard, gathered, arrivals),
        out,
        operands,
        about_of(map, operands),
        channel.landed.view,
        Geometry(m, N, K, count, covers_of(map), 0),
        as_argument(tiles),
        team.view,
    )
    if world > 1 and not stores:
        team.copy_engine.join()
    return out


def _check(
    body: JITFunction, shard: torch.Tensor, out: torch.Tensor, operands: object, matrices: Sequence[object], team: Team,
    plan: GatherPlan, map: TileMap | None,
) -> Matrices:  # fmt: skip
    """``matrices`` as arguments. ValueError for arguments that do not fit. Collective."""
    check_team("tiles.gather", team)
    check_body("body", body)
    check_instance("plan", plan, GatherPlan, "a weft.tiles.GatherPlan")
    check_map("tiles.gather", map)
    for name, matrix in (("shard", shard), ("out", out)):
        check_tensor("tiles.gather", name, matrix, team)
        if matrix.dim() != 2 or 0 in matrix.shape:
            raise ValueError(f"tiles.gather: {name} has shape {tuple(matrix.shape)}; pass a matrix that is not empty")
    given = check_operands("tiles.gather", operands, matrices)
    if not out.is_contiguous():
        raise ValueError(f"tiles.gather: out has strides {out.stride()}; pass a contiguous tensor")
    world, (m, K) = team.size, shard.shape
    if map is None and len(out) != world * m:
        raise ValueError(
            f"tiles.gather: out has {len(out)} rows, and {world} ranks have {m} each; pass {world * m} rows, or a map"
        )
    if world > 1:
        agree("tiles.gather", team, ("shard.shape[0]", "shard.shape[1]", "dtype", "plan"), (m, K, shard.dtype, plan))
    if plan.step and K * shard.itemsize % 16:
        raise ValueError(
            f"tiles.gather: step={plan.step} needs rows that begin on 16 bytes, and K={K} of {shard.dtype} do not; pass step=0"
        )
    return given


def _send(
    team: Team, channel: CopyChannel, shard: torch.Tensor, gathered: torch.Tensor, chunk_rows: int, panel: int
) -> None:
    """Have the copy engine write ``shard`` into peers' panels, in the order of ``store_chunks``."""
    first_row = team.rank * panel
    for step in range(1, team.size):
        peer = (team.rank - step) % team.size
        for number, first in enumerate(range(0, len(shard), chunk_rows)):
            piece = shard[first : first + chunk_rows]
            target = gathered[first_row + first : first_row + first + len(piece)]
            channel.send(team, target, piece, team.rank, number, peer)


def _workspace(team: Team, dtype: torch.dtype, size: int) -> tuple[CopyChannel, torch.Tensor]:
    def make(capacity: int) -> tuple[CopyChannel, torch.Tensor]:
        channel = CopyChannel.make(team, team.zeros((2, capacity), dtype, name="gathered rows"), team.size)
        return channel, team.local((team.size, MAX_CHUNKS), torch.int32)

    return grown_workspace(team, ("tiles.gather", dtype), size, make)

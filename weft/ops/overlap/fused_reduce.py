"""Fused design of matmul_reduce_scatter and matmul_all_reduce: a GEMM that sums tiles over ranks.

Every output tile has an owner. A rank computes the tiles of its peers first and sends each to its owner during the GEMM of
the next one; the owner adds the received tiles to the local one, and for an all-reduce sends the sum to all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.gemm_tile import (
    Operand,
    Outgoing,
    gemm_tile,
    halves,
    join_partials,
    leave_partial,
    packed,
    store_tile,
)
from weft.kernels.operands import rows_contiguous
from weft.kernels.tile_schedule import (
    as_argument,
    at_place,
    buffer_of,
    first_tile,
    from_argument,
    locate,
    make_tiles,
    owner_of,
    place_of,
    work_at,
    work_steps,
)
from weft.ops.gemm import persistent
from weft.ops.gemm.tile import Tile
from weft.ops.knobs import around, design_type, flipped, halved, knob, powers
from weft.runtime.arithmetic import cdiv
from weft.runtime.launching import launch_of
from weft.runtime.team.workspace import grown_workspace

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class Fused:
    """One kernel that sends each finished tile to its owner during the GEMM of the next one.

    split  tiles that do not fill a round of programs are split along K
    piece  elements of a finished tile that are sent in each step of the next tile (a power of two): spread over
           the GEMM, since all programs finish tiles at once and the link would idle in between
    """

    tile: Tile = knob(near=around)
    split: bool = knob(True, near=flipped)
    piece: int = knob(2048, powers(), halved(high=8192))


def piece_for(K: int, block_k: int) -> int:
    """Default ``piece``: small for many steps along K, so that a link is loaded evenly."""
    return 1024 if K // block_k >= 32 else 2048


class Buffers(NamedTuple):
    """Memory of one call, passed to the kernel as the argument ``buffers``.

    received  [H, W - 1, buffer_size] symmetric: whole tiles; receive buffer d has rank me + 1 + d's results of my tiles
    arrived   [W - 1, flags]          symmetric: arrived[d, t] = epoch, once my t-th tile lies in receive buffer d
    epoch     [2]                     this rank's
    results   [all tiles]             symmetric: the summed tiles that peers own (all-reduce only)
    ready     [all tiles]             symmetric: ready[number] = epoch, once that tile lies in results (all-reduce only)
    buffer_size, flags                row lengths of received and of arrived
    """

    received: tl.tensor
    arrived: tl.tensor
    epoch: tl.tensor
    results: tl.tensor
    ready: tl.tensor
    buffer_size: tl.tensor
    flags: tl.tensor


class Target(NamedTuple):
    """Destination of a finished tile.

    is_own, is_last    this rank owns it; it is this program's last tile
    received           its address in the first receive buffer
    at_owner           its address in this rank's receive buffer at the owner
    result             its address in results
    send               this program's send buffer
    row, column        its position in its panel; rows, N: the limits of the panel
    """

    is_own: tl.tensor
    is_last: tl.tensor
    received: tl.tensor
    at_owner: tl.tensor
    result: tl.tensor
    send: tl.tensor
    row: tl.tensor
    column: tl.tensor
    rows: tl.tensor
    N: tl.tensor


@triton.jit(do_not_specialize=["M"])
def matmul_reduce_kernel(
    a, b, out, send, buffers, split, M, sizes, tiles, block, team, LOCAL_FIRST: tl.constexpr, REPLICATE: tl.constexpr
):
    """out = sum over ranks of a[M, K] @ b[N, K].T        grid: (programs,), own tiles last

    REPLICATE    out[M, N], bitwise the same on all ranks. Tiles, not rows, are assigned to owners, so that all ranks take part
                 for any M
    else         out[M / W, N], the rows me * M / W .. of the sum. Panels of rows are assigned to owners
    LOCAL_FIRST  a has the rows of ranks me, me + 1, … (mod W) in this order, else in rank order

    send     [programs, tile]: this rank's; a program's finished tile, while it goes to its owner
    buffers  ``Buffers``; sizes: ``Sizes``; split: ``SplitK``; tiles: ``Tiles`` as an argument; block: ``Block``

    signals  every rank s, per tile of owner o: stores the tile at o, then arrived[buffer of s, t] = epoch at o
             REPLICATE, the owner, per own tile: stores the sum at every peer, then ready[number] = epoch there
    waits    own tiles, after their GEMM: arrived[d, t] >= epoch, d = 0 .. W - 2
             REPLICATE, peers' tiles, after all own ones: ready[number] >= epoch, then the copy into out
    order    own partial (fp32) + the partials of ranks me + 1, me + 2, … (in out's dtype), summed in fp32 and rounded once, by
             the owner: the same every run
    reuse    received, REPLICATE (H = 1): the owner reads a tile before it signals ready, and no rank ends a call before all
             tiles are ready.
             received, else (H = 2, by epoch): rank s writes half h for owner o in call e and again in call e + 2. In
             between, s finished call e + 1, in which it waited for a tile from o. o sent that tile after it finished call e,
             and so after it read half h.
             results: an owner writes a tile only after it received this rank's share of it in the same call, sent after this
             rank's last call ended. This holds for any shapes of the two calls.
             send: a tile has been sent when the next tile's GEMM ends, and the buffer is filled again only then.
    progress before a program waits it has sent and announced all its earlier tiles

    gemm  | o1 | o2 | o3 | own |                                        rank 0 of 4: tiles of the owners
    link       | o1 | o2 | o3 | | own to all |                          each tile along the next one's GEMM
    sum                    | +1 +2 +3 |
    copy                               | o1 | o2 | o3 |                 REPLICATE
    """
    world: tl.constexpr = wl.num_ranks(team)
    TILE: tl.constexpr = block.m * block.n
    # In pieces, so that a receive buffer's elements fit beside the accumulator: whole tiles spill up to 168 bytes a thread.
    HALVES: tl.constexpr = 2 if TILE > 8192 else 1
    me = wl.rank(team)
    a, b = Operand(a, sizes.a_stride, M), Operand(b, sizes.b_stride, sizes.N)
    rows = M if REPLICATE else M // world
    tiles = from_argument(tiles)
    now = wl.next_epoch(buffers.epoch)
    received = buffers.received
    if not REPLICATE:
        received += (now & 1).to(tl.int64) * (world - 1) * buffers.buffer_size
    start = first_tile((me + 1) % world, tiles, world)
    send += tl.program_id(0) * TILE
    sending = -1  # the number of the tile in the send buffer
    depth = tl.cdiv(sizes.K, block.k)
    steps = work_steps(tiles, depth)
    for step in range(0, steps):
        place, first, last = work_at(step, tiles, depth)
        number = at_place(place, start, tiles)
        owner, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * block.m, tile_column * block.n
        first_row = 0 if REPLICATE else place_of(owner, me, world, LOCAL_FIRST) * rows
        receiver = owner_of(tl.maximum(sending, 0), tiles, world)
        sent = tl.maximum(sending, 0) - first_tile(receiver, tiles, world)
        buffer = buffer_of(me, receiver, world)
        there = received + tl.cast(buffer, tl.int64) * buffers.buffer_size + sent.to(tl.int64) * TILE
        outgoing = Outgoing(send, wl.symm_at(there, receiver, team), tl.where(sending < 0, 0, TILE))
        began = wl.begin_tile(team)
        acc = gemm_tile(a, b, first_row + row, column, sizes.K, first, last, outgoing, block, True)
        wl.end_tile(began, owner * tiles.rows + tile_row, tile_column, team)
        if sending >= 0:
            wl.notify(buffers.arrived + buffer * buffers.flags + sent, receiver, now, team)
            sending = -1
        if last - first == depth:
            complete = True
        else:
            complete = leave_partial(acc, split, place, tiles, depth, block)
        if complete:
            if REPLICATE:
                owner = owner_of(number, tiles, world)
            tile = number - first_tile(owner, tiles, world)
            here = received + tile.to(tl.int64) * TILE
            result = buffers.results + number.to(tl.int64) * TILE if REPLICATE else here
            last_step = step + 1 == steps
            buffer = buffer_of(me, owner, world)
            if owner == me:
                for peer in tl.range(0, world - 1):
                    wl.wait(buffers.arrived + peer * buffers.flags + tile, now, team)
            else:
                there = wl.symm_at(here + tl.cast(buffer, tl.int64) * buffers.buffer_size, owner, team)
                tl.debug_barrier()  # all threads have sent their part of the send buffer
            target = Target(owner == me, last_step, here, there, result, send, row, column, rows, sizes.N)
            if last - first == depth:
                pieces = halves(acc) if HALVES > 1 else (acc,)
                for part in tl.static_range(HALVES):
                    deliver(pieces[part], 0, part, out, target, buffers, block, team, REPLICATE)
            else:
                for at in range(0, block.m, block.join_rows):
                    x = join_partials(split, place, at, tiles, depth, block)
                    deliver(x, at, 0, out, target, buffers, block, team, REPLICATE)
            if owner == me:
                if REPLICATE:
                    for peer in tl.static_range(1, world):
                        wl.notify(buffers.ready + number, (me + peer) % world, now, team)
            elif last_step:
                wl.notify(buffers.arrived + buffer * buffers.flags + tile, owner, now, team)
            else:
                tl.debug_barrier()
                sending = number
    if REPLICATE:
        # The order begins with all tiles of the peers.
        of_peers = tiles.count + first_tile(me, tiles, world) - first_tile(me + 1, tiles, world)
        for place in range(tl.program_id(0), of_peers, tl.num_programs(0)):
            number = at_place(place, start, tiles)
            panel, chunk, tile_row, tile_column = locate(number, tiles)
            wl.wait(buffers.ready + number, now, team)
            total = tl.load(buffers.results + number.to(tl.int64) * TILE + packed(block.m, block.n, block.n))
            store_tile(out, total, tile_row * block.m, tile_column * block.n, 0, M, sizes.N)
    wl.advance_epoch(buffers.epoch, now)


@triton.jit
def deliver(x, at, part, out, target, buffers, block, team, REPLICATE: tl.constexpr):
    """Store ``x``, a piece of a finished tile, at its target.

    The piece begins at row ``at`` and column ``part`` * x.shape[1] of the tile. An own tile is stored in ``out`` with the
    received ones added, and if REPLICATE in every peer's results; another rank's in the send buffer, or at the owner if it is
    this program's last.
    """
    world: tl.constexpr = wl.num_ranks(team)
    COLUMNS: tl.constexpr = x.shape[1]
    offsets = at * block.n + part * COLUMNS + packed(x.shape[0], COLUMNS, block.n)
    if target.is_own:
        for buffer in tl.range(0, world - 1, num_stages=1):
            if REPLICATE:
                source = target.received + buffer * buffers.buffer_size
            else:
                source = target.received + tl.cast(buffer, tl.int64) * buffers.buffer_size
            x += tl.load(source + offsets).to(tl.float32)
        total = x.to(out.dtype.element_ty)
        if REPLICATE:
            for peer in tl.range(1, world + wl.zero_here(), num_stages=1):
                tl.store(wl.symm_at(target.result, (wl.rank(team) + peer) % world, team) + offsets, total)
        store_tile(out, total, target.row + at, target.column + part * COLUMNS, 0, target.rows, target.N)
    elif target.is_last:
        tl.store(target.at_owner + offsets, x.to(out.dtype.element_ty))
    else:
        send = target.send + 16 * wl.zero_here()
        tl.store(send + offsets, x.to(out.dtype.element_ty))


def buffers_of(team: Team, op: str, dtype: torch.dtype, buffer_size: int, replicate: bool) -> Buffers:
    """Memory of the op's calls with receive buffers of this size. Collective where it is made."""

    def make(capacity: int) -> Buffers:
        peers, flags = team.size - 1, capacity // persistent.SMALLEST_TILE
        received = team.empty((peers, capacity) if replicate else (2, peers, capacity), dtype=dtype)
        arrived, epoch = team.signals((peers, flags)), team.local((2,), torch.int32)
        results, ready = received, arrived  # not used where every rank keeps its sums
        if replicate:
            results, ready = team.empty((team.size * capacity,), dtype=dtype), team.signals((team.size * flags,))
        return Buffers(received, arrived, epoch, results, ready, capacity, flags)

    return grown_workspace(team, (op, dtype), buffer_size, make)


def run(
    op: str,
    design: Fused,
    team: Team,
    matrices: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    *,
    local_first: bool = False,
    replicate: bool = False,
) -> None:
    """Run the kernel on ``matrices`` (a, b). op: whose buffers it uses."""
    (a, b), tile, panels = map(rows_contiguous, matrices), design.tile, 1 if replicate else team.size
    tiles = make_tiles(*out.shape, panels=panels, block_m=tile.block_m, block_n=tile.block_n, group=tile.group)
    buffer_size = cdiv(tiles.count, team.size) * tile.block_m * tile.block_n
    buffers = buffers_of(team, op, a.dtype, buffer_size, replicate)
    scratch = persistent.scratch_for(team, tile, a.dtype)
    programs = persistent.programs_for(team, tiles, tile, design.split)
    tiles = persistent.with_split(tiles, programs, design.split)
    operands, descriptors = persistent.operands(a, b, tile)

    def constants() -> dict[str, object]:
        switches = {"LOCAL_FIRST": local_first, "REPLICATE": replicate, "launch_cooperative_grid": True}
        return switches | tile.options(descriptors, team.caps.arch)

    launch = launch_of(team, matmul_reduce_kernel, (design, descriptors, local_first, replicate), constants)
    block, sizes = tile.block(descriptors, design.piece), persistent.sizes_of(a, b)
    memory = scratch.send, buffers, scratch.split
    launch(programs, *operands, out, *memory, a.shape[0], sizes, as_argument(tiles), block, team.view)

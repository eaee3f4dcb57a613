"""Times of ops by their schedules: tiles on SM slots, copies on a copy engine, pieces on rails.

All ranks are alike and begin at once. Times are microseconds, sizes those of ``weft bench``: M rows in all, and this rank's
share N or K of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from weft.kernels.tile_schedule import make_tiles, plan
from weft.predict.costs import Costs
from weft.predict.executor import CopyEngine, Slots, arrivals, run_in_order
from weft.runtime.arithmetic import cdiv

ITEM = 2  # bytes of fp16 and bf16
# Ranks whose memory a rank's stores reach.
NODE = 8
# Tiles that a GEMM may use, by their number of halvings from 128 x 256.
TILES = ((128, 256, 0), (128, 128, 1), (64, 128, 2))
CHUNKS = (1, 2, 4)


def tile_time(costs: Costs, tile: tuple[int, int, int], K: int) -> float:
    m, n, halvings = tile
    return m * n * K * costs.mac * costs.smaller**halvings * 1e-9 + costs.tile


def best_tile(costs: Costs, M: int, N: int, K: int) -> tuple[int, int, int]:
    """Tile with which a GEMM alone ends first."""
    return min(TILES, key=lambda tile: cdiv(_count(tile, M, N), costs.sms) * tile_time(costs, tile, K))


def gemm(costs: Costs, M: int, N: int, K: int) -> float:
    """A GEMM [M, K] @ [N, K].T of one GPU by cuBLAS."""
    tile = best_tile(costs, M, N, K)
    time = cdiv(_count(tile, M, N), costs.sms) * tile_time(costs, tile, K)
    return max(time, (M * K + N * K + M * N) * ITEM / costs.memory)


def ag_gemm(costs: Costs, M: int, N: int, K: int, world_size: int) -> float:
    """All-gather of A [M, K], and its product with N rows of this rank."""
    return _best(lambda chunks, fused: _ag_gemm(costs, M, N, K, world_size, chunks, fused))


def gemm_rs(costs: Costs, M: int, N: int, K: int, world_size: int) -> float:
    """Product with K columns of this rank, and the sum over the ranks, scattered by rows."""
    return min(_gemm_rs(costs, M, N, K, world_size, chunks) for chunks in CHUNKS)


def all_reduce(costs: Costs, nbytes: int, world_size: int) -> float:
    """Sum of ``nbytes`` bytes over the ranks: in one step, or by owners in two; over nodes by rails."""
    if world_size == 1:
        return 0.0
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    one = costs.push + (near - 1) * nbytes / costs.push_link
    two = costs.push + 2 * costs.hop + 2 * (near - 1) / near * nbytes / costs.push_link
    large = (
        2 * costs.call + 2 * (near - 1) * (costs.copy + costs.flag + nbytes / near / costs.link) + nbytes / costs.add
    )
    inside = min(one, two, large)
    return inside + (nodes > 1) * 2 * (nodes - 1) * (costs.rail + nbytes / near / nodes / costs.rail_link)


def moe(costs: Costs, tokens: int, hidden: int, inner: int, experts: int, top: int, world_size: int) -> float:
    """Mixture of experts over ranks: rows gathered, two grouped GEMMs, rows summed.

    A rank holds ``experts`` / W of them, and every expert gets as many tokens. A grouped GEMM takes the tiles of its experts
    one after the other.
    """
    held = max(experts // world_size, 1)
    rows = cdiv(tokens * top, experts)
    gathered = _gathered(costs, tokens * hidden * ITEM / world_size, world_size)
    # A tile has rows of all ranks, so it waits for the last shard.
    up = _grouped(costs, held, rows, 2 * inner, hidden, gathered[-1])
    down = _grouped(costs, held, rows, hidden, inner, up)
    if world_size == 1:
        return costs.call + down
    scattered = _gathered(costs, tokens * hidden * ITEM / world_size, world_size)[-1]
    # The sums leave in slabs of columns while later slabs are computed: all but the first slab is hidden, or the wire is.
    return costs.call + max(down, up + scattered) + scattered / 4 + 2 * tokens * hidden * ITEM / costs.add


# --- AG-GEMM ----------------------------------------------------------------------------------------------------------


def _best(time: Callable[[int, bool], float]) -> float:
    return min(time(chunks, fused) for chunks in CHUNKS for fused in (True, False))


def _ag_gemm(costs: Costs, M: int, N: int, K: int, world_size: int, chunks: int, fused: bool) -> float:
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    rows, clock, engine_free = M // world_size, costs.call, costs.call
    for node in range(nodes):
        # The rows of each node as they come over the rail, gathered in this one meanwhile.
        ready = costs.call + node * (costs.rail + rows * K * ITEM / costs.rail_link)
        engine = CopyEngine(costs.copy, costs.link, costs.flag, max(engine_free, ready))
        landed = [
            arrivals(engine, [rows * K * ITEM / chunks] * chunks, ready) for _ in range(1, near)
        ]  # fmt: skip
        engine_free = landed[-1][-1] if landed else ready
        work = _fused_ag if fused else _pipelined_ag
        clock = work(costs, rows, N, K, near, chunks, [[max(ready, clock)] * chunks, *landed], max(clock, ready))
    return clock


def _fused_ag(
    costs: Costs, rows: int, N: int, K: int, world: int, chunks: int, landed: Sequence[Sequence[float]], begin: float
) -> float:
    m, n, halvings = best_tile(costs, world * rows, N, K)
    order = _order(rows, N, world, m, n, chunks)
    ready = np.array(landed)[order[:, 0], order[:, 1]]
    return run_in_order(ready, tile_time(costs, (m, n, halvings), K), min(costs.sms, len(order)), begin)


@cache
def _order(rows: int, N: int, world: int, m: int, n: int, chunks: int) -> np.ndarray:
    """(owner, chunk) of each tile of rank 0, in the order of the fused kernel."""
    tiles = make_tiles(rows, N, panels=world, block_m=m, block_n=n, group=8, chunks=chunks)
    return np.array([(owner, place.chunk) for _, owner, place in plan(tiles, 0, world, own="first")])


def _pipelined_ag(
    costs: Costs, rows: int, N: int, K: int, world: int, chunks: int, landed: Sequence[Sequence[float]], begin: float
) -> float:
    slots, piece = Slots(costs.sms), cdiv(rows, chunks)
    end = _piece(costs, slots, rows, N, K, begin)
    for of_rank in landed[1:]:
        for time in of_rank:
            end = max(end, _piece(costs, slots, piece, N, K, time))
    return end


# --- GEMM-RS ----------------------------------------------------------------------------------------------------------


def _gemm_rs(costs: Costs, M: int, N: int, K: int, world_size: int, chunks: int) -> float:
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    rows, clock, rail = M // world_size, costs.call, 0.0
    slots = Slots(costs.sms)
    for node in range(nodes):
        engine = CopyEngine(costs.copy, costs.link, costs.flag, clock)
        arrived = end = clock
        for _ in range(near - 1):  # the peers' rows, each piece sent as it is ready
            for _ in range(chunks):
                end = _piece(costs, slots, cdiv(rows, chunks), N, K, clock)
                arrived = max(arrived, engine.send(rows / chunks * N * ITEM, end))
        end = max(end, _piece(costs, slots, rows, N, K, clock))
        received = (near + 1) * rows * N * ITEM
        clock = max(end, arrived) + received / costs.add
        if node < nodes - 1:  # the sum for another node's rank
            rail = max(rail, clock) + costs.rail + rows * N * ITEM / costs.rail_link
    return max(clock, rail) + (nodes * rows * N * ITEM / costs.add if nodes > 1 else 0)


# --- parts ------------------------------------------------------------------------------------------------------------


def _piece(costs: Costs, slots: Slots, rows: int, N: int, K: int, ready: float) -> float:
    tile = best_tile(costs, rows, N, K)
    each = max(tile_time(costs, tile, K), costs.sms * N * K * ITEM / costs.memory / _count(tile, rows, N))
    return slots.run(_count(tile, rows, N), each, ready)


def _grouped(costs: Costs, experts: int, rows: int, N: int, K: int, ready: float) -> float:
    slots, tile = Slots(costs.sms), best_tile(costs, rows, N, K)
    return max(slots.run(_count(tile, rows, N), tile_time(costs, tile, K), ready) for _ in range(experts))


def _gathered(costs: Costs, nbytes: float, world_size: int) -> list[float]:
    """Arrivals of the other ranks' shards of ``nbytes`` each; the own one at 0."""
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    engine, found = CopyEngine(costs.copy, costs.link, costs.flag, 0.0), [0.0]
    for node in range(nodes):
        ready = node * (costs.rail + nbytes / costs.rail_link)
        found += arrivals(engine, [nbytes] * (near - 1), ready)
    return found


def _count(tile: tuple[int, int, int], M: int, N: int) -> int:
    return cdiv(M, tile[0]) * cdiv(N, tile[1])

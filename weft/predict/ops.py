"""Times of ops by their schedules: tiles on SM slots, copies on a copy engine, pieces on rails.

All ranks are alike and begin at once. Times are microseconds, sizes as in ``weft bench``: M rows in all, and this rank's
share N or K of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.ops.moe.moe_schedule import block_for
from weft.predict.costs import Costs
from weft.predict.executor import CopyEngine, Slots, arrivals
from weft.runtime.arithmetic import cdiv

ITEM = 2  # bytes of fp16 and bf16
# Ranks whose memory a rank's stores reach.
NODE = 8
# Tiles that a GEMM may use, by their number of halvings from 128 x 256.
TILES = ((128, 256, 0), (128, 128, 1), (64, 128, 2))
CHUNKS = (1, 2, 4)
# Columns of the weight in a tile of a grouped GEMM; slabs of a sum over ranks.
GROUPED_COLUMNS, SLABS = 256, 4


def of_shape(costs: Costs, op: str, shape: Sequence[int], world_size: int) -> float:
    """Time of a shape as `weft bench` has it, of one rank; "moe" has the shapes of "ag-moe"."""
    if op == "all-reduce":
        return all_reduce(costs, *shape, world_size)
    if op in ("ag-gemm", "gemm-rs"):
        return (ag_gemm if op == "ag-gemm" else gemm_rs)(costs, *shape, world_size)
    if op == "sharded-decode-attention":
        return decode_attention(costs, *shape[:5], world_size)
    tokens, top, experts, _, hidden, inner, _ = shape
    if op == "grouped-gemm":
        return grouped(costs, tokens, top, experts, 1, hidden, inner)
    if op == "grouped-gemm-silu":
        return grouped(costs, tokens, top, experts, 1, 2 * inner, hidden)
    tokens *= world_size
    if op in ("moe", "ag-moe", "moe-rs"):
        time = {"moe": moe, "ag-moe": ag_moe, "moe-rs": moe_rs}[op]
        return time(costs, tokens, hidden, inner, experts, top, world_size)
    return (moe_dispatch if op == "moe-dispatch" else moe_combine)(costs, tokens, hidden, experts, top, world_size)


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
    return min(_ag_gemm(costs, M, N, K, world_size, chunks) for chunks in CHUNKS)


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


# --- a mixture of experts, decode attention ------------------------------------------------------------------------------


def moe(costs: Costs, tokens: int, hidden: int, inner: int, experts: int, top: int, world_size: int) -> float:
    """Mixture of experts split over ranks: ``ag_moe``, then ``moe_rs``."""
    sizes = costs, tokens, hidden, inner, experts, top, world_size
    return ag_moe(*sizes) + moe_rs(*sizes)


def ag_moe(costs: Costs, tokens: int, hidden: int, inner: int, experts: int, top: int, world_size: int) -> float:
    """Rows of all ranks, and their grouped GEMM with gate and up, rank by rank as rows arrive."""
    work = grouped(costs, tokens, top, experts, world_size, 2 * inner, hidden)
    arrived, clock = _gathered(costs, tokens * hidden * ITEM / world_size, world_size), 0.0
    for time in arrived:
        clock = max(clock, time) + work / len(arrived)
    return clock + (costs.call if world_size > 1 else 0.0)


def moe_rs(costs: Costs, tokens: int, hidden: int, inner: int, experts: int, top: int, world_size: int) -> float:
    """Grouped GEMM with down, summed over choices and ranks; slabs of columns travel meanwhile."""
    work = grouped(costs, tokens, top, experts, world_size, hidden, inner)
    chosen = tokens * top / world_size
    summed = (chosen + tokens) * hidden * ITEM / costs.add
    if world_size == 1:
        return work + summed
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    rows = tokens / world_size * hidden * ITEM
    clock = arrived = costs.call
    engine = CopyEngine(costs.copy, costs.link, costs.flag, clock)
    for _ in range(SLABS):
        clock += (work + summed) / SLABS
        for _ in range(near - 1):
            arrived = engine.send(rows / SLABS, clock)
    far = (nodes - 1) * (costs.rail + rows / costs.rail_link)
    return max(clock, arrived) + (near + 1) * rows / costs.add + far


def moe_dispatch(costs: Costs, tokens: int, hidden: int, experts: int, top: int, world_size: int) -> float:
    """Rows of tokens to the ranks that hold an expert they chose, by stores."""
    return _rows_to_experts(costs, tokens, hidden, top, world_size)


def moe_combine(costs: Costs, tokens: int, hidden: int, experts: int, top: int, world_size: int) -> float:
    """Sums of each rank's experts for a token, back to its rank by stores, and added up there."""
    held = (tokens * top / world_size + tokens * _share(top, world_size)) * hidden * ITEM / costs.add
    return held + _rows_to_experts(costs, tokens, hidden, top, world_size)


def decode_attention(
    costs: Costs, batch: int, q_heads: int, kv_heads: int, dim: int, context: int, world_size: int
) -> float:
    """Attention of new tokens to ``context`` tokens each, spread over the ranks, and the merge."""
    local = costs.attention + 2 * batch * context * kv_heads * dim * ITEM / world_size / costs.cache
    near = min(world_size, NODE)
    part = 4 * batch * q_heads / world_size * (dim + 1)
    near_time = costs.hop + (near - 1) * part / costs.push_link if near > 1 else 0.0
    far = costs.rail + (world_size - near) * part / costs.rail_link if world_size > near else 0.0
    return local + max(near_time, far)


def grouped(costs: Costs, tokens: int, top: int, experts: int, world_size: int, N: int, K: int) -> float:
    """Grouped GEMM [pairs, K] @ [experts / W, N, K] of a rank, where tokens choose at random."""
    held = max(experts // world_size, 1)
    hit = held * (1 - (1 - top / experts) ** tokens)
    pairs = tokens * top * held / experts
    block = block_for(cdiv(tokens * top, experts), 1)
    # Of an expert with more than a block of pairs the last tile is half full in the mean.
    tiles = math.ceil(max(hit, pairs / block + hit / 2)) * cdiv(N, GROUPED_COLUMNS)
    tile = block * GROUPED_COLUMNS * K * costs.mac * costs.expert * 1e-9
    return costs.grouped + max(cdiv(tiles, costs.sms) * tile, hit * N * K * ITEM / costs.weights)


def _share(top: int, world_size: int) -> float:
    """Share of tokens that chose an expert of a rank."""
    return 1 - (1 - 1 / world_size) ** top


def _rows_to_experts(costs: Costs, tokens: int, hidden: int, top: int, world_size: int) -> float:
    """Exchange of the rows that one rank and another have in common, each way of all pairs of ranks."""
    if world_size == 1:
        return 0.0
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    part = tokens / world_size * _share(top, world_size) * hidden * ITEM
    inside = costs.push + costs.hop + (near - 1) * part / costs.push_link
    return inside + (nodes - 1) * (costs.rail + near * part / costs.rail_link)


# --- AG-GEMM ----------------------------------------------------------------------------------------------------------


def _ag_gemm(costs: Costs, M: int, N: int, K: int, world_size: int, chunks: int) -> float:
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    rows, clock, engine_free = M // world_size, costs.call, costs.call
    for node in range(nodes):
        # The rows of each node as they come over the rail, gathered in this one meanwhile.
        ready = costs.call + node * (costs.rail + rows * K * ITEM / costs.rail_link)
        engine = CopyEngine(costs.copy, costs.link, costs.flag, max(engine_free, ready))
        landed = arrivals(engine, [rows * K * ITEM / chunks] * chunks * (near - 1), ready)
        engine_free = landed[-1] if landed else ready
        slots = Slots(costs.sms)
        clock = _piece(costs, slots, rows, N, K, max(clock, ready))
        for time in landed:
            clock = max(clock, _piece(costs, slots, cdiv(rows, chunks), N, K, time))
    return clock


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


def _gathered(costs: Costs, nbytes: float, world_size: int) -> list[float]:
    """Arrivals of the other ranks' shards of ``nbytes`` each; the own one at 0."""
    near, nodes = min(world_size, NODE), cdiv(world_size, NODE)
    engine, ends = CopyEngine(costs.copy, costs.link, costs.flag, 0.0), [0.0]
    for node in range(nodes):
        ready = node * (costs.rail + nbytes / costs.rail_link)
        ends += arrivals(engine, [nbytes] * (near - 1), ready)
    return ends


def _count(tile: tuple[int, int, int], M: int, N: int) -> int:
    return cdiv(M, tile[0]) * cdiv(N, tile[1])

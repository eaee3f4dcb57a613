"""Times of ops on one node, by weft.costs, and on several, whose pieces cross rails meanwhile.

Sizes are as in ``weft bench``: M rows in all, and one rank's share N or K of the weights. All ranks are alike and begin at
once. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.bench.names import OPS
from weft.costs.gpu import named
from weft.costs.predicted import predict
from weft.runtime.arithmetic import cdiv

ITEM = 2  # bytes of fp16 and bf16
# Ranks whose memory a rank's stores reach.
NODE = 8
# Assumed, measured nowhere: µs of a piece between nodes, and bytes per µs of one GPU's rail.
RAIL, RAIL_LINK = 10.0, 50e3
GPU = "h200"


class Time(NamedTuple):
    """µs of a call, and of each design; none over several nodes."""

    us: float
    by_design: Mapping[str, float]


def of_shape(op: str, shape: Sequence[int], world_size: int, gpu: str = GPU) -> Time:
    """Time of a rank's shape as ``weft bench`` has it; "moe" has the shapes of "ag-moe", its first part."""
    if op == "moe":
        return Time(sum(of_shape(part, shape, world_size, gpu).us for part in ("ag-moe", "moe-rs")), {})
    if world_size <= NODE:
        return _near(op, shape, world_size, gpu)
    return Time(_OVER_NODES[op](op, tuple(shape), world_size, gpu), {})


def _near(op: str, shape: Sequence[float], world_size: int, gpu: str) -> Time:
    made = predict(OPS[op], tuple(shape), world_size=world_size, gpu=gpu)
    times = {name: seconds * 1e6 for name, seconds in made.by_design.items() if name}
    return Time(made.seconds * 1e6, times)


def _gathering(op: str, shape: tuple[int, ...], world_size: int, gpu: str) -> float:
    """A node's rows after another's, as they come over the rail."""
    each, piece = _of_a_node(op, shape, world_size, gpu)
    clock = 0.0
    for node in range(cdiv(world_size, NODE)):
        clock = max(clock, node * (RAIL + piece / RAIL_LINK)) + each
    return clock


def _scattering(op: str, shape: tuple[int, ...], world_size: int, gpu: str) -> float:
    """A node's sums after another's, sent over the rail; then the sum over nodes."""
    nodes, (each, piece) = cdiv(world_size, NODE), _of_a_node(op, shape, world_size, gpu)
    clock = rail = 0.0
    for node in range(nodes):
        clock += each
        if node < nodes - 1:
            rail = max(rail, clock) + RAIL + piece / RAIL_LINK
    return max(clock, rail) + nodes * piece / named(gpu).memory


def _of_a_node(op: str, shape: tuple[int, ...], world_size: int, gpu: str) -> tuple[float, float]:
    """(µs of the rows of one node, as a share of the time of all rows; bytes of a rank's rows)."""
    nodes = cdiv(world_size, NODE)
    if op in ("ag-gemm", "gemm-rs"):
        M, N, K = shape[:3]
        return _near(op, shape, NODE, gpu).us / nodes, M / world_size * (K if op == "ag-gemm" else N) * ITEM
    tokens, *rest = shape
    return _near(op, (tokens * nodes, *rest), NODE, gpu).us / nodes, tokens * shape[4] * ITEM


def _all_reduce(op: str, shape: tuple[int, ...], world_size: int, gpu: str) -> float:
    nbytes, nodes = shape[0], cdiv(world_size, NODE)
    return _near(op, shape, NODE, gpu).us + 2 * (nodes - 1) * (RAIL + nbytes / NODE / nodes / RAIL_LINK)


def _exchange(op: str, shape: tuple[int, ...], world_size: int, gpu: str) -> float:
    """Rows to experts, or back, of all pairs of ranks."""
    tokens, top, experts, held, hidden, inner, *_ = shape
    share = 1 - (1 - 1 / world_size) ** top
    far = (cdiv(world_size, NODE) - 1) * (RAIL + NODE * tokens * share * hidden * ITEM / RAIL_LINK)
    return _near(op, shape, NODE, gpu).us + far


def _decode_attention(op: str, shape: tuple[int, ...], world_size: int, gpu: str) -> float:
    """Attention to a share of the cache; outputs to the node's ranks, and over rails to other nodes."""
    batch, q_heads, kv_heads, dim, context = shape[:5]
    near = _near(op, (*shape[:4], context * NODE // world_size), NODE, gpu).us
    local = _near("decode-attention", (batch * kv_heads, max(1, context // world_size), dim), 1, gpu).us
    part = 4 * batch * q_heads / world_size * (dim + 1)
    return max(near, local + RAIL + (world_size - NODE) * part / RAIL_LINK)


_OVER_NODES = {
    "ag-gemm": _gathering, "ag-moe": _gathering, "gemm-rs": _scattering, "moe-rs": _scattering, "all-reduce": _all_reduce,
    "moe-dispatch": _exchange, "moe-combine": _exchange, "sharded-decode-attention": _decode_attention,
}  # fmt: skip

"""Model of GEMMs and of stages over nodes: ``python -m benchmarks.over_nodes`` writes the tables of docs/nodes.md.

Nothing of it was measured over nodes. Within a node it has the rates of weft/bench/harness/limits.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.pages import DOCS, write
from weft.bench.harness.limits import GPUS

LIMITS = GPUS["NVIDIA H200"]
# GPUs of a node; bytes/s of a rail in one direction; seconds until a transfer on it has begun.
NODE_SIZE, RAILS, LATENCY = 8, (50e9, 100e9), 20e-6
NODES = (2, 4, 8)
ITEM = 2  # bytes


class Shape(NamedTuple):
    """Whole GEMM [M, N, K] of one op: N or K is divided among all ranks."""

    name: str
    op: str
    M: int
    N: int
    K: int


SHAPES = (
    Shape("gate and up of Llama 3 70B, 8192 tokens", "ag-gemm", 8192, 57344, 8192),
    Shape("down of Llama 3 70B, 8192 tokens", "gemm-rs", 8192, 8192, 28672),
    Shape("down of Llama 3 70B, 64 tokens", "gemm-ar", 64, 8192, 28672),
)


class Decoder(NamedTuple):
    """Layers of `weights` matrix elements each."""

    name: str
    layers: int
    weights: int
    hidden: int


DECODER = Decoder("Llama 3 70B", 80, 8192 * (2 * (64 + 8) * 128 + 3 * 28672), 8192)
# Bytes of keys and values of a token in a layer: 8 heads of 128, in 16 bits.
TOKEN_BYTES = 2 * ITEM * 8 * 128
# (sequences, cached tokens of each) of decode steps.
BATCHES = ((64, 1024), (64, 8192), (64, 32768))
# (tokens of a pass, True if it is cut into a microbatch for each stage)
PASSES = ((8192, True), (64, False))


class Times(NamedTuple):
    """Microseconds of one call. rails: at each of ``RAILS``."""

    rails: tuple[float, ...]
    node: float
    gemm: float


def modelled(shape: Shape, nodes: int) -> Times:
    """Times of ``shape`` over ``nodes``, each part by itself.

    A shard crosses to each other node once, and goes to the other ranks of a node from there.
    """
    ranks = nodes * NODE_SIZE
    shard = ITEM * shape.M * (shape.K if shape.op == "ag-gemm" else shape.N) // ranks
    trips = 2 if shape.op == "gemm-ar" else 1
    crossing = trips * (nodes - 1) * shard
    within = trips * nodes * (NODE_SIZE - 1) * shard
    flops, weights = 2 * shape.M * shape.N * shape.K / ranks, ITEM * shape.N * shape.K / ranks
    return Times(
        rails=tuple(1e6 * (trips * LATENCY + crossing / rail) for rail in RAILS),
        node=1e6 * (trips * LIMITS.latency + within / LIMITS.link),
        gemm=1e6 * max(flops / LIMITS.flops, weights / LIMITS.memory),
    )


class StageTimes(NamedTuple):
    """Microseconds of a pass whose stages are nodes. rails, layers: of one microbatch. rails: at each of ``RAILS``."""

    microbatches: int
    rails: tuple[float, ...]
    layers: float
    whole: float


def staged(tokens: int, cut: bool, nodes: int) -> StageTimes:
    """Times of a pass of `tokens` tokens, by the GEMMs of its layers alone; ``whole`` at most, with the slower rails.

    Each rail carries 1 / NODE_SIZE of a microbatch's hidden state, while no layer runs at its ends: a turn is a receive, the
    layers, a send.
    """
    microbatches = nodes if cut else 1
    each = tokens / microbatches
    crossing = ITEM * each * DECODER.hidden / NODE_SIZE
    rails = tuple(1e6 * (LATENCY + crossing / rail) for rail in RAILS)
    share = DECODER.weights / NODE_SIZE
    layer = 1e6 * max(2 * each * share / LIMITS.flops, ITEM * share / LIMITS.memory)
    layers = layer * DECODER.layers / nodes
    return StageTimes(microbatches, rails, layers, (microbatches + nodes - 1) * (layers + 2 * rails[0]))


class FlightTimes(NamedTuple):
    """Microseconds of a decode step over stages, at the slower rails. weights, reads: of a stage, once for all sequences.

    one_pass  a stage at a time
    cut       in a microbatch for each stage
    groups    steps that follow each other without a gap (weft.engine.graphs)
    """

    weights: float
    reads: float
    one_pass: float
    cut: float
    groups: float


def in_flight(sequences: int, cached: int, nodes: int) -> FlightTimes:
    """Times of a decode step, by what a stage reads. Each hop is a crossing, of tokens or of a hidden state."""
    layers = DECODER.layers / nodes / NODE_SIZE
    weights = 1e6 * ITEM * DECODER.weights * layers / LIMITS.memory
    reads = 1e6 * sequences * cached * TOKEN_BYTES * layers / LIMITS.memory
    crossing, hops = 1e6 * (LATENCY + ITEM * sequences * DECODER.hidden / NODE_SIZE / RAILS[0]), nodes - 1
    turn = weights + reads / nodes
    return FlightTimes(
        weights=weights,
        reads=reads,
        one_pass=nodes * (weights + reads) + 2 * hops * crossing,
        cut=(2 * nodes - 1) * (turn + 2 * crossing),
        groups=nodes * (turn + 2 * hops * crossing),
    )


def flight_table() -> Iterator[str]:
    """Lines of the table of decode steps over stages."""
    yield from (f"{DECODER.name}, a node a stage, a decode step by what its stages read:", "")
    yield "| sequences, cached tokens of each | nodes | weights | keys and values | as one pass | cut | groups without a gap |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for sequences, cached in BATCHES:
        for nodes in NODES:
            times = " | ".join(f"{us / 1e3:.2f} ms" for us in in_flight(sequences, cached, nodes))
            yield f"| {sequences}, {cached} | {nodes} | {times} |"
    yield ""


def stage_tables(rates: str) -> Iterator[str]:
    """Lines of the tables of stages, one for each pass."""
    for tokens, cut in PASSES:
        yield from (f"{DECODER.name}, a node a stage, {tokens} tokens:", "")
        yield f"| nodes | microbatches | rail at {rates} GB/s a GPU | layers of a stage | all stages | waiting |"
        yield "|---:|---:|---:|---:|---:|---:|"
        for nodes in NODES:
            count, of_rails, layers, whole = staged(tokens, cut, nodes)
            rails = " / ".join(f"{us:.0f}" for us in of_rails)
            waiting = (nodes - 1) / (count + nodes - 1)
            yield f"| {nodes} | {count} | {rails} µs | {layers / 1e3:.2f} ms | {whole / 1e3:.1f} ms | {waiting:.0%} |"
        yield ""


def tables() -> Iterator[str]:
    """Lines of the tables, one for each shape."""
    rates = " / ".join(f"{rail / 1e9:.0f}" for rail in RAILS)
    for shape in SHAPES:
        yield from (f"{shape.op}, {shape.name} (M={shape.M}, N={shape.N}, K={shape.K} in all):", "")
        yield f"| nodes | rail at {rates} GB/s a GPU | within the node | GEMM |"
        yield "|---:|---:|---:|---:|"
        for nodes in NODES:
            times = modelled(shape, nodes)
            rails = " / ".join(f"{us:.0f}" for us in times.rails)
            yield f"| {nodes} | {rails} µs | {times.node:.0f} µs | {times.gemm:.0f} µs |"
        yield ""
    yield from stage_tables(rates)
    yield from flight_table()


if __name__ == "__main__":
    write(DOCS / "nodes.md", {"over_nodes": "\n".join(tables())})
    print("\n".join(tables()))

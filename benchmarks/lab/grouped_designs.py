"""Designs of the two grouped GEMMs of few tokens, in a chain of layers of a mixture of experts on one GPU.

    python -m benchmarks.lab.grouped_designs --out FILE

A layer is add_rms_norm, matmul_route_schedule, grouped_matmul_silu_mul, grouped_matmul and moe_sum, so that each GEMM has
the neighbours that it has in a model. Times are microseconds a layer of a CUDA graph of 12 layers with the weights of three in
turn, more than the L2 holds; the median of 15 replays, designs in turn. The first GEMM's designs run beside the second one's
plan, and the other way round. Printed: with the plan, its rule, and the best design.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Rows, captured
from weft import ops
from weft.ops.local import machine_on
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedCall, GroupedTiles
from weft.ops.moe.grouped.rule import grouped_tiles_for
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL, GROUPED_MATMUL_SILU_MUL
from weft.ops.moe.moe_schedule import block_for
from weft.ops.moe.routing import Experts

# hidden, features, experts in all, those of this rank, choices
SHAPES = {
    "qwen3-30b-a3b, half": (2048, 768, 128, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 128, 8),
    "mixtral-8x7b, half": (4096, 14336, 8, 4, 2),
}
TOKENS = {"mixtral-8x7b, half": (1, 16)}
MOST_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
LAYERS, SETS, REPLAYS, WORKERS = 12, 3, 15, 12
DTYPE = torch.bfloat16


def space(gated: bool) -> list[GroupedTiles]:
    """Designs of tiles of 16 pairs, all of whose programs have room at once or whose stages are few."""
    tiles = ((128, 128), (128, 64), (256, 128)) if gated else ((64, 128), (128, 128), (64, 64))
    found = []
    for (block_n, block_k), (per_sm, stages) in itertools.product(
        tiles, ((1, 4), (2, 4), (2, 3), (3, 3), (3, 2), (4, 2))
    ):
        of_program = stages * (16 + block_n) * block_k * DTYPE.itemsize
        if of_program <= 220 << 10 and per_sm * of_program <= 333 << 10:
            tile = {"block_n": block_n, "block_k": block_k, "num_stages": stages, "per_sm": per_sm}
            found.append(GroupedTiles(transposed=True, num_warps=4, **tile))
    return found


class Chain:
    """Layers of one shape and number of tokens."""

    def __init__(self, shape: str, tokens: int, sets: int) -> None:
        self.hidden, self.features, total, held, self.k = SHAPES[shape]
        device, self.tokens, self.total = "cuda", tokens, total
        torch.manual_seed(0)

        def drawn(*size: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*size, device=device, dtype=DTYPE) * scale

        self.weights = [
            (
                drawn(self.hidden).fill_(1),
                drawn(total, self.hidden, scale=0.05),
                drawn(held, 2 * self.features, self.hidden, scale=0.02),
                drawn(held, self.hidden, self.features, scale=0.02),
            )
            for _ in range(sets)
        ]
        self.experts = Experts(total, 0, held)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self.x, self.residual = drawn(tokens, self.hidden), drawn(tokens, self.hidden)

    def calls(self) -> tuple[GroupedCall, GroupedCall]:
        pairs = self.tokens * self.k
        block = block_for(pairs, self.total)
        first = GroupedCall(block, pairs, self.features, self.hidden, DTYPE, True)
        return first, GroupedCall(block, pairs, self.hidden, self.features, DTYPE, False)

    def plans(self) -> tuple[GroupedTiles, GroupedTiles]:
        machine, (first, second) = machine_on(torch.device("cuda")), self.calls()
        return GROUPED_MATMUL_SILU_MUL.plan(first, machine).design, GROUPED_MATMUL.plan(second, machine).design

    def rules(self) -> tuple[GroupedTiles, GroupedTiles]:
        caps, (first, second) = machine_on(torch.device("cuda")).caps, self.calls()
        return grouped_tiles_for(first, caps, gated=True), grouped_tiles_for(second, caps, gated=False)

    def run(self, designs: tuple[GroupedTiles, GroupedTiles], layers: int) -> torch.Tensor:
        x, residual = self.x, self.residual
        for index in range(layers):
            norm, router, gate_up, down = self.weights[index % len(self.weights)]
            normed, residual = ops.add_rms_norm(x, residual, norm, 1e-6)
            routing, schedule, _ = ops.matmul_route_schedule(normed, router, self.experts, self.k, tickets=self.tickets)
            h = gemms.run(designs[0], GroupedArguments(normed, gate_up, schedule, True, None), gated=True)
            y = gemms.run(designs[1], GroupedArguments(h, down, schedule, False, None))
            x = ops.moe_sum(y, routing, self.experts)
        return x

    def times(self, designs: dict[str, tuple[GroupedTiles, GroupedTiles]]) -> dict[str, float]:
        graphs = {}
        for name, pair in designs.items():
            self.run(pair, 1)
            torch.cuda.synchronize()
            graphs[name] = captured([lambda pair=pair: self.run(pair, LAYERS)])
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _, (name, graph) in itertools.product(range(REPLAYS), graphs.items()):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(1e3 * begin.elapsed_time(end) / LAYERS)
        return {name: round(statistics.median(found), 2) for name, found in samples.items()}


def text(design: GroupedTiles) -> str:
    kind = "transposed " if design.transposed else ""
    of = f"{kind}{design.block_n}x{design.block_k}, {design.num_stages} stages, {design.num_warps} warps"
    return f"{of}, {design.per_sm} an SM, {design.columns} columns"


def designs_of(chain: Chain) -> Iterator[tuple[str, dict[str, tuple[GroupedTiles, GroupedTiles]]]]:
    """(GEMM, pairs of designs by the text of this GEMM's)."""
    first, second = chain.plans()
    rules = chain.rules()
    for gated in (True, False):
        mine = [first if gated else second, rules[0] if gated else rules[1], *space(gated)]
        pairs = {text(design): (design, second) if gated else (first, design) for design in mine}
        yield ("grouped_matmul_silu_mul" if gated else "grouped_matmul"), pairs


def compile_share(worker: int) -> None:
    """Compile one worker's share of all kernels into Triton's cache."""
    for shape in SHAPES:
        for tokens in TOKENS.get(shape, (1, 64)):
            chain = Chain(shape, tokens, 1)
            every = [pair for _, pairs in designs_of(chain) for pair in pairs.values()]
            for pair in every[worker::WORKERS]:
                chain.run(pair, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        return compile_share(asked.worker)
    if asked.out is None:
        parser.error("name the file of the results with --out")
    command = [sys.executable, "-m", "benchmarks.lab.grouped_designs", "--worker"]
    for process in [subprocess.Popen([*command, str(worker)]) for worker in range(WORKERS)]:
        process.wait()
    results = Rows(asked.out)
    for shape in SHAPES:
        for tokens in TOKENS.get(shape, MOST_TOKENS):
            for row in rows_of(shape, tokens):
                results.add(row)


def rows_of(shape: str, tokens: int) -> Iterator[dict[str, Any]]:
    chain = Chain(shape, tokens, SETS)
    plans, rules = chain.plans(), chain.rules()
    for index, (gemm, pairs) in enumerate(designs_of(chain)):
        times = sorted(chain.times(pairs).items(), key=lambda one: one[1])
        us = {name: dict(times)[text(of[index])] for name, of in (("plan", plans), ("rule", rules))}
        row = {"shape": shape, "tokens": tokens, "gemm": gemm, **us, "best": times[0][1], "design": times[0][0]}
        print(row, flush=True)
        yield {**row, "designs": dict(times)}


if __name__ == "__main__":
    main()

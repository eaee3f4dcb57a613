"""cuBLAS's own choice of an algorithm against the fastest that it has, on one GPU: a laboratory.

    python -m benchmarks.lab.cublas --out benchmarks/lab/h200-cublas.json [--world-size 2,4] [--rows 512,4096] \\
        [--ragged] [--tuned weft/ops/tuned]

All projections of Qwen3-32B, as one rank of so many holds them (``--shapes M,N,K``: others). Candidates are those of ``weft
tune gemm``. Each is a CUDA graph of some 4 ms, replayed again and again, all of a shape in random order without a rest: at the
power limit, as the products of a long prefill are. Weights are used in turn, three of each shape. Each answer is checked.

With --tuned the fastest of each shape goes into the data file of the ops in that folder. With --ragged no candidate is
searched: what row_for gives rows between those that were tuned is timed beside cuBLAS's choice.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import weft
from benchmarks.lab.skinny import projections
from weft.bench import machine
from weft.ops import library, tuned
from weft.ops.local import capabilities_of
from weft.runtime import cublaslt
from weft.runtime.cublaslt import Algorithm
from weft.tune import search, spaces

BF16 = torch.bfloat16
COPIES = 3
GRAPH_SECONDS, RATE = 4e-3, 700e12
# Rounds of the search; of the finalists; and how often a graph is replayed in one, of which the first WARM do not count.
FINALISTS, ROUNDS, REPLAYS, WARM = 6, 9, 5, 2
LEAST_GAIN = 0.01


class Product:
    """One shape's operands and graphs."""

    def __init__(self, M: int, N: int, K: int) -> None:
        self.size = M, N, K
        generator = torch.Generator("cuda").manual_seed(0)
        self.a = torch.empty(M, K, dtype=BF16, device="cuda").normal_(generator=generator)
        self.b = [
            torch.empty(N, K, dtype=BF16, device="cuda").normal_(0, K**-0.5, generator=generator) for _ in range(COPIES)
        ]
        self.out = torch.empty(M, N, dtype=BF16, device="cuda")
        self.answer = self.a[:64].float() @ self.b[0].float().T
        self.calls = max(COPIES, int(GRAPH_SECONDS * RATE / (2 * M * N * K)))

    def run(self, number: int, algorithm: Algorithm | None) -> None:
        b = self.b[number % COPIES]
        if algorithm is None:
            torch.mm(self.a, b.T, out=self.out)
        elif not cublaslt.matmul(self.a, b, self.out, algorithm):
            raise ValueError(f"{algorithm} is not here")

    def graph(self, algorithm: Algorithm | None) -> torch.cuda.CUDAGraph:
        self.out.zero_()
        self.run(0, algorithm)
        error = (self.out[:64].float() - self.answer).norm() / self.answer.norm()
        assert error < 3e-3, (self.size, algorithm, error)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(self.calls):
                self.run(number, algorithm)
        return graph

    def us(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Of one call, for each replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        found = []
        for _ in range(replays):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / self.calls)
        return found

    def compare(self, graphs: dict) -> dict[Algorithm | None, float]:
        """Medians, all in turn."""
        times: dict = {key: [] for key in graphs}
        for _ in range(ROUNDS):
            for key in random.sample(list(graphs), len(graphs)):
                times[key] += self.us(graphs[key], REPLAYS)[WARM:]
        return {key: round(statistics.median(found), 2) for key, found in times.items()}


def search_one(product: Product) -> dict:
    """A row of the document: cuBLAS's choice, and the fastest algorithms."""
    M, N, K = product.size
    graphs = {None: product.graph(None)}
    product.us(graphs[None], 10)
    named = cublaslt.algorithms(M, N, K, BF16)
    rough: dict[Algorithm, float] = {}

    def screen(candidates: list[Algorithm]) -> None:
        for algorithm in candidates:
            if algorithm not in rough:
                try:
                    graphs[algorithm] = product.graph(algorithm)
                except ValueError:
                    continue
                rough[algorithm] = min(product.us(graphs[algorithm], 3))

    screen([*named, *spaces.KNOWN_ALGORITHMS])
    for _ in range(2):
        for best in sorted(rough, key=lambda one: rough[one])[:2]:
            screen(spaces.around("gemm", best, 1))
    finalists = sorted(rough, key=lambda one: rough[one])[:FINALISTS]
    times = product.compare({None: graphs[None]} | {one: graphs[one] for one in finalists})
    return {
        "shape": product.size, "cublas_us": times[None], "named": len(named), "tried": len(rough),
        "fastest": sorted(
            ({"us": times[one], **search.fields_of(one)} for one in finalists), key=lambda found: found["us"]
        ),
    }  # fmt: skip


def ragged_one(product: Product) -> dict | None:
    found = library.row_for(*product.size, BF16, capabilities_of(product.a.device))
    if found is None:
        return None
    algorithm = found.row.as_config(Algorithm)
    times = product.compare({one: product.graph(one) for one in (None, algorithm)})
    return {
        "shape": product.size, "of": found.row.shape, "cublas_us": times[None], "fastest": [{"us": times[algorithm]}]
    }  # fmt: skip


def row_of(found: dict, versions: str) -> tuned.Row | None:
    best = dict(found["fastest"][0]) if found["fastest"] else {"us": float("inf")}
    us = best.pop("us")
    if us > found["cublas_us"] * (1 - LEAST_GAIN):
        return None
    return tuned.Row(
        op="matmul", dtype="bfloat16", shape=found["shape"], config=best, us=us, default_us=found["cublas_us"],
        candidates=found["tried"], date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(), versions=versions,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", default="4,2")
    parser.add_argument("--rows", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tuned", type=Path)
    options = parser.parse_args()
    shapes: dict[tuple[int, int, int], str] = {}
    for rows in map(int, options.rows.split(",")):
        for world in map(int, options.world_size.split(",")):
            for name, (N, K, gated) in projections(world).items():
                if not gated:
                    shapes.setdefault((rows, N, K), f"{name} of {world}, {rows} rows")
    if options.shapes:
        shapes = {tuple(map(int, shape.split(","))): shape for shape in options.shapes}
    versions = f"{search.versions_of()}, cuBLAS {cublaslt.version()}"
    head = {
        "command": shlex.join(["python", "-m", "benchmarks.lab.cublas", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "gpu": torch.cuda.get_device_name(),
        "versions": versions, "revision": machine.revision(Path(weft.__file__).parent),
    }  # fmt: skip
    one: Callable[[Product], dict | None] = ragged_one if options.ragged else search_one
    rows_found: list[dict] = []
    torch.cuda.set_stream(torch.cuda.Stream())
    for size, label in shapes.items():
        started = time.perf_counter()
        found = one(Product(*size))
        if found is None:
            print(f"{label}: no row", flush=True)
            continue
        rows_found.append({"label": label, **found, "state": machine.state()})
        best = found["fastest"][0] if found["fastest"] else {"us": float("nan")}
        print(f"{label}: {found['cublas_us']} -> {best} ({best['us'] / found['cublas_us']:.3f}), "
              f"{time.perf_counter() - started:.1f} s", flush=True)  # fmt: skip
        options.out.write_text(json.dumps(head | {"rows": rows_found}, indent=1) + "\n")
    if options.tuned is not None:
        file = tuned.file_for(torch.cuda.get_device_name(), 1, options.tuned)
        table = tuned.read(file) if file.is_file() else tuned.Table(gpu=torch.cuda.get_device_name(), world_size=1)
        tuned.write(file, table.with_rows(row for found in rows_found if (row := row_of(found, versions)) is not None))


if __name__ == "__main__":
    main()

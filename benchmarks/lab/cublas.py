"""cuBLAS's own choice of an algorithm against the fastest that it has, on one GPU: a laboratory.

    python -m benchmarks.lab.cublas --out benchmarks/lab/h100-cublas.json [--world-size 2,4] [--rows 512,4096] \\
        [--ragged] [--tuned weft/plan/tables]

All projections of Qwen3-32B, as one rank of so many holds them (``--shapes M,N,K``: others). Candidates are those of ``weft
tune gemm``, and what lies around the best of them. Each answer is checked, weights are used in turn, three of each shape, and
all of a shape take turns in random order, as CUDA graphs, in two situations:

    us        graphs of some 4 ms again and again without a rest: at the clock that all of them together leave of the power
              limit. What one draws itself, over and over for seconds, is not in it
    burst_us  graphs of some 0.5 ms after a rest of eight times as long: at full clocks, as for a short prompt

With --tuned the best of each shape goes into the data file of the ops in that folder, --again from what an earlier run wrote.
With --ragged no candidate is searched: for rows between those that were tuned, the algorithm of their bucket's row is timed
beside cuBLAS's choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.lab.skinny import projections
from benchmarks.measuring import captured, head
from weft.bench.harness import machine
from weft.ops.gemm import space
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.matmul import MATMUL
from weft.plan import table as tuned
from weft.runtime import cublaslt
from weft.runtime.cublaslt import Algorithm
from weft.runtime.files import put
from weft.tune import search

BF16 = torch.bfloat16
COPIES = 3
# Of a graph at the power limit, and at full clocks with the rest before it.
GRAPH_SECONDS, BURST_SECONDS, REST_SECONDS, RATE = 4e-3, 5e-4, 4e-3, 700e12
# Candidates that are timed in bursts as well: so near to the fastest, and of the first that cuBLAS names so many.
NEAR, NAMED = 1.06, 6
# Of the finalists, by either time; rounds; and how often a graph is replayed in one, of which the first WARM do not count.
FINALISTS, ROUNDS, REPLAYS, WARM = 5, 9, 5, 2
# A row must gain as much, as the geometric mean of both situations, and in neither lose more than is noise. Less is not found
# again in an overlapped op: GEMM-RS 8192x5120x4096 of two ranks took 560 us by an algorithm that gains 1.1 % here, 540 without.
LEAST_GAIN, NOISE = 0.015, 0.004


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
        self.flop = 2 * M * N * K

    def run(self, number: int, algorithm: Algorithm | None) -> None:
        b = self.b[number % COPIES]
        if algorithm is None:
            torch.mm(self.a, b.T, out=self.out)
        elif not cublaslt.matmul(self.a, b, self.out, algorithm):
            raise ValueError(f"{algorithm} is not here")

    def graph(self, algorithm: Algorithm | None, seconds: float = GRAPH_SECONDS) -> Graph:
        self.out.zero_()
        self.run(0, algorithm)
        error = (self.out[:64].float() - self.answer).norm() / self.answer.norm()
        assert error < 3e-3, (self.size, algorithm, error)
        calls = max(COPIES, int(seconds * RATE / self.flop))
        return Graph(captured(partial(self.run, number, algorithm) for number in range(calls)), calls)


@dataclasses.dataclass
class Graph:
    graph: torch.cuda.CUDAGraph
    calls: int

    def us(self, replays: int, rest: float = 0.0) -> list[float]:
        """Of one call, for each replay, ``rest`` seconds after the one before."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        found = []
        for _ in range(replays):
            time.sleep(rest)
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / self.calls)
        return found


Times = dict[Algorithm | None, float]


def at_the_limit(graphs: dict[Algorithm | None, Graph]) -> Times:
    """Medians, all in turn."""
    times: dict = {key: [] for key in graphs}
    for _ in range(ROUNDS):
        for key in random.sample(list(graphs), len(graphs)):
            times[key] += graphs[key].us(REPLAYS)[WARM:]
    return {key: round(statistics.median(found), 2) for key, found in times.items()}


def in_bursts(graphs: dict[Algorithm | None, Graph], rounds: int = ROUNDS) -> Times:
    times: dict = {key: [] for key in graphs}
    for _ in range(rounds):
        for key in random.sample(list(graphs), len(graphs)):
            times[key] += graphs[key].us(1, REST_SECONDS)
    return {key: round(statistics.median(found), 2) for key, found in times.items()}


def search_one(product: Product) -> dict:
    """A row of the document: cuBLAS's choice, and the fastest algorithms."""
    M, N, K = product.size
    graphs: dict[Algorithm | None, Graph] = {None: product.graph(None)}
    graphs[None].us(10)
    named = cublaslt.algorithms(M, N, K, BF16)
    rough: dict[Algorithm, float] = {}

    def screen(candidates: list[Algorithm]) -> None:
        for algorithm in candidates:
            if algorithm not in rough:
                try:
                    graphs[algorithm] = product.graph(algorithm)
                except ValueError:
                    continue
                rough[algorithm] = min(graphs[algorithm].us(3))

    def fastest(times: dict[Algorithm, float]) -> list[Algorithm]:
        return sorted(times, key=lambda one: times[one])

    screen([*named, *space.KNOWN_ALGORITHMS])
    for _ in range(2):
        for best in fastest(rough)[:2]:
            screen([design.algorithm for design in space.algorithms_around(Cublas(algorithm=best))])
    near = [one for one in rough if rough[one] < NEAR * min(rough.values())] + named[:NAMED]
    bursts = {one: product.graph(one, BURST_SECONDS) for one in (None, *near)}
    rough_bursts = in_bursts(bursts, 3)
    del rough_bursts[None]
    finalists = dict.fromkeys((None, *fastest(rough)[:FINALISTS], *fastest(rough_bursts)[:FINALISTS]))
    us = at_the_limit({one: graphs[one] for one in finalists})
    burst_us = in_bursts({one: bursts.get(one) or product.graph(one, BURST_SECONDS) for one in finalists})
    return described(product, us, burst_us) | {"named": len(named), "tried": len(rough)}


def ragged_one(product: Product) -> dict | None:
    M, N, K = product.size
    files = tuned.files_for(torch.cuda.get_device_name(), 1)
    shape = (*tuned.bucket(product.size)[:1], N, K)
    rows = [row for file in files for row in tuned.read(file).rows if (row.shape, row.design) == (shape, tuned.EXACT)]
    if not rows or rows[0].shape[0] == M:
        return None
    both = (None, rows[0].as_design(MATMUL.designs).algorithm)
    us, burst_us = (
        time_all({one: product.graph(one, seconds) for one in both})
        for time_all, seconds in ((at_the_limit, GRAPH_SECONDS), (in_bursts, BURST_SECONDS))
    )
    return described(product, us, burst_us) | {"row": rows[0].shape}


def described(product: Product, us: Times, burst_us: Times) -> dict:
    found = [{"us": us[one], "burst_us": burst_us[one], **dataclasses.asdict(one)} for one in us if one is not None]
    return {"shape": product.size, "cublas_us": us[None], "cublas_burst_us": burst_us[None], "candidates": found}


def chosen(found: dict) -> dict | None:
    """The candidate that is worth a row."""

    def shares(one: dict) -> tuple[float, float]:
        return one["us"] / found["cublas_us"], one["burst_us"] / found["cublas_burst_us"]

    safe = [one for one in found["candidates"] if max(shares(one)) <= 1 + NOISE]
    best = min(safe, key=lambda one: math.prod(shares(one)), default=None)
    return best if best and math.sqrt(math.prod(shares(best))) <= 1 - LEAST_GAIN else None


def rows_of(document: dict) -> Iterator[tuned.Row]:
    for found in document["rows"]:
        if (best := chosen(found)) is not None:
            yield tuned.Row(
                op="matmul", dtype="bfloat16", shape=tuple(found["shape"]), us=best["us"], default_us=found["cublas_us"],
                design="cublas", config={"algorithm": {name: best[name] for name in Algorithm.__dataclass_fields__}},
                candidates=found["tried"], date=document["date"], versions=document["versions"],
            )  # fmt: skip


def save(document: dict, folder: Path) -> None:
    """Rows of the shapes of ``document`` take the place of those that were there."""
    file = tuned.file_for(document["gpu"], 1, folder)
    table = tuned.read(file) if file.is_file() else tuned.Table(gpu=document["gpu"], world_size=1)
    measured = {tuple(found["shape"]) for found in document["rows"]}
    kept = [row for row in table.rows if (row.op, row.design) != ("matmul", "cublas") or row.shape not in measured]
    table = dataclasses.replace(table, rows=tuple(kept))
    tuned.write(file, table.with_rows(rows_of(document)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", default="4,2")
    parser.add_argument("--rows", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="choose from what --out holds, and measure nothing")
    parser.add_argument("--tuned", type=Path)
    options = parser.parse_args()
    if options.again:
        save(json.loads(options.out.read_text()), options.tuned)
        return
    shapes: dict[tuple[int, int, int], str] = {}
    for rows in map(int, options.rows.split(",")):
        for world in map(int, options.world_size.split(",")):
            for name, (N, K, gated) in projections(world).items():
                if not gated:
                    shapes.setdefault((rows, N, K), f"{name} of {world}, {rows} rows")
    if options.shapes:
        shapes = {tuple(map(int, shape.split(","))): shape for shape in options.shapes}
    versions = f"{search.versions_of()}, cuBLAS {cublaslt.version()}"
    about = head(versions=versions)
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
        best = chosen(found)
        shown = best or found["candidates"][0]
        print(f"{label}: {found['cublas_us']} ({found['cublas_burst_us']}) -> {'chosen' if best else 'not chosen'} {shown}: "
              f"{shown['us'] / found['cublas_us']:.3f} ({shown['burst_us'] / found['cublas_burst_us']:.3f}), "
              f"{time.perf_counter() - started:.1f} s", flush=True)  # fmt: skip
        put(options.out, json.dumps(about | {"rows": rows_found}, indent=1) + "\n")
    if options.tuned is not None:
        save(about | {"rows": rows_found}, options.tuned)


if __name__ == "__main__":
    main()

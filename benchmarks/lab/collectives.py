"""Designs of the collectives against each other, for the tables of weft/ops/collectives/collective.py.

    python -m benchmarks.lab.collectives --world-size 4 --out benchmarks/lab/h200-x4-collectives.json [--ops all_reduce,…]

µs of one call, many in a row in a CUDA graph over inputs in turn (what a decode step does, and nothing of the launch of
the graph in it), bf16, the maximum over the ranks of the median of the replays. ``--compile 3/8`` only compiles every
eighth candidate, so that several processes can fill Triton's cache first.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.measuring import head
from weft.bench.harness.compiling import compile_only
from weft.ops import barrier
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM
from weft.ops.collectives.collective import CollectiveCall
from weft.ops.collectives.copy_engine import CopyEngine
from weft.ops.op import find_op
from weft.runtime.files import put
from weft.transport.plans import PushPlan

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "all_reduce": (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "all_gather": (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "reduce_scatter": (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "all_to_all": (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
# row_bytes, num_warps, programs_per_sm
SMALL = ((512, 1, 32), (1024, 1, 32), (1024, 2, 32), (2048, 2, 16))
LARGE = (
    (512, 1, 32), (1024, 2, 16), (2048, 2, 16), (2048, 4, 4), (4096, 4, 4), (4096, 4, 2), (4096, 8, 4), (4096, 8, 2),
    (4096, 8, 1), (4096, 16, 1), (4096, 16, 2), (8192, 8, 1), (8192, 8, 2), (8192, 16, 1), (8192, 16, 2),
)  # fmt: skip
# all_reduce_rms_norm: rows of 5120 elements; bytes of a part, warps of a program
HIDDEN = 5120
ROWS = (1, 7, 32, 128)
PARTS = ((512, 1), (1024, 1), (1024, 2), (2048, 2), (2048, 4), (5120, 8))
# The pieces of copy engines, the programs beside them, and the bytes from which on they are tried.
PIECES = ((1,), (1, 1), (3, 1), (7, 1), (12, 3, 1), (1, 1, 1, 1))
COPY_PROGRAMS = (64, 132)
COPIED = 16 * MIB
INPUTS = 4
REPLAYS = 5


def candidates(op: str, nbytes: int, world_size: int) -> list[Any]:
    found = find_op(op)
    given = CollectiveCall(nbytes // world_size if found.gathers else nbytes, torch.bfloat16)
    transport = found.transport(given, world_size)
    names = [name for name in found.designs if name not in ("copy", "copy_engine")]
    if "one_shot" in names and nbytes < 64 * KIB:
        names = ["one_shot"]
    elif "one_shot" in names and nbytes > 4 * MIB and world_size > 2:
        names = ["two_shot"]
    copies = PIECES if nbytes >= COPIED else ()
    return [CopyEngine(pieces=pieces, programs=programs) for pieces in copies for programs in COPY_PROGRAMS] + [
        found.designs[name](push=PushPlan(transport=transport, row_bytes=row, num_warps=warps, programs_per_sm=per_sm))
        for name in names
        for row, warps, per_sm in (SMALL if nbytes <= 256 * KIB else LARGE)
    ]


def call(op: str, team: Any, design: Any, x: torch.Tensor) -> torch.Tensor:
    return find_op(op).run(design, team, x)


def inputs_of(op: str, nbytes: int, team: Any) -> list[torch.Tensor]:
    """``nbytes``: of all parts together."""
    elements = nbytes // 2 // (team.size if op == "all_gather" else 1)
    shape = (elements,) if op in ("all_reduce", "all_gather") else (team.size, elements // team.size)
    return [torch.randn(shape, device=team.device, dtype=torch.bfloat16) for _ in range(INPUTS)]


def norm_rows(team: Any, share: tuple[int, int] | None) -> list[dict[str, Any]]:
    """Rows of all_reduce_rms_norm: the design, how a row is cut, and the warps of a program."""
    rows, number = [], 0
    weight = torch.ones(HIDDEN, device=team.device, dtype=torch.bfloat16)
    for count in ROWS:
        xs = [torch.randn(count, HIDDEN, device=team.device, dtype=torch.bfloat16) for _ in range(INPUTS)]
        for name in ("one_shot", "two_shot"):
            kind = ALL_REDUCE_RMS_NORM.designs[name]
            for part, warps in PARTS:
                plan = PushPlan(
                    transport="lamport", row_bytes=part, num_warps=warps, programs_per_sm=max(1, 16 // warps)
                )
                run = functools.partial(normed, kind(push=plan), team, xs[0], weight)
                number += 1
                if share is not None:
                    if number % share[1] == share[0]:
                        compile_only(functools.partial(run, xs[0]), team)
                    continue
                us = timed(run, xs, team, 100)
                shape = [plan.row_bytes, plan.num_warps, plan.programs_per_sm]
                found = {"op": "all_reduce_rms_norm", "bytes": xs[0].nbytes, "algorithm": name, "plan": shape}
                rows.append(found | {"us": round(us, 2)})
        if team.rank == 0 and share is None:
            told = "  ".join(
                f"{r['algorithm'][:3]} {r['plan'][0]}x{r['plan'][1]} {r['us']}" for r in rows[-2 * len(PARTS) :]
            )
            print(f"all_reduce_rms_norm {count}x{HIDDEN}  {told}", flush=True)
    return rows


def normed(design: Any, team: Any, residual: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> Any:
    return ALL_REDUCE_RMS_NORM.run(design, team, x, residual, weight, 1e-6)


def timed(run: Callable[[torch.Tensor], Any], xs: list[torch.Tensor], team: Any, calls: int) -> float:
    for x in xs[:2]:
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        barrier(team)
        start.record()
        for number in range(calls):
            run(xs[number % INPUTS])
        end.record()
    times = []
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    graph.reset()
    return max(team.exchange(statistics.median(times)))


def main(team: Any, ops: list[str], share: tuple[int, int] | None) -> list[dict[str, Any]]:
    rows, number = [], 0
    for op in ops:
        if op == "all_reduce_rms_norm":
            rows += norm_rows(team, share)
            continue
        for nbytes in SIZES[op]:
            xs = inputs_of(op, nbytes, team)
            guess = 3 + nbytes / 2e5
            calls = int(max(8, min(100, 1500 / guess)))
            for design in candidates(op, nbytes, team.size):
                number += 1
                if isinstance(design, CopyEngine):
                    shape = [*design.pieces, design.programs]
                else:
                    shape = [design.push.row_bytes, design.push.num_warps, design.push.programs_per_sm]
                run = functools.partial(call, op, team, design)
                if share is not None:
                    if number % share[1] == share[0]:
                        compile_only(functools.partial(run, xs[0]), team)
                    continue
                us = timed(run, xs, team, calls)
                name = find_op(op).name_of(design)
                rows.append({"op": op, "bytes": nbytes, "algorithm": name, "plan": shape, "us": round(us, 2)})
            if team.rank == 0 and share is None:
                best = sorted((row for row in rows if (row["op"], row["bytes"]) == (op, nbytes)), key=lambda r: r["us"])
                told = "  ".join(f"{r['algorithm'][:3]} {'x'.join(map(str, r['plan']))} {r['us']}" for r in best[:4])
                print(f"{op:15} {nbytes // KIB:7} KiB  {told}  … {best[-1]['us']}", flush=True)
    return rows


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ops", default=",".join([*SIZES, "all_reduce_rms_norm"]))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", metavar="I/N")
    options = parser.parse_args()
    share = None
    if options.compile:
        index, count = options.compile.split("/")
        share = (int(index) % int(count), int(count))
    started = time.perf_counter()
    ops = options.ops.split(",")
    rows = weft.launch(main, options.world_size, "cuda", args=(ops, share), heap_bytes=8 << 30)[0]
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s")
    if options.out and rows:
        where = head(world_size=options.world_size, unit="us")
        put(options.out, json.dumps({"where": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    command()

"""Microseconds of calls of ops without and within a trace, eager and in CUDA graphs of several.

    python -m benchmarks.trace_cost --world-size 2 --json RUNS/trace.json
    python -m benchmarks.trace_cost --world-size 2 --device sim --ops all-reduce   # a dry run, in times of no meaning

A call in brackets: of the host. Graphs are captured on the side of the trace that they are timed on, so those within it have
records. Rings hold a program's last 512 records; older ones are lost, which costs no time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.doors.timing import captured, in_a_row, tell, write
from weft.bench.harness.machine import check_clean

WAYS = "untraced", "traced"


def calls_of(team: weft.Team, ops: list[str]) -> dict[str, Callable[[], object]]:
    """Calls by what they compute: Qwen3-32B's gate and up and its down, and sums of two sizes; small ones on virtual ranks."""
    tokens, hidden, features, sizes = 4096, 5120, 51200, (64 << 10, 16 << 20)
    if team.is_simulated:
        tokens, hidden, features, sizes = 32, 32, 64, (1 << 10,)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=team.device)

    share = features // team.size
    a, b = random(tokens // team.size, hidden), random(share, hidden)
    c, d = random(tokens, share // 2), random(hidden, share // 2)
    sums = {f"all-reduce, {size >> 10} KiB": random(size // 2) for size in sizes}
    calls: dict[str, Callable[[], object]] = {
        f"ag-gemm {tokens}x{features}x{hidden}": lambda: weft.ops.all_gather_matmul(a, b, team),
        f"gemm-rs {tokens}x{hidden}x{features // 2}": lambda: weft.ops.matmul_reduce_scatter(c, d, team),
        **{name: lambda x=x: weft.ops.all_reduce(x, team) for name, x in sums.items()},
    }
    return {name: call for name, call in calls.items() if name.startswith(tuple(ops))}


def timed(team: weft.Team, calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, float] | None]:
    rounds = {"calls": 1, "rounds": 1} if team.is_simulated else {}
    eager = {f"{name}, eager": in_a_row(team, call, **rounds) for name, call in calls.items()}
    return eager | {f"{name}, graph": captured(team, call) for name, call in calls.items()}


def main(team: weft.Team, ops: list[str], file: Path | None) -> list[dict[str, Any]]:
    calls = calls_of(team, ops)
    untraced = timed(team, calls)
    with tempfile.TemporaryDirectory() as folder, weft.trace(Path(folder) / "trace.json", team):
        traced = timed(team, calls)
    rows = [{"what": name, "untraced": untraced[name], "traced": traced[name]} for name in untraced]
    if team.rank == 0:
        print(tell("µs a call", rows, WAYS), flush=True)
    write(file, team, "trace", rows)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--ops", default="ag-gemm,gemm-rs,all-reduce", help="of these, with commas between")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    check_clean("--json", chosen.json)
    weft.launch(main, chosen.world_size, chosen.device, args=(chosen.ops.split(","), chosen.json))

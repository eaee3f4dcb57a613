"""Host time of eager calls: microseconds in which Python, torch and Triton submit a call's work.

    python -m benchmarks.lab.host_time --world-size 2 --out FILE [--only all_reduce,barrier] [--profile all_reduce]

The median over CALLS calls, each timed alone and none waited for, and its 10th and 90th percentile, of the rank where the
median is highest; "torch add" shows how fast the host is. --share-gpus lets the ranks share one GPU: the host is the same, and
a GPU that falls behind does not hold up a median. --profile NAME prints in which functions rank 0 spends a row's time.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.measuring import head
from weft import ops
from weft.runtime.files import put

CALLS, WARM_UP, AT_ONCE = 200, 20, 20
HIDDEN = 5120


def calls_of(team: Any) -> dict[str, Callable[[], Any]]:
    """The calls by their rows' names; GEMMs are those of Qwen3-32B on two GPUs."""

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=team.device, dtype=torch.bfloat16)

    message, rows, weight = x(32 << 10), x(16, HIDDEN), x(HIDDEN)
    shard, whole = x(1024 // team.size, HIDDEN), x(1024, 12800)
    qkv, down = x(HIDDEN, HIDDEN), x(HIDDEN, 12800)
    parts = message[:32760].view(team.size, -1)  # divisible by every number of ranks up to 8
    return {
        "torch add": functools.partial(torch.add, message, message),
        "all_reduce 64 KiB": functools.partial(ops.all_reduce, message, team),
        "all_gather 64 KiB": functools.partial(ops.all_gather, message, team),
        "reduce_scatter 64 KiB": functools.partial(ops.reduce_scatter, parts, team),
        "all_to_all 64 KiB": functools.partial(ops.all_to_all, parts, team),
        "all_reduce_rms_norm 16 rows": functools.partial(ops.all_reduce_rms_norm, rows, rows, weight, 1e-6, team),
        "barrier": functools.partial(ops.barrier, team),
        "add_rms_norm 16 rows": functools.partial(ops.add_rms_norm, rows, rows, weight, 1e-6),
        "silu_mul 16 rows": functools.partial(ops.silu_mul, rows),
        "matmul 16 rows": functools.partial(ops.matmul, rows, qkv),
        "all_gather_matmul qkv M=1024": functools.partial(ops.all_gather_matmul, shard, qkv, team),
        "matmul_reduce_scatter down M=1024": functools.partial(ops.matmul_reduce_scatter, whole, down, team),
        "matmul_all_reduce down M=1024": functools.partial(ops.matmul_all_reduce, whole, down, team),
    }


def times(call: Callable[[], Any], team: Any) -> list[float]:
    """Microseconds of each call. The queue of the GPU holds about 1,000 launches: it is emptied between a few calls."""
    for _ in range(WARM_UP):
        call()
    found = []
    for number in range(CALLS):
        if number % AT_ONCE == 0:
            team.barrier()
        begin = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - begin) / 1e3)
    team.barrier()
    return found


def profile(call: Callable[[], Any], team: Any) -> None:
    """Print the functions in which rank 0 spends most of its own time."""
    profiler = cProfile.Profile()
    for _ in range(CALLS // AT_ONCE):
        team.barrier()
        with profiler:
            for _ in range(AT_ONCE):
                call()
    team.barrier()
    if team.rank == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main(team: Any, only: list[str], profiled: str) -> list[dict[str, Any]]:
    found = []
    for name, call in calls_of(team).items():
        if not name.startswith(tuple(only)):
            continue
        deciles = statistics.quantiles(times(call, team), n=10)
        row = max(team.exchange([deciles[4], deciles[0], deciles[8]]))
        found.append({"call": name} | dict(zip(("us", "p10", "p90"), (round(us, 2) for us in row), strict=True)))
        if team.rank == 0:
            print(f"{name:36} {row[0]:7.1f} us   {row[1]:.1f}–{row[2]:.1f}", flush=True)
        if profiled and name.startswith(profiled):
            profile(call, team)
    return found


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--share-gpus", action="store_true")
    parser.add_argument("--only", default="", help="rows whose names begin with one of these, between commas")
    parser.add_argument("--profile", metavar="NAME", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arguments = options.only.split(","), options.profile
    rows = weft.launch(main, options.world_size, "cuda", args=arguments, share_gpus=options.share_gpus)[0]
    if options.out:
        where = head(world_size=options.world_size, share_gpus=options.share_gpus, unit="us")
        put(options.out, json.dumps({"where": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    command()

"""Cost of checking, in CPU seconds of one schedule: ``python benchmarks/check_cost.py [--json FILE]``.

Equal calls and seeds with and without the observer; the minimum of several runs. Peak memory is the process's, after each row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import weft
from weft import ops
from weft.bench.harness.machine import check_clean, revision
from weft.check.detector.detector import Detector
from weft.ops.gemm.tile import Tile
from weft.ops.overlap.fused_reduce import Fused
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.runtime.files import put

RUNS = 3
WORLD_SIZE = 4


def scattered_gemm(team: Any) -> torch.Tensor:
    """8 x 8 tiles of 64 x 64, K = 256."""
    design = Fused(tile=Tile(block_m=64, block_n=64, block_k=64))
    a, b = torch.ones(512, 256).bfloat16(), torch.ones(512, 256).bfloat16()
    return MATMUL_REDUCE_SCATTER.run(design, team, a, b)


def collectives(team: Any) -> list[torch.Tensor]:
    x = torch.ones(team.size * 512).bfloat16()
    return [ops.all_reduce(x, team, "one_shot"), ops.all_reduce(x, team, "two_shot"), ops.all_gather(x, team)]


def reduced_gemm(team: Any) -> torch.Tensor:
    return ops.matmul_all_reduce(torch.ones(128, 64).bfloat16(), torch.ones(128, 64).bfloat16(), team)


def seconds(main: Callable[[Any], Any], checked: bool) -> float:
    def prepare(machine: Any) -> None:
        if checked:
            machine.observer = Detector(machine)

    started = time.process_time()
    weft.simulate(main, WORLD_SIZE, prepare=prepare)
    return time.process_time() - started


def measure(main: Callable[[Any], Any]) -> dict[str, Any]:
    seconds(main, False)
    plain = min(seconds(main, False) for _ in range(RUNS))
    checked = min(seconds(main, True) for _ in range(RUNS))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"plain_s": plain, "watched_s": checked, "ratio": checked / plain, "peak_mib": peak}


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    check_clean("--json", chosen.json)
    torch.set_num_threads(1)
    rows = {}
    for main in (scattered_gemm, reduced_gemm, collectives):
        row = rows[main.__name__] = measure(main)
        print(
            f"{main.__name__:14} W={WORLD_SIZE}  plain {row['plain_s']:.2f} s, checked {row['watched_s']:.2f} s, "
            f"{row['ratio']:.1f} x, peak {row['peak_mib']:.0f} MiB"
        )
    if chosen.json:
        document = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "revision": revision(Path(weft.__file__).parent),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
            "rows": rows,
        }
        put(chosen.json, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    command()

"""Command line and measurement that the examples share.

python examples/NAME.py                 checks the answer, on all GPUs, or on four virtual ranks if there are none
python examples/NAME.py --bench [FILE]  times it in CUDA graphs beside torch and NCCL, in turns, and writes the times as JSON
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import weft
from weft.bench.harness.meters import GraphMeter, HostMeter, finish, spread
from weft.bench.harness.provider import Prepared

CALLS, ROUNDS = 10, 20


def run(main: Callable[..., Any]) -> None:
    """``main(team, bench)`` on every rank, and what rank 0 says: "right", or times of ``compare``."""
    parser = argparse.ArgumentParser(description="Check an example on all GPUs, or on virtual ranks.")
    parser.add_argument(
        "--bench", nargs="?", const="", metavar="FILE", help="measure too; write the times to FILE as JSON"
    )
    file = parser.parse_args().bench
    found = weft.launch(main, args=(file is not None,))[0]
    print(found if isinstance(found, str) else ", ".join(f"{name} {us:.1f} µs" for name, us in found.items()))
    if file:
        Path(file).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(team: weft.Team, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each call, on the slowest rank; all take turns. Of virtual ranks they mean nothing."""
    meter = HostMeter if team.is_simulated else GraphMeter
    for call in calls.values():
        call()
    team.barrier()
    meters = {
        name: meter(team, Prepared(run=lambda _, call=call: call()), range(CALLS)) for name, call in calls.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 if team.is_simulated else ROUNDS):
        for name, one in meters.items():
            one.replay()
            finish(team, name)
            samples[name] += one.samples()
    return {name: max(team.exchange(spread(found).median)) for name, found in samples.items()}

"""What the power limit takes from a long prefill, on one GPU: a laboratory.

    python -m benchmarks.lab.power --out benchmarks/lab/h200-power.json

The matrix products of Qwen3-32B as one of four ranks holds them, 4096 tokens, cuBLAS alone, in CUDA graphs: one layer by
itself, 64 layers after a rest, and 64 layers again and again, as a benchmark replays a whole model; and what nvidia-smi reads
meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.lab.skinny import projections
from weft.runtime.files import put

TOKENS, LAYERS, WORLD_SIZE = 4096, 64, 4
BF16 = torch.bfloat16
WATCHED = "clocks.sm,power.draw,power.limit,clocks_event_reasons.sw_power_cap,temperature.gpu"


class Layers:
    """LAYERS times the products' weights, and what they are multiplied with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shapes = {name: size[:2] for name, size in projections(WORLD_SIZE).items() if not size[2]}
        self.inputs = {name: torch.randn(TOKENS, K, dtype=BF16, device="cuda") for name, (_, K) in shapes.items()}
        self.outputs = {name: torch.empty(TOKENS, N, dtype=BF16, device="cuda") for name, (N, _) in shapes.items()}
        self.weights = [
            {name: torch.randn(N, K, dtype=BF16, device="cuda").mul_(K**-0.5) for name, (N, K) in shapes.items()}
            for _ in range(LAYERS)
        ]
        self.run(1)  # cuBLAS is loaded before the first capture
        torch.cuda.synchronize()

    def run(self, layers: int) -> None:
        for weights in self.weights[:layers]:
            for name, weight in weights.items():
                torch.mm(self.inputs[name], weight.T, out=self.outputs[name])

    def graph(self, layers: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(layers)
        graph.replay()
        torch.cuda.synchronize()
        return graph


def us_a_layer(graph: torch.cuda.CUDAGraph, layers: int, replays: int, rest: float) -> list[float]:
    """Of each replay, ``rest`` seconds after the one before."""
    found = []
    for _ in range(replays):
        time.sleep(rest)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(round(start.elapsed_time(end) * 1e3 / layers, 1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = Layers()
    one, all_layers = model.graph(1), model.graph(LAYERS)
    found = {
        "where": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "date": datetime.date.today().isoformat(),
            "command": "python -m benchmarks.lab.power --out benchmarks/lab/h200-power.json",
        },
        "unit": "microseconds a layer",
        "one layer, 0.2 s of rest before": us_a_layer(one, 1, 12, 0.2),
        "64 layers, 0.5 s of rest before": us_a_layer(all_layers, LAYERS, 8, 0.5),
    }
    command = ["nvidia-smi", f"--query-gpu={WATCHED}", "--format=csv,noheader", "--loop-ms=100", "--id=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        found["64 layers, again and again"] = us_a_layer(all_layers, LAYERS, 40, 0.0)
        watcher.terminate()
        found[f"nvidia-smi meanwhile: {WATCHED}"] = watcher.stdout.read().splitlines() if watcher.stdout else []
    put(options.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

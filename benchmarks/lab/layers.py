"""A step of a Qwen3-32B of few layers, with norms factored or not, side by side on all GPUs: a laboratory.

    python -m benchmarks.lab.layers --out benchmarks/lab/h200-x4-layers.json [--world-size 4] [--layers 24]

Random weights, head and greedy choice included. A step is a CUDA graph; a time is that of one of several replays in a row,
the maximum over the ranks of the median, plans in random order.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton

import weft
from weft import ops
from weft.layers import Step
from weft.models.config import Qwen3Config
from weft.models.qwen3 import Qwen3ForCausalLM

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Decoding steps: sequences, and tokens before the new one. Prompts: how many, of so many tokens.
DECODE = ((1, 128), (8, 128), (32, 1024), (64, 128), (128, 128), (256, 128), (512, 128))
PREFILL = ((1, 128), (1, 256), (1, 512))
PAGE, ROUNDS, IN_A_ROW = 64, 10, 8


def measure(model: Qwen3ForCausalLM, kind: str, batch: int, length: int) -> dict[str, object]:
    team = model.team
    each, drawn = -(-(length + 1) // PAGE), torch.Generator().manual_seed(1)
    cache = model.new_cache(1 + batch * each, PAGE)
    pages = 1 + torch.arange(batch * each, dtype=torch.int32, device=team.device).view(batch, each)
    count = batch * (length if kind == "prefill" else 1)
    tokens = torch.randint(model.config.vocab_size, (count,), generator=drawn).to(team.device)
    positions, last = torch.full((batch,), length, device=team.device), None
    plan = model.plan(count)
    steps, graphs, held = {}, {}, []
    for name, factored in (("whole", False), ("factored", True)):
        chosen = replace(plan, factored=factored)
        if kind == "prefill":
            steps[name] = Step.prefill([(0, length)] * batch, pages, PAGE, model.angles, chosen)
            last = torch.arange(1, batch + 1, device=team.device) * length - 1

        def forward(name=name, chosen=chosen, last=last):
            step = steps.get(name)
            if step is None:
                heads = model.layers[0].self_attn.num_kv_heads
                step = Step.decode(positions, pages, PAGE, model.angles, chosen, heads)
            return model.lm_head.argmax(model(tokens, step, cache, last))

        forward()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            held.append(forward())
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order = random.Random(1)
    for _ in range(ROUNDS):
        for name in order.sample(list(graphs), len(graphs)):
            ops.barrier(team)
            graphs[name].replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(IN_A_ROW):
                graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / IN_A_ROW)
    ms = {name: max(team.exchange(statistics.median(found))) for name, found in times.items()}
    saved = (ms["whole"] - ms["factored"]) / len(model.layers) * 1e3
    return {
        "kind": kind, "batch": batch, "length": length, "ms": {name: round(time, 3) for name, time in ms.items()},
        "saved_us_a_layer": round(saved, 2),
    }  # fmt: skip


def main(team: Team, layers: int) -> list[dict[str, object]]:
    config = replace(Qwen3Config.named("qwen3-32b"), num_hidden_layers=layers)
    model = Qwen3ForCausalLM(config, team, mode="gemm_ar").fill_dummy()
    cases = [("decode", *case) for case in DECODE] + [("prefill", *case) for case in PREFILL]
    return [measure(model, *case) for case in cases]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    asked = parser.parse_args()
    document = {
        "gpu": torch.cuda.get_device_name(), "world_size": asked.world_size, "layers": asked.layers,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.lab.layers", *sys.argv[1:]]),
        "rows": weft.launch(main, asked.world_size, "cuda", args=(asked.layers,))[0],
    }  # fmt: skip
    asked.out.write_text(json.dumps(document, indent=1) + "\n")

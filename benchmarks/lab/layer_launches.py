"""Launches of one decoder layer in a decode step, with µs and floor of each, in the order of the layer.

    python -m benchmarks.lab.layer_launches --world-size 2 --models 30b-bf16,30b-slices,30b-fp8,32b-fp8 --json FILE
    python -m benchmarks.lab.layer_launches --world-size 2 --models 30b-bf16 --trace FOLDER     # and weft.trace's summaries
    python -m benchmarks.lab.layer_launches --page                                    # tables of the committed files

A model with fewer layers, random weights and a random cache; weights are cold, since the other layers' lie between two uses
of one. Launches overlap by programmatic dependent launch, so "adds" is the time between the ends of a launch and of the one
before it, and these add up to the layer's; "us" lasts from its start to its end. A floor is the bytes that a launch must read
and write at 4.3 TB/s, or a hop between ranks; of experts in the mean over tokens that choose alike.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.harness.machine import versions
from weft.bench.harness.meters import capturing
from weft.bench.models.breakdown import Kernel, kernels_of
from weft.bench.models.sessions import WeftSession, build
from weft.bench.models.steps import config_of
from weft.costs.gpu import Gpu, named
from weft.costs.grouped import Experts
from weft.costs.predicted import WEIGHTS
from weft.costs.recipes import Launch
from weft.models.config import DecoderConfig
from weft.models.steps import Layout, launches, recipe_of, tokens_of
from weft.runtime.files import put
from weft.trace.chrome import read
from weft.trace.summary import summary

FILES = Path(__file__).resolve().parent / "h200-layer-launches"
REPLAYS, WARM_UP, TIMED = 5, 2, 20
# Name -> (model, quantization, layout of experts).
MODELS: dict[str, tuple[str, str | None, str | None]] = {
    "30b-bf16": ("qwen3-30b-a3b", None, "whole"),
    "30b-slices": ("qwen3-30b-a3b", None, "slices"),
    "30b-fp8": ("qwen3-30b-a3b", "fp8", "whole"),
    "30b-fp8-slices": ("qwen3-30b-a3b", "fp8", "slices"),
    "32b-bf16": ("qwen3-32b", None, None),
    "32b-fp8": ("qwen3-32b", "fp8", None),
}
# Kind of a kernel by its name, the first that matches; kinds of launches by their op.
KINDS = (
    ("attention", r"attention"), ("other", r"qk_norm"), ("norm", r"rms_norm"), ("sum", r"moe_sum"), ("grouped", r"grouped"),
    ("route", r"route|schedule"), ("gemm", r"small_m|matmul|nvjet|gemm|cutlass|splitk|dot|narrow|router"),
)  # fmt: skip
WITHOUT = {"route": "router and schedule", "other": "rows in fp8"}
OPS = {
    "all_reduce_rms_norm": "norm", "decode_attention": "attention", "grouped_matmul": "grouped",
    "grouped_matmul_silu_mul": "grouped", "moe_sum": "sum", "matmul_route_schedule": "gemm", "matmul": "gemm",
    "matmul_silu_mul": "gemm",
}  # fmt: skip


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def floor_of(gpu: Gpu, launch: Launch, world_size: int) -> float:
    """µs that no kernel of this launch goes below."""
    op, _, variant = launch.op.partition("+")
    weight, item = WEIGHTS.get(variant, (2.0, False))[0], 2
    if op == "all_reduce_rms_norm":
        return gpu.hop if world_size > 1 else 5 * launch.shape[0] * launch.shape[1] * item / gpu.memory
    if op in ("matmul", "matmul_silu_mul"):
        M, N, K = launch.shape
        columns = 2 * N if op == "matmul_silu_mul" else N
        return (columns * K * weight + M * (N + K) * item) / gpu.memory
    if op in ("grouped_matmul", "grouped_matmul_silu_mul"):
        experts = Experts(*map(int, launch.shape[:6]), item, weight)
        matrices = 2 if op == "grouped_matmul_silu_mul" else 1
        return experts.hit * matrices * experts.hidden * experts.features * weight / gpu.memory
    if op == "matmul_route_schedule":
        return launch.shape[2] * launch.shape[4] * item / gpu.memory
    if op == "moe_sum":
        tokens, choices, _, _, hidden, _ = launch.shape
        return tokens * (choices + 1) * hidden * item / gpu.memory
    if op == "decode_attention":
        pairs, context, dim = launch.shape
        return 2 * pairs * context * dim * item / gpu.memory
    return launch.shape[0] / gpu.memory


def layer_of(config: DecoderConfig, step: Sequence[int], layout: Layout) -> list[Launch]:
    """Launches of one layer as the predictions of steps have them."""
    recipe = recipe_of(config, tokens_of(step), layout, "h200")
    one = list(launches(replace(config, num_hidden_layers=1), step, layout, recipe))
    return one[: next(at for at, launch in enumerate(one) if launch.what == "embedding")]


def named_kernels(rows: Sequence[dict[str, Any]], wanted: Sequence[Launch], gpu: Gpu, world_size: int) -> None:
    """Add to each kernel the launch that it computes, with its floor: in order, by kind."""
    left = [
        (OPS.get(launch.op.partition("+")[0], "norm" if "norm" in launch.what else "other"), launch)
        for launch in wanted
    ]
    for row in rows:
        kind = kind_of(row["kernel"])
        at = next((at for at, (one, _) in enumerate(left) if one == kind), None)
        launch = None if at is None else left.pop(at)[1]
        row["what"] = WITHOUT.get(kind, kind) if launch is None else launch.what
        row["floor"] = 0.0 if launch is None else round(floor_of(gpu, launch, world_size), 2)


def period_of(names: Sequence[str], layers: int) -> tuple[int, int]:
    """(first kernel, kernels of a layer): the shortest run of names that repeats for all layers but two."""
    for length in range(2, len(names) // 2):
        for start in range(len(names) - length * (layers - 2)):
            end = start + length * (layers - 2)
            if all(names[at] == names[at - length] for at in range(start + length, end)):
                return start, length
    raise RuntimeError(f"no run of kernels repeats among {list(names)[:40]}")


def layer_rows(steps: Sequence[Sequence[Kernel]], layers: int) -> list[dict[str, Any]]:
    """Rows of one layer's kernels from the norm before attention on: medians over steps and layers."""
    names = [kernel.name for kernel in steps[0]]
    start, length = period_of(names, layers)
    kinds = [kind_of(name) for name in names[start : start + length]]
    attention = kinds.index("attention") + length
    first = next((at for at in range(attention, attention - length, -1) if kinds[at % length] == "norm"), 0) % length
    rows = []
    for place in (*range(first, length), *range(first)):
        # The first of the repeated layers follows something else.
        rows.append(row_of(steps, range(start + length + place, start + length * (layers - 3), length)))
    return rows


def steps_of(profiler: torch.profiler.profile) -> list[list[Kernel]]:
    """Kernels of each replay after the first WARM_UP, in the order of their start."""
    kernels = sorted(kernels_of(profiler), key=lambda kernel: kernel.start)
    count = len(kernels) // (WARM_UP + REPLAYS)
    return [kernels[at : at + count] for at in range(WARM_UP * count, len(kernels) - count + 1, count)]


def row_of(steps: Sequence[Sequence[Kernel]], places: range) -> dict[str, Any]:
    """A kernel that lies at these places of each step: medians of its time and of what it adds."""
    pairs = [(step[at - 1], step[at]) for step in steps for at in places]
    return {
        "kernel": steps[0][places[0]].name,
        "us": round(statistics.median(now.end - now.start for _, now in pairs), 2),
        "adds": round(statistics.median(now.end - before.end for before, now in pairs), 2),
    }


def step_of(model: Any, batch: int, context: int) -> Callable[[], torch.Tensor]:
    """A decode step over a random cache."""
    session, device = WeftSession(model, batch, context), model.team.device
    session.fill_at_random()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (batch,), generator=draw).to(device)
    positions = torch.full((batch,), context - 1, device=device)
    return lambda: session.choose(session.decode(tokens, positions))


def measured(team: Any, name: str, batch: int, context: int, layers: int, folder: Path | None) -> dict[str, Any]:
    """A step of a model with few layers: its time, and the kernels of a layer of rank 0."""
    model_name, quantization, experts = MODELS[name]
    if team.size == 1:
        experts = None
    config = config_of(model_name, layers).quantized(quantization)
    model = build(config, team, "auto", torch.bfloat16, experts)
    step = step_of(model, batch, context)

    def captured() -> torch.cuda.CUDAGraph:
        step()
        team.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            step()
        return graph

    graph, times = captured(), []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_UP + TIMED):
        team.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    rows = profiled(team, graph, layers)
    gpu = named(team.caps.device_name)
    layout = Layout(world_size=team.size, slices=experts == "slices", quantization=quantization)
    named_kernels(rows, layer_of(config, (batch, context, 1), layout), gpu, team.size)
    if folder is not None:
        traced(team, captured, folder / f"{name}-w{team.size}-{batch}x{context}")
    return {
        "gpu": team.caps.device_name, "versions": versions(), "model": name, "world_size": team.size, "batch": batch,
        "context": context, "layers": layers, "step_us": round(statistics.median(times[WARM_UP:]), 1),
        "layer_us": round(sum(row["adds"] for row in rows), 2), "kernels": rows,
    }  # fmt: skip


def profiled(team: Any, graph: torch.cuda.CUDAGraph, layers: int) -> list[dict[str, Any]]:
    """Kernels of a layer, of rank 0's profiler, on all ranks."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    if team.rank == 0:
        profiler.start()
    for _ in range(WARM_UP + REPLAYS):
        team.barrier()
        graph.replay()
        torch.cuda.synchronize()
    team.barrier()
    rows: list[dict[str, Any]] = []
    if team.rank == 0:
        profiler.stop()
        rows = layer_rows(steps_of(profiler), layers)
    return team.exchange(rows)[0]


def traced(team: Any, captured: Any, target: Path) -> None:
    """Write the summary of ``weft.trace`` of one replay beside its timeline."""
    for _ in range(2):  # the first one compiles kernels with records
        with weft.trace(f"{target}.json", team):
            graph = captured()
            team.barrier()
            graph.replay()
            torch.cuda.synchronize()
    if team.rank == 0:
        put(Path(f"{target}.txt"), summary(read(Path(f"{target}.json"))))


def on_rank(team: Any, given: argparse.Namespace) -> None:
    """Measure all models; rank 0 prints each one and writes the file."""
    done = []
    for name in given.models.split(","):
        for step in given.steps.split(","):
            batch, context = map(int, step.split("x"))
            done.append(measured(team, name, batch, context, given.layers, given.trace))
            if team.rank == 0:
                print("\n".join(table(done[-1])), flush=True)
                if given.json is not None:
                    put(given.json, json.dumps({"rows": done}, indent=1) + "\n")
        torch.cuda.empty_cache()


def rows() -> list[dict[str, Any]]:
    """Rows of the committed files."""
    return [row for file in sorted(FILES.glob("*.json")) for row in json.loads(file.read_text())["rows"]]


def table(row: dict[str, Any]) -> Iterator[str]:
    """Markdown of one model's layer."""
    kernels = row["kernels"]
    floor = sum(one["floor"] for one in kernels)
    yield (
        f"**{row['model']}, W={row['world_size']}, {row['batch']} x {row['context']}**: {len(kernels)} launches a layer, "
        f"{row['layer_us']:.1f} µs by the profiler, "
        f"floor {floor:.1f}; a step of {row['layers']} layers takes {row['step_us']:.0f} µs"
    )
    yield ""
    yield "| launch | adds, µs | lasts | floor | kernel |"
    yield "|---|---:|---:|---:|---|"
    for one in kernels:
        yield f"| {one['what']} | {one['adds']:.2f} | {one['us']:.2f} | {one['floor']:.2f} | {one['kernel'][:48]} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--models", default="30b-bf16,30b-fp8,32b-fp8", help=", ".join(MODELS))
    parser.add_argument("--steps", default="1x1024", help="BATCHxCONTEXT,…")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="folder of timelines and their summaries")
    parser.add_argument("--page", action="store_true", help="print the tables of the committed files")
    given = parser.parse_args()
    if given.page:
        print("\n".join(line for row in rows() for line in table(row)))
        return
    weft.launch(on_rank, given.world_size, "cuda", args=(given,))


if __name__ == "__main__":
    main()

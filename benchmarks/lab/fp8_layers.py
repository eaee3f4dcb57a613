"""Kernels of one decoder layer in a decode step on one GPU, in the order of their launch, with the weights' floor.

    python -m benchmarks.lab.fp8_layers OUT.json [--only 32b-fp8,32b-bf16,30b-fp8,30b-bf16] [--seconds 60]
    python -m benchmarks.lab.fp8_layers OUT.json --only 32b-fp8 --variants         # other designs of the GEMMs
    python -m benchmarks.lab.fp8_layers OUT.json --only 32b-fp8 --variants --world-size 2 --layers 64

A model of the shapes that one of two ranks of Qwen3-32B or Qwen3-30B-A3B has, with fewer layers and without communication:
half the heads, features and experts, and half the chosen experts, since a token's choices are on both ranks. Weights are
cold: other layers' lie between two uses of one. Under programmatic dependent launch kernels overlap, so "adds" is the time
between the ends of a kernel and of the one before it, which add up to the layer's; "us" is from a kernel's start to its end.
With more ranks the model has its own shapes, and steps are timed without the profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.lab.layer_launches import REPLAYS, WARM_UP, layer_rows, step_of, steps_of
from benchmarks.measuring import captured, replay_us
from weft.bench.models.sessions import build
from weft.bench.models.steps import config_of
from weft.models.config import DecoderConfig
from weft.ops.gemm import local_gemm, small_m_rule
from weft.plan import memo
from weft.runtime.files import put

# Bytes a second of weights that an H200 reaches.
REACHED = 4.3e12
# Changes of the dense model's small-M designs, by projection; None: the plan's.
VARIANTS: tuple[dict[str, dict[str, int]] | None, ...] = (
    None,
    {"gate_up": {"block_k": 256, "num_stages": 2}, "down": {"block_k": 256, "num_stages": 4}},
    {
        "gate_up": {"block_k": 256, "num_stages": 3},
        "qkv": {"block_k": 256, "num_stages": 2},
        "o": {"block_k": 256, "num_stages": 2},
    },
    {
        "down": {"block_k": 256, "num_stages": 3},
        "qkv": {"block_k": 256, "num_stages": 3},
        "o": {"block_k": 256, "num_stages": 3},
    },
)
STEPS = {"32b": ((1, 128), (32, 1024), (128, 128)), "30b": ((1, 1024), (8, 1024), (32, 1024), (128, 1024))}
LAYERS = {"32b": 12, "30b": 24}


def whole(name: str, layers: int) -> DecoderConfig:
    return config_of("qwen3-32b" if name == "32b" else "qwen3-30b-a3b", layers or LAYERS[name])


def halved(whole: DecoderConfig) -> DecoderConfig:
    """Config of one of two ranks' shapes."""
    experts = whole.experts
    if experts is not None:
        experts = replace(
            experts, num_experts=experts.num_experts // 2, num_experts_per_tok=experts.num_experts_per_tok // 2
        )
    return replace(
        whole,
        num_attention_heads=whole.num_attention_heads // 2,
        num_key_value_heads=whole.num_key_value_heads // 2,
        intermediate_size=whole.intermediate_size // 2,
        vocab_size=whole.vocab_size // 2,
        experts=experts,
    )


def weights_of(model: Any) -> dict[str, int]:
    """Bytes of one layer's parameters, by name."""
    return {name: p.numel() * p.element_size() for name, p in model.layers[1].named_parameters()}


def change(changes: dict[str, dict[str, int]] | None, config: DecoderConfig, world_size: int) -> None:
    """Change fields of the plans' small-M designs, by projection; None: as the rule says."""
    rule = small_m_rule.default_small_m
    names = {config.hidden_size: "qkv", config.num_attention_heads * config.head_dim // world_size: "o"}

    def default_small_m(call: Any, caps: Any, *, gated: bool) -> Any:
        design, name = rule(call, caps, gated=gated), "gate_up" if gated else names.get(call.K, "down")
        return replace(design, **(changes or {}).get(name, {})) if call.fp8 else design

    local_gemm.default_small_m = rule if changes is None else default_small_m
    memo.forget()


def measured(model: Any, batch: int, context: int, profiled: bool) -> dict[str, Any]:
    """A step's time, and its kernels by the profiler."""
    step = step_of(model, batch, context)
    step()
    torch.cuda.synchronize()
    graph = captured([step])
    step_us = {"step_us": replay_us(graph, rounds=10, warm_up=WARM_UP)}
    if not profiled:
        return step_us
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(WARM_UP + REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
    steps = steps_of(profiler)
    rows = layer_rows(steps, model.config.num_hidden_layers)
    return {
        **step_us,
        "profiled_us": round(statistics.median(step[-1].end - step[0].start for step in steps), 1),
        "kernels_of_step": len(steps[0]),
        "layer_us": round(sum(row["adds"] for row in rows), 2),
        "kernels": rows,
    }


def main(team: Any, options: argparse.Namespace) -> None:
    start, document = time.monotonic(), {"gpu": torch.cuda.get_device_name(), "rows": []}
    for one in options.only.split(","):
        name, _, format = one.partition("-")
        if max(team.exchange(time.monotonic() - start)) > options.seconds:
            continue
        config = whole(name, options.layers)
        config = (config if team.size > 1 else halved(config)).quantized(None if format == "bf16" else "fp8")
        model = build(config, team, "auto", torch.bfloat16)
        nbytes = weights_of(model)
        floor = round(1e6 * sum(nbytes.values()) / REACHED, 2)
        if team.rank == 0:
            print(one, str(model.plan(1).recipe), {key: size for key, size in nbytes.items() if size > 1 << 20})
        steps = STEPS[name] if not options.steps else [tuple(map(int, x.split("x"))) for x in options.steps.split(",")]
        for batch, context in steps:
            for changes in VARIANTS if options.variants else (None,):
                change(changes, config, team.size)
                row = {"model": one, "batch": batch, "context": context, "floor_us": floor, "changes": changes}
                row |= measured(model, batch, context, team.size == 1)
                document["rows"].append({**row, "bytes": nbytes})
                if team.rank == 0:
                    put(Path(options.out), json.dumps(document, indent=1))
                    kernels = row.pop("kernels", [])
                    print(row, flush=True)
                    for kernel in kernels:
                        print(
                            f"    {kernel['adds']:7.2f} adds {kernel['us']:7.2f} us  {kernel['kernel'][:70]}",
                            flush=True,
                        )
        del model
        torch.cuda.empty_cache()
    if team.rank == 0:
        print(f"{time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--only", default="32b-fp8,30b-fp8,32b-bf16,30b-bf16")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no model after this time")
    parser.add_argument("--steps", default="", help="BATCHxCONTEXT,… in place of the model's")
    parser.add_argument("--variants", action="store_true", help="with other designs too, by projection")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0, help="0: a few")
    given = parser.parse_args()
    weft.launch(main, given.world_size, "cuda", args=(given,))

"""Measure several ops in one launch, so that starting the ranks is paid once: one JSON file for each op.

    python benchmarks/run.py --world-size 4 --out benchmarks/results/h200-x4 --quick \\
        all-reduce ag-gemm@qwen3-32b:1024,2048,4096,8192 gemm-ar@128,5120,6400 gemm-ar@16,5120,6400

    python benchmarks/run.py --world-size 4 --out benchmarks/results/h200-x4 --quick --breakdown \\
        model@decode:1x128,32x1024 model@prefill:32x128 mlp@decode:128x128 generate@32x128+64

A word is OP or OP@SHAPES, SHAPES as ``weft bench --shapes`` takes them; words of the same op share its file.
Rank 0 writes a file after every shape, so a run that is killed leaves what it found. Tables are printed at the end.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import torch

from weft.bench.command import check_simulable_ranks, on_rank, show, weft_failed
from weft.bench.harness.meters import Stuck
from weft.bench.harness.report import Report, write_last
from weft.bench.harness.runner import OutOfStep
from weft.bench.models.flags import LevelFlags, level_plan
from weft.bench.models.names import LEVELS
from weft.bench.ops.shapes import OPS, alias_of, parse_shapes
from weft.bench.ops.workload import Plan, heap_bytes
from weft.console import check_output, words
from weft.errors import WeftError
from weft.runtime.launch import launch


def plans_of(asked: list[str], world_size: int, simulated: bool, options: argparse.Namespace) -> tuple[Plan, ...]:
    wanted: dict[str, list[str]] = {}
    for word in asked:
        op, _, shapes = word.partition("@")
        wanted.setdefault(alias_of(op), []).extend([shapes] if shapes else [])
    how = {
        "dtype": options.dtype, "providers": words("providers", options.providers),
        "check_only": options.check_only, "quick": options.quick, "eager": options.eager, "command": options.command,
    }  # fmt: skip
    flags = LevelFlags(
        model=options.model, layers=options.layers, check=options.check, breakdown=options.breakdown,
        modes=words("mode", options.mode),
    )  # fmt: skip
    return tuple(
        level_plan(op, flags, tuple(shapes), world_size, simulated=simulated, **how)
        if op in LEVELS
        else Plan(op=op, shapes=parse_shapes(op, shapes, world_size, dtype=options.dtype, tiny=simulated), **how)
        for op, shapes in wanted.items()
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=list(OPS), metavar="OP[@SHAPES]", help="[default: every op]")
    parser.add_argument("--world-size", type=int, help="[default: all GPUs, or 2 simulated ranks]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--providers", help="names or families, as in weft,nccl [default: all]")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--model", help="of layers and models [default: qwen3-32b]")
    parser.add_argument("--layers", type=int, help="so many of its layers [default: all]")
    parser.add_argument("--mode", help="of weft's models: auto, ag_rs, gemm_ar [default: all]")
    parser.add_argument(
        "--check", action="store_true", help="first compare a model's logits over given tokens, or all layers"
    )
    parser.add_argument("--breakdown", action="store_true", help="say what the time of a step goes to")
    options = parser.parse_args(arguments)
    options.command = shlex.join(["python", "benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
    simulated = torch.cuda.device_count() == 0
    world_size = options.world_size or (2 if simulated else torch.cuda.device_count())
    started = time.perf_counter()
    try:
        if options.world_size is not None and options.world_size < 1:
            raise ValueError(f"--world-size {options.world_size} is not a positive number; leave it out for all GPUs")
        if simulated:
            check_simulable_ranks(world_size)
        plans = plans_of(options.words, world_size, simulated, options)
        for plan in plans:
            check_output("--out", options.out / f"{plan.op}.w{world_size}.json")
        reports: list[Report] = launch(
            on_rank,
            world_size,
            "sim" if simulated else "cuda",
            args=(plans, partial(write_last, options.out)),
            heap_bytes=None if simulated else heap_bytes(plans),
        )[0]
    except (Stuck, OutOfStep) as error:
        show(error.reports)
        print(f"weft: {error}", file=sys.stderr)
        return 1
    except (WeftError, ValueError) as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    show(reports)
    print(f"{len(reports)} ops in {time.perf_counter() - started:.0f} s, written to {options.out}")
    return 1 if weft_failed(reports) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Times of every candidate of ``weft tune`` for the overlapped GEMMs, beside cuBLAS and the other providers.

The rules in ``weft/ops/overlap`` follow these figures.

    python -m benchmarks.lab.matmul --world-size 4 --out benchmarks/lab/h200-x4-matmul.json \\
        --tuned weft/plan/tables ag-gemm@qwen3-32b:1024,2048,4096,8192 gemm-rs@qwen3-32b:1024,2048,4096,8192

With --tuned the fastest of each shape goes into the ops' data file in that folder, as ``weft tune --quick`` would write it.
The harness is that of ``weft bench``: answers are checked before they are timed, all of a shape take turns in one process,
and a number is the maximum over the ranks of the median, in microseconds inside a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import torch
import triton

from weft.bench.harness import meters
from weft.bench.harness.runner import Bench, Entrant
from weft.bench.ops.baselines import close_quietly
from weft.bench.ops.providers import attempt
from weft.bench.ops.shapes import Shape, alias_of, op_of, parse_shapes
from weft.bench.ops.workload import Plan, heap_bytes
from weft.ops import barrier
from weft.plan import table as tuned
from weft.runtime.files import put
from weft.runtime.launch import launch
from weft.runtime.team.team import Team
from weft.tune import compiling, search, spaces, timing


def plans_of(options: argparse.Namespace, command: str) -> tuple[Plan, ...]:
    wanted: dict[str, list[str]] = {}
    for word in options.words:
        op, _, shapes = word.partition("@")
        wanted.setdefault(alias_of(op), []).extend([shapes] if shapes else [])
    return tuple(
        Plan(
            op=op,
            shapes=parse_shapes(op, shapes, options.world_size),
            dtype=options.dtype,
            providers=tuple(options.providers.split(",")),
            quick=options.quick,
            command=command,
        )
        for op, shapes in wanted.items()
    )


def on_rank(team: Team, plans: tuple[Plan, ...], file: Path, head: dict, tuned_folder: Path | None) -> list[dict]:
    """A row for each shape, which rank 0 writes as it is found."""
    barrier(team)  # loaded before the first capture
    meters.finish(team, "the first barrier")
    empty_us = max(team.exchange(meters.events_in_graphs(team)))
    rows: list[dict] = []
    for plan in plans:
        bench, outcomes = Bench(team, plan, empty_us), []
        for shape in plan.shapes:
            started = time.perf_counter()
            found, outcome = one(bench, shape)
            outcomes.append(outcome)
            rows.append({"op": plan.op, "shape": shape.size, "label": shape.label, **found})
            if team.rank == 0:
                put(file, json.dumps(head | {"rows": rows}, indent=1))
                times = ", ".join(f"{name} {us:.1f}" for name, us in rows[-1]["us"].items())
                print(f"{plan.op} {shape.label} ({time.perf_counter() - started:.1f} s): {times}", flush=True)
        if team.rank == 0 and tuned_folder is not None:
            for outcome in search.reconciled(outcomes):
                assert outcome.row is not None
                search.save(tuned.file_for(team.caps.device_name, team.size, tuned_folder), team, outcome.row)
    return rows


def one(bench: Bench, shape: Shape) -> tuple[dict, search.Outcome]:
    """Every provider's and candidate's time, and what a search would come to."""
    team, op = bench.team, op_of(bench.plan.op)
    problem = bench.plan.problem(shape, team)
    designs = team.exchange(spaces.first(problem, bench.plan.quick))[0]
    made = [partial(attempt(problem, design).run, 0) for design in designs]
    compiling.compile_shares(made, team)
    entrants: list[Entrant] = []
    dropped: dict[str, str] = {}
    for provider in bench.providers:
        entrant = bench.enter(problem, provider)
        if entrant.row.reason is None:
            bench.set_up(problem, entrant)
        entrants.append(entrant)
    by_label = {spaces.label(op, design): design for design in designs}
    entrants += [timing.enter(bench, problem, design) for design in designs]
    for entrant in entrants:
        entrant.chain = None
        if entrant.single is None:
            dropped[entrant.row.provider] = entrant.row.reason or "it has no time"
    timed = [entrant for entrant in entrants if entrant.single is not None]
    problem.forget()
    us = {row.provider: round(row.median_us, 2) for row in bench.time(timed)}
    for entrant in entrants:
        entrant.single = None
        close_quietly(entrant.attempt)
    times = {design: us[label] for label, design in by_label.items() if label in us}
    default = spaces.default(problem)
    best, best_us = search.agreed(team, times, default)
    row = tuned.Row(
        op=op.name, dtype=tuned.name_of(problem.dtype), shape=shape.size, design=op.name_of(best),
        config=op.config_of(best), us=best_us, default_us=times.get(default), candidates=len(times), date=today(),
        versions=search.versions_of(),
    )  # fmt: skip
    outcome = search.Outcome(label=shape.label, row=row, winner=spaces.label(op, best), times=times)
    return {"us": us, "dropped": dropped}, outcome


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="OP[@SHAPES]")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--providers", default="cublas,cublas+nccl,torch")
    parser.add_argument("--tuned", type=Path, help="folder of the ops' data file")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.lab.matmul", *sys.argv[1:]])
    plans = plans_of(options, command)
    head = {
        "command": command,
        "date": today(),
        "gpus": f"{options.world_size} x {torch.cuda.get_device_name()}",
        "versions": f"torch {torch.__version__}, triton {triton.__version__}",
    }
    launch(
        on_rank,
        options.world_size,
        "cuda",
        args=(plans, options.out, head, options.tuned),
        heap_bytes=heap_bytes(plans),
    )


if __name__ == "__main__":
    main()

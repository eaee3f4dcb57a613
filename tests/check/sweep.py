"""All ops under many schedules: ``python -m tests.check.sweep --schedules 500 --world-size 2,3,4 [--op NAME] [--table]``.

``--table`` takes the case table of tests/ops, each algorithm and config of it, in the place of the list here.

Prints what is found and how long it took. tests/check/test_ops.py runs a few schedules of the same calls.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import weft.check
from tests.ops import cases, matmul_cases
from weft import ops

# Lamport stages are used again in the fourth call.
CALLS = 5


@dataclass(frozen=True, slots=True)
class Call:
    """``run(team, tensor)`` calls an op once; ``tensor(*shape)`` makes an input that differs by rank and call."""

    name: str
    run: Callable[[Any, Callable[..., torch.Tensor]], Any]

    def __call__(self, team: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(team.rank)

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        # No barrier in between: a rank may be a whole call ahead.
        return [self.run(team, tensor) for _ in range(CALLS)]


def mixed(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Large after small and small after large, on one workspace."""
    out = []
    for n in (7, 900, 64):
        out += [ops.all_reduce(x(n), team, "one_shot"), ops.all_gather(x(n), team)]
        out += [ops.reduce_scatter(x(team.size, n), team), ops.all_reduce(x(n), team, "two_shot")]
    return out


def fused_norm(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.all_reduce_rms_norm(x(3, 64), torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6, team)


OPS = [
    Call("all_reduce one_shot", lambda team, x: ops.all_reduce(x(700), team, "one_shot")),
    Call("all_reduce two_shot", lambda team, x: ops.all_reduce(x(1100), team, "two_shot")),
    Call("all_reduce fp32", lambda team, x: ops.all_reduce(x(300, dtype=torch.float32), team)),
    Call("all_gather int8", lambda team, x: ops.all_gather(x(5, 33).to(torch.int8), team)),
    Call("all_reduce_rms_norm", fused_norm),
    Call("mixed collectives", mixed),
    Call("all_gather", lambda team, x: ops.all_gather(x(3, 170), team)),
    Call("all_gather bytes", lambda team, x: ops.all_gather(x(77).to(torch.int8), team)),
    Call("reduce_scatter", lambda team, x: ops.reduce_scatter(x(team.size * 2, 300), team)),
    Call("all_to_all", lambda team, x: ops.all_to_all(x(team.size * 2, 200), team)),
    Call("barrier", lambda team, x: ops.barrier(team)),
    Call("matmul", lambda team, x: ops.matmul(x(40, 48), x(56, 48))),
    Call("all_gather_matmul", lambda team, x: ops.all_gather_matmul(x(24, 32), x(48, 32), team)),
    Call("matmul_reduce_scatter", lambda team, x: ops.matmul_reduce_scatter(x(team.size * 24, 32), x(48, 32), team)),
    Call("matmul_all_reduce", lambda team, x: ops.matmul_all_reduce(x(40, 32), x(48, 32), team)),
]


def table(world_size: int) -> list[Call]:
    """The cases of tests/ops for this world size, as calls."""
    chosen = [case for case in [*cases.COLLECTIVES, *matmul_cases.MATMULS] if case.world_size == world_size]
    return [Call(str(case), lambda team, _, case=case: _run(case, team)) for case in chosen]


def _run(case: cases.Case, team: Any) -> torch.Tensor:
    return cases.OPERATIONS[case.op].run(case, team, *cases.inputs_of(case, team.rank, 0))


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", default="", help="only those whose name begins so")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    sizes, failed = [int(size) for size in chosen.world_size.split(",")], False
    todo = [(call, size) for size in sizes for call in (table(size) if chosen.table else OPS)]
    for call, size in todo:
        if not call.name.startswith(chosen.op):
            continue
        started = time.perf_counter()
        report = weft.check.check(call, size, schedules=chosen.schedules, seed=chosen.seed, heap_bytes=None)
        seconds = time.perf_counter() - started
        print(f"{call.name:40} {seconds:6.1f} s  {report.summary}", flush=True)
        if not report.ok:
            failed = True
            print(report, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command())

"""Shapes of ``benchmarks.one_gpu_regret``, the order in which it measures them, and the kernels that they need."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.bench.harness.workload import Shape
from weft.bench.ops.shapes import op_of
from weft.bench.ops.workload import OpWorkload
from weft.bench.regret.command import RegretFlags, machine_here, workloads
from weft.bench.regret.file import Kept
from weft.bench.regret.measure import Row, planned
from weft.ops.gemm.cublas import Cublas
from weft.ops.moe.moe_op import MoeShape
from weft.ops.moe.moe_schedule import block_for
from weft.plan.planned import Machine

# The most used first. moe-schedule has one design.
OPS = (
    "gemm", "gemm-silu", "gemm+block_fp8", "gemm-silu+block_fp8", "gemm+four_bit", "gemm-silu+four_bit",
    "grouped-gemm-silu", "grouped-gemm", "moe-route", "paged-attention", "decode-attention", "paged-prefill-attention",
    "grouped-gemm-silu+block_fp8", "grouped-gemm+block_fp8", "grouped-gemm-silu+four_bit", "grouped-gemm+four_bit",
    "gemm+channel_fp8", "gemm-silu+channel_fp8", "grouped-gemm-silu+channel_fp8", "grouped-gemm+channel_fp8",
)  # fmt: skip
# Designs besides the named ones.
SEARCH = 3


class Job(NamedTuple):
    """Design to compile at a shape."""

    workload: OpWorkload
    shape: Shape
    design: Any


def shapes_of(ops: Sequence[str], seed: int, here: Machine, device: str) -> list[tuple[OpWorkload, Shape]]:
    """All shapes, op by op; of virtual ranks one or two small ones."""
    words = {op: () if device == "cuda" else (f"{_tiny(op)}",) for op in ops}
    made = workloads(RegretFlags(regret=True, seed=seed), words, "bf16", here)
    return [(one, shape) for one in made for shape in one.shapes]


def _tiny(op: str) -> str:
    form = op_of(op).form
    return {"gemm": "8,256,256", "moe": "5,2,4,4,256,128", "attention": "2,40,64"}[form]


def jobs_of(every: Sequence[tuple[OpWorkload, Shape]], here: Machine) -> list[Job]:
    """One job, at the smallest shape, for each kernel about: by op, design and what a kernel may depend on."""
    jobs: dict[tuple, Job] = {}
    for workload, shape in sorted(every, key=lambda one: bytes_of(*one)):
        one = replace(workload, shapes=(shape,))
        for _, designs, _, _ in planned(one, here, SEARCH):
            for design in designs:
                if not isinstance(design, Cublas) or workload.fields:
                    jobs.setdefault((workload.name, design, *_depends(workload, shape)), Job(workload, shape, design))
    places = {name: place for place, name in enumerate(OPS)}
    return sorted(jobs.values(), key=lambda job: places[job.workload.name])


def _depends(workload: OpWorkload, shape: Shape) -> tuple:
    """Sizes of kernels, as far as a kernel may be compiled for them: by the powers of two that divide them."""
    form, size = workload.op.form, shape.size
    if form == "moe":
        moe = MoeShape(*size)
        router = (moe.experts, min(moe.tokens, 2)) if workload.op.alias == "moe-route" else ()
        sizes = moe.hidden, moe.features
        return (moe.k, block_for(moe.tokens * moe.k, moe.experts), *router, *(min(x & -x, 256) for x in sizes))
    if form == "gemm":
        return (size[0] == 1, *(min(x & -x, 256) for x in size[1:]))
    return size[-1:]


def bytes_of(workload: OpWorkload, shape: Shape) -> int:
    """Bytes that a shape takes at once while it is prepared, about."""
    size = shape.size
    if workload.op.form == "moe":
        moe = MoeShape(*size)
        gates = 2 if getattr(workload.op, "gated", False) else 1
        weights = 0 if workload.op.alias == "moe-route" else 2 * moe.experts * moe.hidden * moe.features * gates
        return 5 * weights + 24 * moe.tokens * moe.k * max(moe.hidden, moe.features)
    if workload.op.form == "gemm":
        M, N, K = size
        return 24 * M * N + 16 * N * K + 12 * M * K
    pairs, tokens, width = size
    return 24 * pairs * tokens * width


def work_of(options: argparse.Namespace, known: Sequence[Kept]) -> tuple[list[tuple[OpWorkload, Shape]], list[Job]]:
    """(shapes, jobs): first known rows that today's plans or ``options.above`` make stale, then shapes without a row."""
    here = machine_here(1, options.plan or options.device == "sim")
    rows = {(kept.row.op, kept.row.shape): kept.row for kept in known if kept.row.us}
    every = shapes_of(options.ops, options.seed, here, options.device)
    stale = [one for one in every if (row := _row_of(rows, one)) and _is_stale(row, one, here, options.above)]
    new = [one for one in every if _row_of(rows, one) is None]
    shapes = [(replace(workload, shapes=()), shape) for workload, shape in (*stale, *new)]
    return shapes, [*jobs_of(stale, here), *jobs_of(new, here)]


def _row_of(rows: Mapping[tuple, Row], one: tuple[OpWorkload, Shape]) -> Row | None:
    workload, shape = one
    return rows.get((workload.name, shape.size))


def _is_stale(row: Row, one: tuple[OpWorkload, Shape], here: Machine, above: float) -> bool:
    workload, shape = one
    labels = (label for _, of, _, _ in planned(replace(workload, shapes=(shape,)), here, 0) for label in of.values())
    return next(labels) != row.auto or (row.regret or 0.0) > above


def merged(known: Sequence[Kept], new: Sequence[Kept]) -> list[Kept]:
    """Rows of both; of a shape with times in ``new`` the new row alone."""
    rows = {kept.row.key: kept for kept in known}
    for kept in new:
        if kept.row.us or kept.row.key not in rows:
            rows[kept.row.key] = kept
    return list(rows.values())

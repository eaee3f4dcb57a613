"""Which of the project's targets the measured results meet: ``python benchmarks/targets.py benchmarks/results/h200-x4``.

Every line: target, measured, met or not. Targets in µs are held against single calls and, where they were measured,
against calls in a row; ratios are to the median of single calls of the other provider in the same run. Exit status 1
if a measured target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.bench.harness.report import Report, Row, best_other, read, row_of, shapes_of, weft_row
from weft.bench.models.names import LEVELS
from weft.bench.ops.shapes import size_label

KIB, MIB = 1 << 10, 1 << 20
LINK = 360e9

ALL_REDUCE = {
    2: {4 * KIB: 2.4, 64 * KIB: 3.0, 256 * KIB: 3.5, MIB: 5.7, 4 * MIB: 16, 16 * MIB: 54},
    4: {4 * KIB: 3.2, 64 * KIB: 4.1, 256 * KIB: 5.6, MIB: 8.8, 4 * MIB: 22, 16 * MIB: 80, 64 * MIB: 295},
}
# all-reduce-rms-norm, world size 2: the rows of the size that a published kernel takes 6.7 µs for on two H100s.
NORMED_US = {(6, 6144): 4.5, (7, 5120): 4.5}
# (op, world size, N, K) -> M -> at most this many times cuBLAS alone; M = 8192 stands for all larger ones.
RATIOS = {
    ("ag-gemm", 4, 12800, 5120): {1024: 1.12, 2048: 1.05, 4096: 1.00, 8192: 0.97},
    ("ag-gemm", 4, 2560, 5120): {1024: 1.6, 2048: 1.3, 4096: 1.2, 8192: 1.05},
    ("gemm-rs", 4, 5120, 6400): {1024: 1.3, 2048: 1.12, 4096: 1.05, 8192: 0.99},
    ("gemm-rs", 4, 5120, 2048): {1024: 1.8, 2048: 1.45, 4096: 1.25, 8192: 1.12},
    ("gemm-rs", 2, 5120, 12800): {1024: 1.12, 2048: 1.02, 4096: 0.98, 8192: 1.00},
    ("gemm-rs", 2, 5120, 4096): {1024: 1.3, 2048: 1.18, 4096: 1.1, 8192: 1.04},
}
DECODE = {(128, 5120, 6400): 27.0, (16, 5120, 6400): 22.0, (1, 5120, 6400): 20.0}
PREFILL_GAIN = 1.2
# World size -> (batch, length, new tokens) -> milliseconds of a step of Qwen3-32B in bf16, head and greedy choice included.
STEPS = {
    2: {(1, 128, 1): 9.0, (128, 128, 1): 10.5},
    4: {(1, 128, 1): 5.2, (32, 1024, 1): 6.3, (128, 128, 1): 6.5, (32, 128, 128): 95.0, (1, 128, 128): 5.2},
}
# At W=4: over eager torch and torch.compile, both with NCCL in a CUDA graph. Of single layers over either.
DECODE_GAIN = {"torch.eager": 1.35, "torch.compile": 1.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    target: str
    measured: str
    met: str  # "met", "MISSED", "–" where it was not measured


def lines(report: Report) -> Iterator[Line]:
    for shape in shapes_of(report):
        ours = weft_row(report, shape)
        name = f"{report.op} W={report.world_size} " + (
            size_label(shape[0]) if len(shape) == 1 else "x".join(map(str, shape))
        )
        if ours is None:
            yield Line(target=name, measured="weft has no time", met="–")
            continue
        if report.op in LEVELS:
            yield from of_steps(report, shape, ours)
            continue
        yield from absolute(report, shape, ours, name)
        yield from relative(report, shape, ours, name)


def of_steps(report: Report, shape: tuple[int, ...], ours: Row) -> Iterator[Line]:
    """Of whole models and of single layers, each mode of which must not be slower than torch."""
    name = f"{report.op} W={report.world_size} {ours.label}"
    assert ours.median_us is not None
    if report.op == "model" and report.subject == "qwen3-32b":
        limit = STEPS.get(report.world_size, {}).get(shape)
        if limit is not None:
            ms = ours.median_us / 1e3
            yield Line(target=f"{name} <= {limit:.1f} ms", measured=f"{ms:.2f}", met=verdict(ms <= limit))
        if report.world_size == 4 and (shape[2] == 1 or shape == (32, 128, 128)):
            for provider, gain in DECODE_GAIN.items():
                gain = gain if shape[2] == 1 else PREFILL_GAIN
                other = row_of(report, shape, provider)
                yield compared(f"{name}: {gain} x over {provider}", ours, other, 1 / gain, 1e3)
    if report.op in ("mlp", "attn"):
        for row in report.rows:
            if row.role == "weft" and row.shape == shape and row.median_us is not None:
                other = best_other(report, shape)
                if other is not None:
                    yield compared(f"{name}, {row.provider} <= {other.provider}", row, other, 1.0)


def absolute(report: Report, shape: tuple[int, ...], ours: Row, name: str) -> Iterator[Line]:
    """µs that the physics and the prototypes allow."""
    limit = None
    if report.op == "all-reduce":
        limit = ALL_REDUCE.get(report.world_size, {}).get(shape[0])
    elif report.op == "all-reduce-rms-norm" and report.world_size == 2:
        limit = NORMED_US.get(shape)
    elif report.op in ("all-gather", "reduce-scatter", "all-to-all") and shape[0] >= 64 * KIB:
        share = (report.world_size - 1) / report.world_size
        limit = 1.15 * shape[0] * share / LINK * 1e6 + 3
    elif report.op == "gemm-ar" and report.world_size == 4:
        limit = DECODE.get(shape)
    if limit is not None:
        assert ours.median_us is not None
        measured, times = f"{ours.median_us:.2f} alone", [ours.median_us]
        if ours.chain_us is not None:
            measured, times = f"{measured}, {ours.chain_us:.2f} in a row", [*times, ours.chain_us]
        verdicts = [verdict(time <= limit) for time in times]
        met = verdicts[0] if len(set(verdicts)) == 1 else f"{verdicts[0]} alone, {verdicts[1]} in a row"
        yield Line(target=f"{name} <= {limit:.1f} µs", measured=measured, met=met)


def relative(report: Report, shape: tuple[int, ...], ours: Row, name: str) -> Iterator[Line]:
    """Against the other providers of the same run."""
    if not (report.op == "ag-gemm" and shape[0] < 64):
        other = best_other(report, shape)
        skinny = report.op == "gemm"
        if other is not None and not (skinny and shape[0] > 128):
            yield compared(f"{name} <= {other.provider}", ours, other, 1.0)
    ratios = RATIOS.get((report.op, report.world_size, *shape[1:]))
    ratio = ratios.get(min(shape[0], 8192)) if ratios else None
    if ratio is not None:
        yield compared(f"{name} <= {ratio} x cublas", ours, row_of(report, shape, "cublas"), ratio)
    if report.op == "gemm-ar" and shape[0] >= 1024:
        other = row_of(report, shape, "cublas+nccl")
        yield compared(f"{name}: {PREFILL_GAIN} x over cublas+nccl", ours, other, 1 / PREFILL_GAIN)


def compared(target: str, ours: Row, other: Row | None, ratio: float, unit: float = 1.0) -> Line:
    """``unit``: microseconds in one of those that are printed."""
    if other is None or not other.median_us or not ours.median_us:
        return Line(target=target, measured="the other was not measured", met="–")
    times = f"{ours.median_us / unit:.2f} / {other.median_us / unit:.2f}"
    measured = f"{times} = {ours.median_us / other.median_us:.2f}"
    return Line(target=target, measured=measured, met=verdict(ours.median_us <= ratio * other.median_us))


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def files_of(paths: list[Path]) -> list[Path]:
    """ValueError for a path that there is not, and for a folder with no results in it."""
    files = []
    for path in paths:
        below = sorted(path.rglob("*.w*.json")) if path.is_dir() else [path] if path.exists() else []
        if not below:
            raise ValueError(f"{path} has no results, OP.wW.json; name a file or folder of benchmarks/run.py")
        files += below
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", type=Path, help="JSON files, or folders that hold them as OP.wW.json at any depth"
    )
    paths = parser.parse_args(arguments).paths
    try:
        reports = [report for file in files_of(paths) for report in read(file)]
    except (OSError, ValueError) as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    found = [line for report in reports if not report.is_simulated for line in lines(report)]
    width = max((len(line.target) for line in found), default=0)
    for line in found:
        print(f"{line.target:{width}}  {line.measured:34}  {line.met}")
    missed = sum("MISSED" in line.met for line in found)
    print(f"{sum(line.met == 'met' for line in found)} met, {missed} missed of {len(found)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

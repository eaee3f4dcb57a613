"""Table of large GEMMs from benchmarks/lab: ``python -m benchmarks.large_products`` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.cublas import chosen
from weft.bench.ops.shapes import parse_shapes

LAB = Path(__file__).resolve().parent / "lab"
HEAD = """## Large GEMMs: cuBLAS's choice, and its best algorithm

Projections of Qwen3-32B as sharded over W ranks, bf16, in CUDA graphs: microseconds by torch.mm, which takes cuBLAS's first
choice, and by the fastest algorithm that the search finds; both are cuBLAS alone. *At rest*: graphs of 0.5 ms, each after a
pause of 4 ms, at full clocks. *Busy*: graphs of 4 ms without a pause, all algorithms of a shape alternating, at the resulting
clocks. Shapes with one time keep cuBLAS's choice. `ops.matmul` and the overlapped GEMMs use the algorithms of such a search on
an H200, on H100s too (`weft/plan/tables/nvidia-h200.w1.json`); `weft.runtime.cublaslt.Algorithm` explains their attributes.
"""
HEAD_OF_OTHERS = """### Other shapes

The same for one rank's GEMMs of Llama-3-70B's projections and of symm-mem-recipes' shapes.
"""
MEASURED = """
- GPU: {gpu}; {versions}; measured {date}
- `{command}`
"""
OTHERS = ("llama3-70b", "symm-mem-recipes")


def section(document: dict[str, Any], head: str, names: dict[tuple[int, ...], str]) -> str:
    """Section of docs/performance/gemms.md for one file. ``names``: names of unlabelled GEMMs, by N and K."""
    return "\n".join([head + MEASURED.format(**document), *table(document["rows"], names), ""])


def table(rows: list[dict[str, Any]], names: dict[tuple[int, ...], str]) -> Iterator[str]:
    order = list(names)
    yield "| projection | M×N×K | at rest | | busy | |"
    yield "|---|---|---|---:|---|---:|"
    for row in sorted(rows, key=lambda row: (order.index(tuple(row["shape"][1:])), row["shape"])) if names else rows:
        best = chosen(row)
        name = names.get(tuple(row["shape"][1:])) or row["label"].rpartition(",")[0]
        cells = [name, "×".join(map(str, row["shape"]))]
        for name in ("burst_us", "us"):
            library = row[f"cublas_{name}"]
            cells += [timed(library, best and best[name]), f"{best[name] / library - 1:+.1%}" if best else ""]
        yield f"| {' | '.join(cells)} |"


def timed(library: float, best: float | None) -> str:
    return f"{library:.4g}" if best is None else f"{library:.4g} → {best:.4g}"


def names_of_others() -> dict[tuple[int, ...], str]:
    """Names of one rank's GEMMs by (N, K), in the order of the table."""
    found: dict[tuple[int, ...], str] = {}
    for name in OTHERS:
        for op in ("ag-gemm", "gemm-rs"):
            for world_size in (4, 2):
                for shape in parse_shapes(op, [f"{name}:4096"], world_size):
                    ranks = "" if name == "symm-mem-recipes" else f" of {world_size}"
                    found.setdefault(shape.size[1:], shape.label.rpartition(" ")[0] + ranks)
    return found


def sections() -> list[str]:
    kinds = (("*-cublas.json", HEAD, {}), ("*-cublas-other-shapes.json", HEAD_OF_OTHERS, names_of_others()))
    return [
        section(json.loads(path.read_text()), head, names)
        for pattern, head, names in kinds
        for path in sorted(LAB.glob(pattern))
    ]


if __name__ == "__main__":
    print("\n".join(sections()))

"""The table of large products, from benchmarks/lab/*-cublas.json: ``python -m benchmarks.large_products`` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.cublas import chosen

LAB = Path(__file__).resolve().parent / "lab"
HEAD = """## Large products: what cuBLAS chooses, and the best that it has

Projections of Qwen3-32B as one rank of W holds them, bf16, in CUDA graphs: microseconds by torch.mm, which takes cuBLAS's first
choice, and by the algorithm that `ops.matmul` and the overlapped products take in its place; cuBLAS alone in both.
*At rest*: graphs of 0.5 ms, each after a rest of 4 ms, at full clocks. *Busy*: graphs of 4 ms without a rest, all algorithms of
a shape in turn, at the clock that they leave each other. Shapes with one time keep cuBLAS's choice. Tiles are columns × rows of
the product; all attributes are in `weft/ops/tuned/nvidia-h200.w1.json`, as `weft.runtime.cublaslt.Algorithm` explains them.

- GPU: {gpu}; {versions}; measured {date}
- `{command}`
"""


def section(document: dict[str, Any]) -> str:
    """One file as a section of docs/performance.md."""
    return "\n".join([HEAD.format(**document), *table(document["rows"]), ""])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| projection | M×N×K | at rest | | busy | |"
    yield "|---|---|---|---:|---|---:|"
    for row in rows:
        best = chosen(row)
        cells = [row["label"].rpartition(",")[0], "×".join(map(str, row["shape"]))]
        for name in ("burst_us", "us"):
            library = row[f"cublas_{name}"]
            cells += [timed(library, best and best[name]), f"{best[name] / library - 1:+.1%}" if best else ""]
        yield f"| {' | '.join(cells)} |"


def timed(library: float, best: float | None) -> str:
    return f"{library:.4g}" if best is None else f"{library:.4g} → {best:.4g}"


def sections() -> list[str]:
    return [section(json.loads(path.read_text())) for path in sorted(LAB.glob("*-cublas.json"))]


if __name__ == "__main__":
    print("\n".join(sections()))

"""The page of fp8 GEMMs beside DeepGEMM and cuBLAS, from the files of `benchmarks.fp8_gemm` and `benchmarks.fp8_grouped`.

python -m benchmarks.fp8_page > docs/fp8-gemms.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAB = Path(__file__).parent / "lab"
DENSE, GROUPED = LAB / "h200-fp8-gemm.json", LAB / "h200-fp8-grouped-deep-gemm.json"
HEAD = """# fp8 GEMMs beside DeepGEMM and cuBLAS

One {gpu}, torch {torch}, Triton {triton}, sgl-deep-gemm 0.1.4.post1, CUDA graphs, weights cold, one run for all columns of a
table. `benchmarks/fp8_gemm.py` and `benchmarks/fp8_grouped.py` measure, and
`python -m benchmarks.fp8_page > docs/fp8-gemms.md` writes this page. Each result is compared with the product
of the dequantized operands before it is timed.

## Dense, of Qwen3-32B on two GPUs, µs

Weights in blocks of 128 x 128, rows in fp8 with a scale for 128 columns, given before the call; cuBLAS by rows has one scale
for a row and one for a column: another format. The last column is DeepGEMM's time over weft's: above 1 weft is faster.

| N x K | M | bf16, cuBLAS | rows, cuBLAS | blocks, cuBLAS | DeepGEMM | weft | DeepGEMM / weft |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
BETWEEN = """
## Experts of Qwen3-30B-A3B, µs

128 experts, 8 for a token, hidden 2,048, features 768. weft's first GEMM gathers the tokens' rows, applies SiLU and product,
and writes its result in fp8; its second reads that. DeepGEMM's rows lie expert by expert before the clock starts, and its times
are the times of the GEMMs alone ("contiguous": an expert's rows begin at a multiple of 128): less than a layer takes.

| tokens | GEMM | weft bf16 | weft fp8 | DeepGEMM, GEMM alone | DeepGEMM / weft fp8 |
|---:|---|---:|---:|---:|---:|
"""
TAIL = """
weft is faster at one row of all dense shapes, DeepGEMM at 64 and 128 rows of most, by up to 20 %, and at 4,096 rows by 10 %:
there weft calls cuBLAS's block form. At 4,096 tokens DeepGEMM's grouped GEMMs take two thirds of weft's time, without gathering
and SiLU.
"""


def times(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[tuple, dict[str, float]]:
    """Time of each provider by the fields `keys`, where it ran."""
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if "us" in row:
            found.setdefault(tuple(row[key] for key in keys), {})[row["provider"]] = row["us"]
    return found


def cell(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def page() -> str:
    dense, grouped = json.loads(DENSE.read_text()), json.loads(GROUPED.read_text())
    lines = [HEAD.format(**{name: dense[name] for name in ("gpu", "torch", "triton")}).rstrip("\n")]
    kept = [row for row in dense["rows"] if not row.get("gated")]
    for (N, K, M), us in times(kept, ("N", "K", "M")).items():
        names = "cublas bf16", "cublas row fast x8", "cublas block x8", "deep_gemm x8", "auto x8"
        cells = [cell(us.get(name)) for name in names]
        lines.append(f"| {N} x {K} | {M} | {' | '.join(cells)} | {cell(us['deep_gemm x8'] / us['auto x8'], 2)} |")
    lines.append(BETWEEN.rstrip("\n"))
    for (tokens, gemm), us in times(grouped["rows"], ("tokens", "gemm")).items():
        alone = us.get("deep_gemm contiguous", us.get("deep_gemm contiguous, GEMMs alone"))
        label = {"gate_up": "gate and up", "down": "down", "layer": "both"}[gemm]
        ratio = cell(alone / us["fp8"], 2) if alone else "–"
        lines.append(f"| {tokens} | {label} | {cell(us['bf16'])} | {cell(us['fp8'])} | {cell(alone)} | {ratio} |")
    return "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    print(page(), end="")

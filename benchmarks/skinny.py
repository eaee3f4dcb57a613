"""Table of small-M GEMMs from benchmarks/lab: ``python benchmarks/skinny.py`` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.bench.harness.limits import GPUS

LAB = Path(__file__).resolve().parent / "lab"
SITUATIONS = ("alone", "after norm", "after wait")
HEAD = """## Small-M GEMMs

Projections of Qwen3-32B as sharded over W ranks, bf16, cold weights, in CUDA graphs: microseconds, cuBLAS / weft's small-M
kernel, the faster one bold. *Alone*: one GEMM after another. *After norm*: an RMSNorm and the GEMM. *After wait*: an RMSNorm
that takes {wait_us} µs longer, like an all-reduce, and the GEMM; weft's kernel starts and prefetches weights meanwhile.
*Floor*: the weight at {gbps:.0f} GB/s. *Chosen*: the choice of `ops.matmul` and `ops.matmul_silu_mul`; cuBLAS's gate-up and
silu are two kernels.

- GPU: {gpu}; torch {torch}, CUDA {cuda}, Triton {triton}; measured {date}; weft {revision}
- `{command}`
"""


def section(document: dict[str, Any]) -> str:
    """Section of docs/performance/gemms.md for one file."""
    note = [document["note"], ""] if "note" in document else []
    gbps = GPUS[document["gpu"]].memory / 1e9
    return "\n".join([HEAD.format(**document, gbps=gbps), *note, *table(document["rows"], gbps), ""])


def table(rows: list[dict[str, Any]], gbps: float) -> Iterator[str]:
    titles = ["W", "projection", "N×K", "M", "floor", *SITUATIONS, "chosen"]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join(['---'] * len(titles))}|"
    for row in rows:
        floor_us = 2 * row["N"] * row["K"] / gbps / 1e3
        cells = [row["world_size"], row["projection"], f"{row['N']}×{row['K']}", row["M"], f"{floor_us:.1f}"]
        cells += [pair(row["us"]["cublas"][name], row["us"]["skinny"][name]) for name in SITUATIONS]
        yield f"| {' | '.join(map(str, cells))} | {row['chosen']} |"


def pair(library: float, skinny: float) -> str:
    shown = [f"{library:.1f}", f"{skinny:.1f}"]
    if shown[0] != shown[1]:
        faster = int(skinny < library)
        shown[faster] = f"**{shown[faster]}**"
    return " / ".join(shown)


def sections() -> list[str]:
    return [section(json.loads(path.read_text())) for path in sorted(LAB.glob("*-skinny.json"))]


if __name__ == "__main__":
    print("\n".join(sections()))

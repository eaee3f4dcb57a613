"""The table of products of few rows, from benchmarks/lab/*-skinny.json: ``python benchmarks/skinny.py`` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAB = Path(__file__).resolve().parent / "lab"
SITUATIONS = ("alone", "after norm", "after wait")
HEAD = """## Products of few rows

Projections of Qwen3-32B as one rank of W holds them, bf16, weights cold, in CUDA graphs: microseconds, cuBLAS / weft's kernel
for few rows, the faster one bold. *Alone*: one product behind another. *After norm*: an RMSNorm and the product. *After wait*:
an RMSNorm that takes {wait_us} µs longer, as an all-reduce does, and the product; weft's kernel comes up and fetches weights
meanwhile. *Floor*: the weight at {gbps} GB/s. *Gets*: what `ops.matmul` and `ops.matmul_silu_mul` choose; cuBLAS's gate-up
and silu is two kernels.

- GPU: {gpu}; torch {torch}, CUDA {cuda}, Triton {triton}; measured {date}
- `{command}`
"""


def section(document: dict[str, Any]) -> str:
    """One file as a section of docs/performance.md."""
    note = [document["note"], ""] if "note" in document else []
    return "\n".join([HEAD.format(**document), *note, *table(document["rows"]), ""])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    titles = ["W", "projection", "N×K", "M", "floor", *SITUATIONS, "gets"]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join(['---'] * len(titles))}|"
    for row in rows:
        cells = [row["world_size"], row["projection"], f"{row['N']}×{row['K']}", row["M"], f"{row['floor_us']:.1f}"]
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

"""Designs of gated small-M GEMMs by the number of tiles that an SM has: one H200, weights cold, in CUDA graphs.

    python -m benchmarks.lab.gated_rounds OUT.json [--seconds 60]
    python -m benchmarks.lab.gated_rounds --table        # of benchmarks/lab/h200-gated-rounds.json

Rows with a deferred RMS scale times gate and up of Qwen3.6-27B and Qwen3-14B (8704 columns at two ranks, 17408 at one) and of
Qwen3-32B at two (12800); tiles of 64 columns of each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.delta_and_latents import draw
from benchmarks.measuring import Rows, copies, timed
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.ops import silu_mul
from weft.ops.gemm import small_m
from weft.ops.gemm.small_m_rule import MAX_ROWS, SmallM

COLUMNS, HIDDEN, ROWS = (8704, 12800, 17408), 5120, (4, 32, 64, 128)
# block_n, block_k, num_stages, and of 128 rows num_warps
OF_128 = (
    (64, 64, 7, 8), (64, 64, 3, 8), (64, 64, 2, 8), (64, 64, 3, 4), (64, 64, 4, 4), (64, 128, 2, 4), (32, 64, 5, 8),
    (32, 64, 4, 4),
)  # fmt: skip
TILES = (
    (64, 128, 4), (64, 128, 3), (64, 128, 2), (64, 64, 7), (64, 64, 6), (64, 64, 5), (64, 64, 4), (64, 64, 3), (32, 128, 3),
    (32, 128, 2), (32, 64, 4), (32, 64, 5),
)  # fmt: skip
FILE = Path(__file__).resolve().parent / "h200-gated-rounds.json"


def measured(deadline: float) -> Iterator[dict[str, Any]]:
    for columns in COLUMNS:
        for rows in ROWS:
            x, squares = draw(rows, HIDDEN), torch.rand(rows, 10, device="cuda")
            weights = copies(lambda columns=columns: draw(2 * columns, HIDDEN), 4 * columns * HIDDEN)
            operand = ScaledMatrix(x, RowScales(squares, 1e-6))
            shape = {"M": rows, "N": columns, "K": HIDDEN}
            if rows > MAX_ROWS:
                library = timed(lambda w, x=x: silu_mul(x @ w.T), weights, None)
                yield {**shape, "design": "cublas, silu_mul", "us": library["us"]}
            for block_n, block_k, stages, *warps in OF_128 if rows > MAX_ROWS else TILES:
                if time.monotonic() > deadline:
                    return
                block = {"block_m": max(16, rows), "block_n": block_n, "block_k": block_k, "num_stages": stages}
                design = SmallM(**block, num_warps=warps[0] if warps else 4, transposed=True)
                result = timed(lambda w, d=design, x=operand: small_m.run(x, w, d, activation="silu"), weights, None)
                yield {**shape, **block, "num_warps": design.num_warps, "us": result["us"]}


def design_of(row: dict[str, Any]) -> str:
    if "design" in row:
        return row["design"]
    warps = f", {row['num_warps']} warps" if row["M"] > MAX_ROWS else ""
    return f"{row['block_n']}, {row['block_k']}, {row['num_stages']}{warps}"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| N | M | block_n, block_k, stages: µs |\n|---|---|---|"
    for shape in dict.fromkeys((row["N"], row["M"]) for row in rows):
        mine = sorted((row for row in rows if (row["N"], row["M"]) == shape), key=lambda row: row["us"])
        designs = (f"{design_of(row)}: {row['us']:.1f}" for row in mine)
        yield f"| {shape[0]} | {shape[1]} | {'; '.join(designs)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print("\n".join(table(json.loads(FILE.read_text())["rows"])))
        return
    if chosen.out is None:
        parser.error("name the file of the result, or pass --table")
    results = Rows(chosen.out)
    for row in measured(time.monotonic() + chosen.seconds):
        results.add(row)


if __name__ == "__main__":
    main()

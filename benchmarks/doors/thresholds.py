"""Work from which an eager call pays on weft, by op, from the results of `weft bench --eager`.

    python -m benchmarks.doors.thresholds [benchmarks/results/h200-x2-eager]

Prints `EAGER_FROM` of weft/integrations/fallback.py: the least measured work from which on weft is at least as fast as every
other provider, by calls in a row where they were measured, by single calls in older results. A test holds the rule to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results/h200-x2-eager"
FILES = {
    "all_gather_matmul": "ag-gemm", "matmul_reduce_scatter": "gemm-rs", "matmul_all_reduce": "gemm-ar",
    "all_reduce": "all-reduce",
}  # fmt: skip


def work_of(shape: tuple[int, ...]) -> int:
    """FLOP of a rank's GEMM (M, N, K), or bytes."""
    return shape[0] if len(shape) == 1 else 2 * shape[0] * shape[1] * shape[2]


def eager_us(row: dict[str, Any]) -> float | None:
    return row.get("eager_row_us") or row["eager_us"]


def ahead(folder: Path, op: str) -> dict[tuple[int, ...], bool]:
    """Measured shapes of an op, and True where no other provider's eager call is faster than weft's."""
    times: dict[tuple[int, ...], dict[str, tuple[str, float | None]]] = {}
    for report in json.loads((folder / f"{FILES[op]}.w2.json").read_text())["reports"]:
        for row in report["rows"]:
            times.setdefault(tuple(row["shape"]), {})[row["provider"]] = row["role"], eager_us(row)
    wins = {}
    for shape, by_provider in times.items():
        others = [us for role, us in by_provider.values() if role == "other" and us]
        ours = by_provider["weft.auto"][1]
        wins[shape] = ours is not None and ours <= min(others)
    return wins


def threshold(wins: dict[tuple[int, ...], bool]) -> int | None:
    """Least work from which on all shapes are won; None if the largest is lost."""
    paying = [shape for shape in wins if all(won for other, won in wins.items() if work_of(other) >= work_of(shape))]
    return min(map(work_of, paying), default=None)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for name in FILES:
        won = ahead(where, name)
        shapes = [shape for shape in won if work_of(shape) == threshold(won)]
        print(f"{name}: {threshold(won)}, from {shapes or 'nowhere'} on; won {[shape for shape in won if won[shape]]}")

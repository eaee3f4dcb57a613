"""Compare the reports of two trees that ran in turn on one machine: a table of ratios, new over old.

    weft bench OP… --out RUNS/old.1                    in the old tree, then in the new one: RUNS/new.1, RUNS/old.2, …
    python -m benchmarks.two_trees RUNS [--json FILE]  the table as Markdown; the rows as JSON

A row is one op or step, shape, provider and way of timing. Its time in a tree is the median over that tree's runs; the spread
is the largest ratio between two runs of one tree. Rows of providers that only one tree has are left out, and counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.bench.harness.report import RENAMED  # older trees have the former names
from weft.runtime.files import put

# Times of a report's row: alone in a CUDA graph, in a row, without a graph.
TIMES = {"median_us": "alone", "chain_us": "in a row", "eager_us": "eager"}
Key = tuple[str, str, str, str]


def times_of(folder: Path) -> dict[Key, float]:
    """Microseconds by (op, shape, provider, way of timing) of all reports in a folder."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        for report in json.loads(file.read_text())["reports"]:
            op = report["op"] + (f" {report['subject']}" if report.get("subject") else "")
            for row in report["rows"]:
                for field, way in TIMES.items():
                    if row.get(field):
                        provider = RENAMED.get(row["provider"], row["provider"])
                        found[op, row["label"], provider, way] = row[field]
    return found


def compared(runs: Path) -> tuple[list[dict[str, Any]], int]:
    """(rows that both trees have, number of rows that one tree has alone)."""
    by_tree: dict[str, dict[Key, list[float]]] = {"old": defaultdict(list), "new": defaultdict(list)}
    for folder in sorted(runs.iterdir()):
        tree = folder.name.partition(".")[0]
        if tree in by_tree:
            for key, us in times_of(folder).items():
                by_tree[tree][key].append(us)
    old, new = by_tree["old"], by_tree["new"]
    rows = []
    for key in [key for key in old if key in new]:
        spread = max(max(times) / min(times) for times in (old[key], new[key]))
        before, after = statistics.median(old[key]), statistics.median(new[key])
        names = dict(zip(("op", "shape", "provider", "timing"), key, strict=True))
        times = {"old_us": round(before, 2), "new_us": round(after, 2), "ratio": round(after / before, 4)}
        rows.append(names | times | {"spread": round(spread, 4)})
    return rows, len(old.keys() ^ new.keys())


def geometric_mean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def table(rows: list[dict[str, Any]], worst: int = 8) -> str:
    """Markdown: the geometric mean by op and way of timing, then the worst and best rows."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        groups[row["timing"], row["op"]].append(row["ratio"])
        groups[row["timing"], "all"].append(row["ratio"])
    lines = ["| timing | op | rows | geometric mean | worst | best |", "|---|---|---|---|---|---|"]
    for (way, op), ratios in sorted(groups.items()):
        cells = (way, op, len(ratios), f"{geometric_mean(ratios):.4f}", f"{max(ratios):.3f}", f"{min(ratios):.3f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    ordered = sorted((row for row in rows if row["timing"] != "eager"), key=lambda row: row["ratio"])
    lines += ["", "| row | timing | old µs | new µs | ratio | spread of a tree |", "|---|---|---|---|---|---|"]
    for row in (*reversed(ordered[-worst:]), *ordered[:worst]):
        what = f"{row['op']} {row['shape']}, {row['provider']}"
        cells = (what, row["timing"], row["old_us"], row["new_us"], row["ratio"], row["spread"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder with the runs: old.1, new.1, old.2, …")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--note", default="", help="what ran, for the JSON")
    options = parser.parse_args()
    rows, alone = compared(options.runs)
    print(table(rows))
    print(f"\n{len(rows)} rows; {alone} of one tree alone")
    if options.json:
        lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
        put(options.json, f'{{"note": {json.dumps(options.note)}, "rows": [\n {lines}\n]}}\n')


if __name__ == "__main__":
    main()

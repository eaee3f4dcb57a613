"""Generator of the tables in docs/check.md: ``python -m tests.zoo.table`` writes them.

The zoo and the kinds come from the code, the sweep and the cost from benchmarks/results/check/{sweep,sweep-table,cost}.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.zoo.catalogue import EXHIBITS
from weft.check.detector.findings import REMEDIES

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "check.md"
RESULTS = ROOT / "benchmarks" / "results" / "check"


def zoo() -> str:
    rows = ["| bug | finding | example |", "|---|---|---|"]
    for case in sorted(EXHIBITS, key=lambda case: case.main.__module__):  # not the order of imports
        module = case.main.__module__.rpartition(".")[2]
        star = " *" if case.published else ""
        rows.append(f"| {case.what}{star} | `{case.kind}` | `{module}.{case.name}` |")
    return "\n".join(rows)


def kinds() -> str:
    rows = ["| kind | remedy |", "|---|---|"]
    return "\n".join(rows + [f"| `{kind}` | {remedy} |" for kind, remedy in REMEDIES.items()])


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def sweep() -> str:
    """Table of the schedules of each op by world size, and of its calls with findings."""
    listed, table = result("sweep"), result("sweep-table")
    sizes = sorted({row["world_size"] for row in listed["swept"]})
    rows = [f"| op | {' | '.join(f'W = {size}' for size in sizes)} | findings |", "|---" * (len(sizes) + 2) + "|"]
    for op in dict.fromkeys(row["op"] for row in listed["swept"]):
        mine = {row["world_size"]: row for row in listed["swept"] if row["op"] == op}
        found = sum(len(row["findings"]) for row in mine.values())
        rows.append(f"| {op} | {' | '.join(str(mine[size]['schedules']) for size in sizes)} | {found} |")
    return "\n".join([*rows, "", *(_totals(swept) for swept in (listed, table))])


def _totals(swept: dict[str, Any]) -> str:
    rows = swept["swept"]
    schedules, hours = sum(row["schedules"] for row in rows), sum(row["seconds"] for row in rows) / 3600
    wrong = sum(bool(row["findings"]) for row in rows)
    what = f"{len(rows)} calls, {schedules:,} schedules, {wrong} with findings, {hours:.1f} hours of one core"
    return f"- `{swept['command']}`, {swept['date']}, {swept['revision']}: {what}"


def cost() -> str:
    rows = ["| four ranks | not checked | checked | ratio | peak memory |", "|---|---|---|---|---|"]
    for name, row in result("cost").items():
        seconds = f"{row['plain_s']:.2f} s | {row['watched_s']:.2f} s"
        rows.append(f"| {name.replace('_', ' ')} | {seconds} | {row['ratio']:.1f} x | {row['peak_mib']:.0f} MiB |")
    return "\n".join(rows)


def with_tables(text: str) -> str:
    """Text of the page with the tables between ``<!-- NAME -->`` and ``<!-- end -->`` regenerated."""
    for name, make in (("zoo", zoo), ("kinds", kinds), ("sweep", sweep), ("cost", cost)):
        head, found, rest = text.partition(f"<!-- {name} -->\n")
        assert found, f"{PAGE.name} has no <!-- {name} -->"
        tail = rest.partition("<!-- end -->")[2]
        text = f"{head}<!-- {name} -->\n{make()}\n<!-- end -->{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

"""Generator of the tables in docs/check.md, check-kinds.md and zoo.md: ``python -m tests.zoo.table`` writes them.

The zoo and the kinds come from the code, the sweep and the cost from benchmarks/results/check/{sweep,sweep-table,cost}.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.check.goals import GOALS
from tests.check.sweep import calls
from tests.zoo.catalogue import EXHIBITS
from weft.check.detector.findings import REMEDIES

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "check"


def zoo() -> str:
    rows = ["| bug | finding | example |", "|---|---|---|"]
    for case in sorted(EXHIBITS, key=lambda case: case.main.__module__):  # not the order of imports
        module = case.main.__module__.rpartition(".")[2]
        star = f" ({case.source})" if case.source else " *" if case.published else ""
        rows.append(f"| {case.what}{star} | `{case.kind}` | `{module}.{case.name}` |")
    return "\n".join(rows)


def kinds() -> str:
    rows = ["| kind | remedy |", "|---|---|"]
    return "\n".join(rows + [f"| `{kind}` | {remedy} |" for kind, remedy in REMEDIES.items()])


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def sweep() -> str:
    """Table of the schedules of each op at each shape, with goals that are not reached, and the totals."""
    listed = result("sweep")
    found = {(row["op"], row["world_size"], row["node_size"]): row for row in listed["swept"]}
    goals = {
        (call.name, goal.world_size, goal.node_size): goal.schedules
        for goal in reversed(GOALS)  # the first one counts
        for call in calls(False, goal.world_size, goal.node_size)
        if call.name.startswith(goal.prefixes)
    }
    revisions = list(dict.fromkeys(row["revision"] for row in listed["swept"]))
    marks = {one: f" ({chr(97 + at)})" if len(revisions) > 1 else "" for at, one in enumerate(revisions)}
    parts = []
    for over_nodes in (False, True):
        keys = [key for key in {**goals, **found} if (key[2] is not None) is over_nodes]
        shapes = sorted({key[1:] for key in keys}, key=lambda shape: (shape[0], shape[1] or 0))
        heads = [f"{size // node_size} x {node_size}" if node_size else f"W = {size}" for size, node_size in shapes]
        parts += [f"| op | {' | '.join(heads)} | findings |", "|---" * (len(heads) + 2) + "|"]
        for op in dict.fromkeys(key[0] for key in keys):
            mine = [(op, *shape) for shape in shapes]
            cells = [_cell(found.get(key), goals.get(key, 0), marks) for key in mine]
            findings = sum(len(found[key]["findings"]) for key in mine if key in found)
            parts.append(f"| {op} | {' | '.join(cells)} | {findings} |")
        parts.append("")
    below = [key for key, wanted in goals.items() if key not in found or found[key]["schedules"] < wanted]
    parts.append(f"{len(goals) - len(below)} of {len(goals)} goals are reached.\n")
    for revision in revisions:
        total = _sum([row for row in listed["swept"] if row["revision"] == revision])
        parts.append(f"-{marks[revision]} {revision}: {total}")
    table = result("sweep-table")
    parts.append(f"- `{table['command']}`, {table['date']}, {table['revision']}: {_sum(table['swept'])}")
    return "\n".join(parts)


def _cell(row: dict[str, Any] | None, wanted: int, marks: dict[str, str]) -> str:
    """Schedules of a call, of how many if the goal asks for more, and its revision's mark; empty without row and goal."""
    count, mark = (row["schedules"], marks[row["revision"]]) if row else (0, "")
    return (f"{count} of {wanted}" if count < wanted else str(count or "")) + mark


def _sum(rows: list[dict[str, Any]]) -> str:
    schedules, hours = sum(row["schedules"] for row in rows), sum(row["seconds"] for row in rows) / 3600
    wrong = sum(bool(row["findings"]) for row in rows)
    return f"{len(rows)} calls, {schedules:,} schedules, {wrong} with findings, {hours:.1f} hours of one core"


def cost() -> str:
    rows = ["| four ranks | not checked | checked | ratio | peak memory |", "|---|---|---|---|---|"]
    document = result("cost")
    for name, row in document["rows"].items():
        seconds = f"{row['plain_s']:.2f} s | {row['watched_s']:.2f} s"
        rows.append(f"| {name.replace('_', ' ')} | {seconds} | {row['ratio']:.1f} x | {row['peak_mib']:.0f} MiB |")
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    rows += ["", f"`{document['command']}`, {document['date']}, weft {document['revision']}; {versions}."]
    return "\n".join(rows)


TABLES = {
    ROOT / "docs" / "check.md": {"cost": cost},
    ROOT / "docs" / "check-kinds.md": {"kinds": kinds},
    ROOT / "docs" / "zoo.md": {"sweep": sweep, "zoo": zoo},
}


def with_tables(page: Path) -> str:
    """Text of a page with its tables between ``<!-- NAME -->`` and ``<!-- end -->`` regenerated."""
    text = page.read_text()
    for name, make in TABLES[page].items():
        head, found, rest = text.partition(f"<!-- {name} -->\n")
        assert found, f"{page.name} has no <!-- {name} -->"
        tail = rest.partition("<!-- end -->")[2]
        text = f"{head}<!-- {name} -->\n{make()}\n<!-- end -->{tail}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(with_tables(page))

"""Write docs/performance.md and its plots from the JSON files: ``python benchmarks/performance.py``.

Everything in it comes from benchmarks/results/<machine>/*.json; nothing is typed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from weft.bench.plot import svg
from weft.bench.report import Report, read
from weft.bench.shapes import OPS
from weft.bench.table import markdown, sheet

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Performance

<!-- Written by `python benchmarks/performance.py` from benchmarks/results; do not edit. -->

Every provider's answer is checked against fp32 before it is timed, and rows where weft is slower stand with the others.
A time is the median of single calls, the maximum over the ranks.
"""


def document(machines: dict[str, list[Report]], pictures: str, notes: dict[str, str]) -> str:
    """The page. ``machines``: name of the results folder -> its reports; ``pictures``: where the page finds plots;
    ``notes``: what a reader must know of a folder's figures (its note.md)."""
    parts = [HEAD]
    for machine, reports in machines.items():
        parts.append(f"## {machine}\n")
        parts.append(f"{described(reports)}\n")
        if machine in notes:
            parts.append(f"{notes[machine]}\n")
        for report in sorted(reports, key=lambda report: OPS.index(report.op)):
            made = sheet(report)
            parts.append(f"### {made.title}\n")
            parts.append(f"![{report.op}]({pictures}/{picture(machine, report)})\n")
            parts.append(f"{markdown(made)}\n")
    return "\n".join(parts)


def described(reports: list[Report]) -> str:
    """Versions, dates, commands and protocol; what is the same in all reports once."""
    lines = []
    for key, name in (("gpu", "GPU"), ("driver", "driver"), ("torch", "torch"), ("cuda", "CUDA"), ("triton", "Triton"),
                      ("nccl", "NCCL"), ("revision", "weft")):  # fmt: skip
        values = dict.fromkeys(str(report.machine.get(key)) for report in reports)
        lines.append(f"- {name}: {', '.join(values)}")
    dates = sorted({report.date[:10] for report in reports})
    lines.append(f"- measured: {', '.join(dates)}")
    lines += [f"- `{command}`" for command in dict.fromkeys(report.command for report in reports) if command]
    protocol: dict[str, dict[str, None]] = {}
    for report in reports:
        for key, value in report.protocol.items():
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
            protocol.setdefault(key, {})[text] = None
    lines += [f"- {key}: {'; '.join(values)}" for key, values in protocol.items()]
    return "\n".join(lines)


def picture(machine: str, report: Report) -> str:
    return f"{machine}-{report.op}-w{report.world_size}-{report.dtype}.svg"


def main(results: Path = ROOT / "benchmarks" / "results", page: Path = ROOT / "docs" / "performance.md") -> int:
    machines: dict[str, list[Report]] = {}
    for file in sorted(results.glob("*/*.json")):
        machines.setdefault(file.parent.name, []).extend(read(file))
    if not machines:
        print(f"weft: no results in {results}/<machine>/*.json; make some with benchmarks/run.py", file=sys.stderr)
        return 2
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for machine, reports in machines.items():
        for report in reports:
            (folder / picture(machine, report)).write_text(svg([report]))
    notes = {file.parent.name: file.read_text().strip() for file in results.glob("*/note.md")}
    page.write_text(document(machines, folder.name, notes))
    print(f"{page}: {sum(map(len, machines.values()))} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())

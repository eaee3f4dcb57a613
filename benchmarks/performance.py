"""Generator of docs/performance.md and its plots: ``python -m benchmarks.performance``.

All figures come from benchmarks/results/<machine>/OP.wW.json, and those of the GEMM tables from benchmarks/lab.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path

from benchmarks import large_products, skinny
from weft.bench.harness.report import Report, read, shapes_of
from weft.bench.models.names import LEVELS
from weft.bench.render.plot import svg
from weft.bench.render.table import markdown, sheets
from weft.runtime.files import put

# Of the page's sections.
ORDER = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "all-reduce-rms-norm", "gemm", "gemm-silu", "ag-gemm",
    "gemm-rs", "gemm-ar", *LEVELS,
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Performance

<!-- Written by `python -m benchmarks.performance` from benchmarks/results and benchmarks/lab; do not edit. -->

Every provider's answer is checked against fp32 before it is timed. Rows where weft is slower are included. A time is the median
of single calls, the maximum over the ranks. `of limit` is the time at the best rates measured on this hardware
(`weft/bench/limits.py`), divided by weft's time. Above each table are the commit of weft at the start of the run and git's name
of the sources that ran: `git rev-parse COMMIT:weft` prints it for every commit with these sources.
"""


def document(machines: dict[str, list[Report]], pictures: str, notes: dict[str, str], more: list[str]) -> str:
    """Text of the page.

    machines  name of the results folder -> its reports
    pictures  folder of the plots, relative to the page
    notes     notes on a folder's figures (its note.md)
    more      sections at the end
    """
    parts = [HEAD]
    for machine, reports in machines.items():
        parts.append(f"## {machine}\n")
        parts.append(f"{described(reports)}\n")
        if machine in notes:
            parts.append(f"{notes[machine]}\n")
        for report, picture in zip(*in_order(machine, joined(reports)), strict=True):
            made, *others = sheets(report)
            parts.append(f"### {made.title}\n")
            parts.append(f"weft {report.machine.get('revision')}, {report.date[:10]}\n")
            parts.append(f"![{report.op}]({pictures}/{picture})\n")
            parts.append(f"{markdown(made)}\n")
            for other in others:
                parts.append(f"#### {other.title}\n\n{markdown(other)}\n")
    return "\n".join([*parts, *more])


def described(reports: list[Report]) -> str:
    """Versions, dates, commands and protocol, with equal values of several reports once."""
    lines = []
    for key, name in (("gpu", "GPU"), ("driver", "driver"), ("torch", "torch"), ("cuda", "CUDA"), ("triton", "Triton"),
                      ("nccl", "NCCL")):  # fmt: skip
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


def joined(reports: list[Report]) -> list[Report]:
    """Reports of equal op, world size, dtype and model merged, if they have no shape in common.

    The times of a row come from one run in any case. Shapes measured twice stay in separate reports.
    """
    found: dict[tuple, list[Report]] = {}
    for report in reports:
        alike = found.setdefault((report.op, report.world_size, report.dtype, report.subject), [])
        shapes = set(shapes_of(report))
        place = next((at for at, other in enumerate(alike) if shapes.isdisjoint(shapes_of(other))), None)
        if place is None:
            alike.append(report)
        else:
            other = alike[place]
            named = [str(one.machine.get("revision")) for one in (other, report)]
            revisions = dict.fromkeys(", ".join(named).split(", "))
            machine = {**other.machine, "revision": ", ".join(revisions)}
            date, rows = max(other.date, report.date), [*other.rows, *report.rows]
            alike[place] = dataclasses.replace(other, machine=machine, date=date, rows=rows)
    return [report for alike in found.values() for report in alike]


def in_order(machine: str, reports: list[Report]) -> tuple[list[Report], list[str]]:
    """Reports of a machine in the order of the page, and the names of their pictures, numbered if equal."""
    ordered = sorted(reports, key=lambda report: ORDER.index(report.op))
    names: list[str] = []
    taken: Counter[str] = Counter()
    for report in ordered:
        subject = f"-{report.subject.replace(', ', '-').replace(' ', '')}" if report.subject else ""
        name = f"{machine}-{report.op}{subject}-w{report.world_size}-{report.dtype}"
        taken[name] += 1
        names.append(f"{name}.svg" if taken[name] == 1 else f"{name}-{taken[name]}.svg")
    return ordered, names


def main(results: Path = ROOT / "benchmarks" / "results", page: Path = ROOT / "docs" / "performance.md") -> int:
    machines: dict[str, list[Report]] = {}
    for file in sorted(results.glob("*/*.w*.json")):
        machines.setdefault(file.parent.name, []).extend(read(file))
    if not machines:
        print(f"weft: no results in {results}/<machine>/OP.wW.json; make some with benchmarks/run.py", file=sys.stderr)
        return 2
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = set()
    for machine, reports in machines.items():
        for report, picture in zip(*in_order(machine, joined(reports)), strict=True):
            put(folder / picture, svg([report]))
            drawn.add(picture)
    for stale in folder.glob("*.svg"):
        if stale.name not in drawn:
            stale.unlink()
    notes = {file.parent.name: file.read_text().strip() for file in results.glob("*/note.md")}
    put(page, document(machines, folder.name, notes, [*skinny.sections(), *large_products.sections()]))
    print(f"{page}: {sum(len(joined(reports)) for reports in machines.values())} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())

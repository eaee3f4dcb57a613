"""Speed-ups of many reports in a few lines: the summary of docs/performance.md, and the README's table."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence

from weft.bench.harness.report import Report, best_other, shapes_of, weft_row
from weft.bench.render.sheets import ratio

HEAD = """## Summary

Speed-ups in CUDA graphs over the fastest baseline of each row, the baselines (in brackets: in how many rows, if not in all),
and the rows where weft is slower.
"""
# The machine that comes first, and folders beside a machine's own that belong to it.
SHOWN, BESIDE = "h200-x2", ("-moe", "-moe-peers", "-long")
# Rows of the README's table: words, and the ops or (op, model) that a row joins.
IN_README = {
    "all-reduce, all-gather, reduce-scatter, all-to-all": ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    "AG-GEMM, GEMM-RS, GEMM-AR": ("ag-gemm", "gemm-rs", "gemm-ar"),
    "GEMMs of 1 to 128 rows, alone": ("gemm",),
    "attention over ranks": ("sharded-decode-attention", "gathered-prefill-attention"),
    "experts: dispatch and combine": ("moe-dispatch", "moe-dispatch+fp8", "moe-combine"),
    "experts: GEMMs with the communication under them": ("ag-moe", "moe-rs", "moe-ar-rms-norm"),
    "steps of Qwen3-32B": (("model", "qwen3-32b"),),
    "steps of Qwen3-8B": (("model", "qwen3-8b"),),
    "steps of Qwen3-30B-A3B": (("model", "qwen3-30b-a3b"),),
}
NUMBERS = {1: "One", 2: "Two", 4: "Four", 8: "Eight"}
Tables = dict[str, list[Report]]


def section(tables: Tables, pages: str, of_shown: bool) -> str:
    """A table for each machine, with a row for each report that has both weft and a baseline.

    tables    reports by folder
    pages     folder of the pages of ``tables`` with a slash, for links
    of_shown  True: the machine of SHOWN alone; False: the machines but that one
    """
    machines: dict[str, list[str]] = {}
    for name in dict.fromkeys((SHOWN, *tables)):
        if name in tables and re.fullmatch(rf".*-x\d+({'|'.join(BESIDE)})?", name):
            machines.setdefault(machine_of(name), []).append(name)
    lines = [HEAD]
    for machine, names in machines.items():
        if (machine == machine_of(SHOWN)) is not of_shown:
            continue
        rows = [
            row for name in names for report in tables[name] if (row := row_of(report, f"[{name}]({pages}{name}.md)"))
        ]
        if rows:
            lines += [f"### {machine}, summary\n"]
            lines += ["| op | page | beside | rows | least | geometric mean | most | slower |"]
            lines += ["|---|---|---|---:|---:|---:|---:|---|", *rows, ""]
    return "\n".join(lines)


def row_of(report: Report, link: str) -> str | None:
    """Row of a report; None without weft or without a baseline."""
    gains = gains_of(report)
    if not gains:
        return None
    slower = [weft_row(report, shape).label for shape, gain in gains.items() if gain < 1]
    cells = (
        subject_of(report),
        link,
        ", ".join(name if rows == len(gains) else f"{name} ({rows})" for name, rows in baselines(report).items()),
        *spread(gains.values()),
        "; ".join(slower) or "none",
    )
    return f"| {' | '.join(cells)} |"


def measured(tables: Tables) -> str:
    """The README's table: speed-ups of SHOWN's machine; where torch.compile ran at some shapes of a report, of these alone."""
    reports = [report for suffix in ("", *BESIDE) for report in tables.get(SHOWN + suffix, ())]
    lines = ["| | beside | rows | least | geometric mean | most |", "|---|---|---:|---:|---:|---:|"]
    for words, ops in IN_README.items():
        mine = [report for report in reports if report.op in ops or (report.op, report.subject) in ops]
        if gains := [gain for report in mine for gain in gains_of(beside_compile(report)).values()]:
            names = dict.fromkeys(name for report in mine for name in baselines(report))
            lines.append(f"| {words} | {', '.join(names)} | {' | '.join(spread(gains))} |")
    return "\n".join(lines) + "\n"


def machine_of(folder: str) -> str:
    """Its machine in words: "Two H200s" of h200-x2 and h200-x2-moe."""
    gpu, count = re.match(r"(\w+)-x(\d+)", folder).groups()
    return f"{NUMBERS.get(int(count), count)} {gpu.upper()}{'' if count == '1' else 's'}"


def subject_of(report: Report) -> str:
    return f"{report.op} of {report.subject}" if report.subject else report.op


def gains_of(report: Report) -> dict[tuple[int, ...], float]:
    """Speed-up over the fastest baseline, by shape, where both were timed."""
    found = {shape: ratio(weft_row(report, shape), best_other(report, shape)) for shape in shapes_of(report)}
    return {shape: gain for shape, gain in found.items() if gain is not None}


def spread(gains: Iterable[float]) -> Sequence[str]:
    """Cells: their number, the least, the geometric mean and the most."""
    found = list(gains)
    ends = (min(found), statistics.geometric_mean(found), max(found))
    return (str(len(found)), *(f"{gain:.2f}x" for gain in ends))


def beside_compile(report: Report) -> Report:
    """The rows of a step's report at the shapes that torch.compile ran; all if it ran at none."""
    timed = [row for row in report.rows if row.median_us is not None and row.provider.startswith("torch.compile")]
    shapes = {row.shape for row in timed} or set(shapes_of(report))
    return dataclasses.replace(report, rows=[row for row in report.rows if row.shape in shapes])


def baselines(report: Report) -> dict[str, int]:
    """In how many rows each was timed.

    Names are short: of layers and models without torch, of ops the libraries, but in full if weft's own is the baseline.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for row in report.rows:
        if row.role == "other" and row.median_us is not None:
            if report.subject:
                name = row.provider.removeprefix("torch.").replace("compile+", "+")
            elif row.provider.startswith("weft."):
                name = row.provider
            else:
                name = "+".join(part.split(".")[0] for part in row.provider.split("+"))
            shapes.setdefault(name, set()).add(row.shape)
    return {name: len(found) for name, found in shapes.items()}

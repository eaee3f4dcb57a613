"""Generator of docs/performance.md, the pages that it links, and the README's table: ``python -m benchmarks.performance``.

All figures come from benchmarks/results/<folder>/*.wW.json, and those of the GEMM tables from benchmarks/lab.
docs/performance.md has a summary of one machine and a few tables and pictures, docs/performance/summary.md the summary of
further machines, docs/performance/<folder>.md all of a folder; what repeats rows on further machines, compares designs or is
kept as a record is beside its results, benchmarks/results/<folder>/README.md.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks import large_products, predict, skinny, summary
from benchmarks.pages import write
from benchmarks.pictures import engines
from benchmarks.pictures.svg import DARK, LIGHT
from benchmarks.summary import SHOWN, Tables, machine_of, subject_of
from weft.bench.harness.report import Report, Row, best_other, shapes_of, weft_row
from weft.bench.names import MEASURED
from weft.bench.render.plot import svg
from weft.bench.render.sheets import (
    NONE,
    Sheet,
    cell,
    fill_header,
    fill_of,
    label_of,
    limit_of,
    plain,
    ratio,
    sheets,
    spread,
    title_of,
)
from weft.bench.render.table import markdown
from weft.bench.workloads import read, workload_of
from weft.runtime.files import put

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, README = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md", ROOT / "README.md"
GENERATED = (
    "<!-- Written by `python -m benchmarks.performance` from benchmarks/results and benchmarks/lab; do not edit. -->\n"
)
# Folders whose pages lie beside their results, and how a link of such a page reaches docs/performance.
BESIDE_RESULTS = re.compile(r".*-(machines|designs|recorded|other-shapes)")
TO_DOCS = "../../../docs/"
# The ops of SHOWN that have tables on the front page.
SHOWN_OPS = ("all-reduce", "ag-gemm", "gemm-ar", "gemm-rs", "model", "generate")
KEYS = (
    ("gpu", "GPU"),
    ("driver", "driver"),
    ("torch", "torch"),
    ("cuda", "CUDA"),
    ("triton", "Triton"),
    ("nccl", "NCCL"),
)


# --- docs/performance.md -------------------------------------------------------------------------------------------------


def front_page(tables: Tables, notes: dict[str, str], pages: str) -> str:
    """Tables of docs/performance.md.

    tables  reports by folder, joined
    pages   folder of the other pages, relative to it, with a slash
    """
    parts = [summary.section(tables, pages, of_shown=True)]
    parts.append(f"Further machines: [summary]({pages}summary.md).\n")
    shown = [report for report in tables.get(SHOWN, ()) if report.op in SHOWN_OPS]
    if shown:
        parts.append(f"## {machine_of(SHOWN)}\n")
        parts.append(f"Other ops, all providers, breakdowns, versions and commands: [{SHOWN}]({pages}{SHOWN}.md).\n")
    for report in shown:
        parts.append(f"### {title_of(report)}\n\n{provenance(report)}\n\n{markdown(compact(report)).rstrip()}\n")
    parts.append("## All pages\n")
    for name, reports in tables.items():
        first = notes.get(name, "").removeprefix("**Notes.** ").replace("\n", " ").split(". ")[0].rstrip(".")
        if is_main(name) or not first:
            first = ", ".join(dict.fromkeys(subject_of(report) for report in reports))
        place = f"../benchmarks/results/{name}/README.md" if BESIDE_RESULTS.fullmatch(name) else f"{pages}{name}.md"
        parts.append(f"- [{name}]({place}): {first}.")
    parts.append(f"- [gemms]({pages}gemms.md): small-M GEMMs, and cuBLAS's choice of algorithm for large ones.")
    parts.append(
        f"- [prediction]({pages}prediction.md): 8 to 64 GPUs by a model of the ops' schedules, with its errors.\n"
    )
    return "\n".join(parts)


def is_main(folder: str) -> bool:
    return re.fullmatch(r".*-x\d+", folder) is not None


def compact(report: Report) -> Sheet:
    """Table with weft's choice beside the fastest baseline."""
    milli = workload_of(report).in_milliseconds
    rows = []
    for shape in shapes_of(report):
        ours, other = weft_row(report, shape), best_other(report, shape)
        limit, share = limit_of(report, shape, ours)
        rows.append(
            (
                label_of(report, shape),
                *timed(ours, milli),
                NONE if other is None else other.provider,
                *timed(other, milli),
                plain(ratio(ours, other), "{:.2f}x"),
                *fill_of(report, shape),
                limit,
                plain(share, "{:.0%}"),
            )
        )
    full = sheets(report)[0]
    unit = "ms" if milli else "µs"
    header = (
        full.header[0],
        f"weft, {unit}",
        "p10–p90",
        "fastest baseline",
        unit,
        "p10–p90",
        "speed-up",
        *fill_header(report),
        *full.header[-2:],
    )
    notes = [note for note in full.notes if note.startswith(("weft", "*"))]
    return Sheet(title=full.title, header=header, rows=tuple(rows), slower=frozenset(), notes=tuple(notes))


def timed(row: Row | None, milli: bool) -> tuple[str, str]:
    if row is None:
        return NONE, NONE
    return cell(dataclasses.replace(row, eager_us=None), milli), spread(row, milli)


# --- pages of folders ----------------------------------------------------------------------------------------------------


def page(name: str, reports: list[Report], tables: list[Report], note: str, pictures: list[str]) -> str:
    """Text of docs/performance/<folder>.md, with all providers. ``tables``: the reports, joined."""
    parts = [f"# {name}\n", GENERATED, f"{described(reports)}\n", *([f"{note}\n"] if note else [])]
    for number, report in enumerate(tables):
        made, *others = sheets(report)
        parts.append(f"## {made.title}\n\n{provenance(report)}\n")
        if pictures and pictures[number]:
            parts.append(f"![{report.op}]({pictures[number]})\n")
        parts.append(f"{markdown(made)}\n")
        for other in others:
            parts.append(f"### {other.title}\n\n{markdown(other)}\n")
    return "\n".join(parts)


def provenance(report: Report) -> str:
    """Line with the sources, the date and the machine of a report."""
    machine = report.machine
    sources = machine.get("revision") or "of an unknown commit"
    place = f"{report.world_size} x {machine['gpu']}"
    if uuids := machine.get("uuid"):
        place += f" (first GPU of each machine: {uuids})" if ", " in uuids else f" (first GPU {uuids})"
    return f"weft {sources}; {report.date[:10]}; {place}"


def described(reports: list[Report]) -> str:
    """Versions, commands and protocol; where reports differ, with what they belong to."""
    lines = []
    for key, name in KEYS:
        lines += values_of(name, [(report, str(report.machine.get(key))) for report in reports])
    lines += [f"- `{command}`" for command in dict.fromkeys(report.command for report in reports) if command]
    for key in dict.fromkeys(key for report in reports for key in report.protocol):
        given = [(report, report.protocol[key]) for report in reports if key in report.protocol]
        if all(isinstance(value, float) for _, value in given):
            least, most = (f"{end(value for _, value in given):.2f}" for end in (min, max))
            lines.append(f"- {key}: {least}" if least == most else f"- {key}: {least} to {most}")
        else:
            lines += values_of(key, [(report, str(value)) for report, value in given])
    return "\n".join(lines)


def values_of(name: str, given: list[tuple[Report, str]]) -> list[str]:
    """A line for each value, the most frequent first; the others with their ops, or with the rows of an op that has several."""
    by_op: dict[str, Counter[str]] = {}
    for report, value in given:
        by_op.setdefault(report.op, Counter())[value] += len(report.rows)
    values: dict[str, dict[str, None]] = {}
    for report, value in given:
        [(usual, _)] = by_op[report.op].most_common(1)
        rows = "" if value == usual else " " + ", ".join(dict.fromkeys(row.label for row in report.rows))
        values.setdefault(value, {})[report.op + rows] = None
    first, *others = sorted(values, key=lambda value: -len(values[value]))
    return [f"- {name}: {first}", *(f"- {name} of {', '.join(values[value])}: {value}" for value in others)]


def joined(reports: list[Report]) -> list[Report]:
    """Reports of equal op, world size, dtype and model merged, if they have no shape in common.

    The times of a row come from one run in any case. A merged report names the commits and machines of all its runs. Shapes
    measured twice stay in separate reports.
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
            named = {
                key: listed(str(one.machine.get(key) or "") for one in (other, report)) for key in ("revision", "uuid")
            }
            machine, rows = {**other.machine, **named}, [*other.rows, *report.rows]
            alike[place] = dataclasses.replace(other, machine=machine, date=max(other.date, report.date), rows=rows)
    return [report for alike in found.values() for report in alike]


def listed(texts: Iterable[str]) -> str:
    """Texts separated by commas, each once; a text may be such a list itself."""
    return ", ".join(dict.fromkeys(part for text in texts for part in text.split(", ") if part))


def pictures_of(folder: str, reports: list[Report]) -> list[str]:
    """File names of the reports' pictures, numbered if equal; "" for baselines alone; none but for the main folders."""
    names: list[str] = []
    taken: Counter[str] = Counter()
    for report in reports if is_main(folder) else ():
        subject = f"-{report.subject.replace(', ', '-').replace(' ', '')}" if report.subject else ""
        name = f"{folder}-{report.op}{subject}-w{report.world_size}-{report.dtype}"
        if not any(row.role == "weft" for row in report.rows):
            names.append("")
            continue
        taken[name] += 1
        names.append(f"{name}.svg" if taken[name] == 1 else f"{name}-{taken[name]}.svg")
    return names


def reports_of(results: Path) -> Tables:
    """Reports by folder, in the order of ``weft bench``. ValueError for files of changed sources, and if there are none."""
    folders: Tables = {}
    for file in sorted(results.glob("*/*.w*.json")):
        for report in read(file):
            if "with changes" in str(report.machine.get("revision")) or report.machine.get("clean") is False:
                raise ValueError(f"{file} was measured on sources that no commit holds; measure it on a clean tree")
            folders.setdefault(file.parent.name, []).append(report)
    if not folders:
        raise ValueError(f"no results in {results}/<folder>/OP.wW.json; make some with weft bench --out")
    return {name: sorted(reports, key=lambda report: MEASURED.index(report.op)) for name, reports in folders.items()}


def texts(folders: Tables, tables: Tables, results: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """(tables of docs/performance.md, the pages in docs/performance by file name, those beside their results by folder).

    ``tables``: the reports of ``folders``, joined.
    """
    notes = {file.parent.name: file.read_text().strip() for file in results.glob("*/note.md")}
    pages, beside = {}, {}
    for name, reports in folders.items():
        text = page(name, reports, tables[name], notes.get(name, ""), pictures_of(name, tables[name]))
        if BESIDE_RESULTS.fullmatch(name):
            text = re.sub(r"\]\((?:\.\./)?([\w-]+\.md)", lambda link: f"]({TO_DOCS}{placed(link)}", text)
            beside[name] = text
        else:
            to_results = r"](../../benchmarks/results/\1/README.md"
            pages[f"{name}.md"] = re.sub(
                r"\]\(([\w-]+-(?:machines|designs|recorded|other-shapes))\.md", to_results, text
            )
    pages["summary.md"] = "\n".join(["# Further machines\n", GENERATED, summary.section(tables, "", of_shown=False)])
    model = predict.decode_section(results).replace("(performance/", "(")
    pages["prediction.md"] = "\n".join(["# Prediction for 8 to 64 GPUs\n", GENERATED, predict.page(results), model])
    pages["gemms.md"] = "\n".join(["# GEMMs\n", GENERATED, *skinny.sections(), *large_products.sections()])
    return front_page(tables, notes, "performance/"), pages, beside


def placed(link: re.Match[str]) -> str:
    """Path below docs/ of a link that was written for a page in docs/performance."""
    return link[1] if link[0].startswith("](../") else f"performance/{link[1]}"


def main(results: Path = RESULTS, front: Path = PAGE, readme: Path = README) -> int:
    try:
        folders = reports_of(results)
    except ValueError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    tables = {name: joined(reports) for name, reports in folders.items()}
    text, written, beside_results = texts(folders, tables, results)
    for name, content in beside_results.items():
        put(results / name / "README.md", content)
    for name, reports in tables.items():
        for picture, report in zip(pictures_of(name, reports), reports, strict=False):
            if picture:
                written[picture] = svg([report])
    written[predict.PICTURE] = predict.picture()
    write(front, {"tables": text})
    beside = engines.pairs()
    blocks = {"measured": summary.measured(tables), "engines": engines.table(beside)}
    write(readme, {name: block for name, block in blocks.items() if f"<!-- {name} -->" in readme.read_text()})
    for colours in (LIGHT, DARK):
        put(front.parent / "pictures" / f"engines-{colours.name}.svg", engines.picture(beside, colours))
    pages = front.with_suffix("")
    for name, content in written.items():
        put(pages / name, content)
    for stale in (file for file in pages.iterdir() if file.name not in written):
        stale.unlink()
    print(f"{front}: {sum(map(len, tables.values()))} tables in {len(tables)} folders")
    return 0


if __name__ == "__main__":
    sys.exit(main())

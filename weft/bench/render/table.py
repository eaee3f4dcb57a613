"""Reports as tables: pure functions, printed in colour or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weft.bench.harness.limits import GPUS, floor_us, limits_of, rate
from weft.bench.harness.report import Report, Row, best_other, providers_of, row_of, shapes_of, weft_row
from weft.bench.models.names import LEVELS
from weft.bench.ops.shapes import is_gemm

NONE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Title, header and cells as text.

    ``slower``: rows where weft loses; ``notes``: sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    slower: frozenset[int]
    notes: tuple[str, ...]


def sheets(report: Report) -> list[Sheet]:
    """All tables of a report; for a model benchmark also the breakdown, if it was measured."""
    if report.op not in LEVELS:
        return [sheet(report)]
    from weft.bench.render import model_table as levels  # it imports this module

    return [found for found in (levels.sheet(report), levels.breakdown_sheet(report)) if found is not None]


def sheet(report: Report) -> Sheet:
    """Table with each provider's time per shape, weft's speed-up, its rate and share of the limit."""
    providers, shapes = providers_of(report), shapes_of(report)
    unit = "TFLOP/s" if is_gemm(report.op) else "busbw GB/s"
    rows, slower = [], set()
    for number, shape in enumerate(shapes):
        ours, other = weft_row(report, shape), best_other(report, shape)
        found = {provider: row_of(report, shape, provider) for provider in providers}
        label = next(row.label for row in report.rows if row.shape == shape)
        if not label[0].isdigit() and len(shape) == 3:
            label = f"{label} ({'x'.join(map(str, shape))})"
        gain = speed_up(ours, other)
        if gain is not None and gain < 1:
            slower.add(number)
        rows.append(
            (
                label,
                *(_cell(found[provider]) for provider in providers),
                plain(gain, "{:.2f}x"),
                plain(_rate(report, ours), "{:.0f}"),
                plain(share_of_limit(report, ours), "{:.0%}"),
            )
        )
    machine = report.machine
    where = "simulated ranks" if report.is_simulated else f"{report.world_size} x {machine['gpu']}"
    title = f"{report.op}, {report.dtype}, world size {report.world_size} ({where}), µs"
    header = ("shape", *providers, "speed-up", unit, "of limit")
    return Sheet(
        title=title, header=header, rows=tuple(rows), slower=frozenset(slower), notes=tuple(_notes(report, providers))
    )


def speed_up(ours: Row | None, other: Row | None) -> float | None:
    if ours is None or other is None or not ours.median_us or not other.median_us:
        return None
    return other.median_us / ours.median_us


def share_of_limit(report: Report, row: Row | None) -> float | None:
    limits = limits_of(report.machine["gpu"])
    if row is None or not row.median_us:
        return None
    floor = floor_us(report.op, report.world_size, row.shape, report.dtype, limits)
    return None if floor is None else floor / row.median_us


def _rate(report: Report, row: Row | None) -> float | None:
    if row is None or not row.median_us or report.is_simulated:
        return None
    return rate(report.op, report.world_size, row.shape, report.dtype, row.median_us)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.median_us is None:
        if not row.reason:
            return "right"
        return "WRONG" if row.reason.startswith("wrong") else NONE
    alone = microseconds(row.median_us) + ("*" if row.mode == "eager" else "")
    if row.chain_us is not None:
        alone += f" ({microseconds(row.chain_us)})"
    return alone if row.eager_us is None or row.mode == "eager" else f"{alone} / {microseconds(row.eager_us)}"


def microseconds(value: float) -> str:
    """Number with about three digits: 3.26, 41.8, 752."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def plain(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _notes(report: Report, providers: Sequence[str]) -> list[str]:
    notes = about_machine(
        report, "Median of single calls, maximum over the ranks. Speed-up: weft.auto over the fastest baseline."
    )
    rows = report.rows
    if any(row.chain_us is not None for row in rows):
        notes.append("In brackets: per call of several in a row.")
    if any(row.eager_us is not None and row.mode != "eager" for row in rows):
        notes.append("After the slash: without a CUDA graph.")
    if any(row.mode == "eager" for row in rows):
        notes.append("*: could not be captured in a CUDA graph.")
    if any(row.role == "ceiling" for row in rows):
        ceilings = ", ".join(dict.fromkeys(row.provider for row in rows if row.role == "ceiling"))
        notes.append(f"{ceilings}: the GEMM alone, not the whole op.")
    return notes + reasons(report, providers)


def about_machine(report: Report, times: str) -> list[str]:
    """First notes below a table. ``times``: how the times on GPUs were taken."""
    if report.is_simulated:
        ran = any(row.max_abs_error is not None or _cell(row) not in ("", NONE) for row in report.rows)
        return [f"Simulated ranks: {'answers were checked' if ran else 'no answer was checked'}, times mean nothing."]
    gpu = report.machine["gpu"]
    unknown = f"No limits: rates are known for {', '.join(GPUS)}, not for {gpu}."
    return [times] if limits_of(gpu) is not None else [times, unknown]


def reasons(report: Report, providers: Sequence[str]) -> list[str]:
    """Notes why providers did not run; equal reasons at equal shapes share a note."""
    everywhere = [row.label for row in report.rows if row.provider == providers[0]] if providers else []
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for provider in providers:
        found: dict[str, list[str]] = {}
        for row in report.rows:
            if row.provider == provider and row.reason:
                found.setdefault(row.reason, []).append(row.label)
        for reason, labels in found.items():
            shared.setdefault((reason, tuple(labels)), []).append(provider)
    return [
        f"{', '.join(names)}{'' if list(labels) == everywhere else ' at ' + ', '.join(labels)}: {reason}"
        for (reason, labels), names in shared.items()
    ]


def show(made: Sheet, console: Console) -> None:
    """Print a table; speed-ups below 1 are red."""
    console.print(Text(made.title, style="bold"), soft_wrap=True)
    rows = [
        [Text(cell, style="red" if number in made.slower and at == len(row) - 3 else "") for at, cell in enumerate(row)]
        for number, row in enumerate(made.rows)
    ]
    show_cells(made.header, rows, console)
    for note in made.notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print()


def show_cells(header: Sequence[str], rows: Sequence[Sequence[Text]], console: Console, left: int = 1) -> None:
    """Print a table whose first ``left`` columns are text.

    On a terminal that is too narrow it is transposed: each row becomes a column, as many side by side as fit.
    """
    named = [Text(name, style="bold") for name in header]
    whole = _table([named, *rows], left)
    if not console.is_terminal or not rows or _width(whole, console) <= console.width:
        _print(whole, console)
        return
    shown: list[Sequence[Text]] = []
    for row in rows:
        row = [Text(row[0].plain, style="bold"), *row[1:]]
        if shown and _width(_turned([named, *shown, row]), console) > console.width:
            _print(_turned([named, *shown]), console)
            console.print()
            shown = []
        shown.append(row)
    _print(_turned([named, *shown]), console)


def _turned(columns: Sequence[Sequence[Text]]) -> Table:
    return _table(list(zip(*columns, strict=True)), 1)


def _table(rows: Sequence[Sequence[Text]], left: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for number in range(len(rows[0])):
        table.add_column(justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(width=10_000), table).maximum


def _print(table: Table, console: Console) -> None:
    """Print without breaking cells."""
    width = console.width
    console.width = max(width, _width(table, console))
    console.print(table)
    console.width = width


def markdown(made: Sheet) -> str:
    """GitHub table with its notes."""
    lines = [f"| {' | '.join(made.header)} |", f"|---{'|---:' * (len(made.header) - 1)}|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in made.rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in made.notes)])

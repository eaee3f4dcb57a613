"""Tables printed in colour, or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weft.bench.render.sheets import Sheet


def show(made: Sheet, console: Console) -> None:
    """Print a table; speed-ups below 1 are red."""
    console.print(Text(made.title, style="bold"), soft_wrap=True)
    rows = [
        [Text(cell, style="red" if (number, at) in made.slower else "") for at, cell in enumerate(row)]
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

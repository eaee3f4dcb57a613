"""Command ``weft trace summary FILE``. weft.cli registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.console import Commands, logged, one_line_errors

app = typer.Typer(
    cls=Commands, help="Read timelines that weft.trace has written.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def trace() -> None:
    """Keep ``summary`` a subcommand, which typer would drop from the name if it were the only one."""


@app.command()
@logged
def summary(
    file: Annotated[Path, typer.Argument(help="A file that weft.trace has written")],
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of a usage error")] = False,
) -> None:
    """Print exposed communication by cause, stragglers, and overlap against max(GEMM, wire)."""
    from weft.trace.chrome import read
    from weft.trace.summary import summary as text_of

    with one_line_errors(traceback):
        if not file.is_file():
            raise ValueError(f"{file}: no such file; pass one that weft.trace has written")
        typer.echo(text_of(read(file)), nl=False)

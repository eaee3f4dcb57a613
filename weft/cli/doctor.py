"""Command `weft doctor`: output of what `weft.runtime.doctor` finds."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from weft.runtime.doctor import Finding


def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs")] = False) -> None:
    """Say what is here, what weft will use and why, and how to get what is missing.

    Exit status 1: nothing can run.
    """
    from weft.runtime.doctor import examine, runnable

    findings = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print_findings(findings)
    raise typer.Exit(0 if runnable(findings) else 1)


def _print_findings(findings: list[Finding]) -> None:
    marks = {
        "ok": Text("ok", style="green"), "missing": Text("missing", style="red"), "wrong": Text("wrong", style="red"),
        "unused": Text("-", style="dim"),
    }  # fmt: skip
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        explanation = Text(finding.explanation, style="dim")
        table.add_row(marks[finding.status], Text(finding.name, style="bold"), Text(finding.value), explanation)
    console = Console(highlight=False)
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(Text(f"\n{finding.name}: {finding.remedy}"), soft_wrap=True)

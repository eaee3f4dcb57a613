"""Command `weft doctor`: output of what `weft.runtime.doctor` finds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.console import check_output, one_line_errors

if TYPE_CHECKING:
    from weft.runtime.doctor import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="Under torchrun: measure the links between its ranks")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure in 20 s what predicted times of ops need, and write a file that plans read"
        ),
    ] = False,
    costs: Annotated[
        Path | None, typer.Option(help="File that --measure writes [default: ~/.cache/weft/costs-GPU.json]")
    ] = None,
) -> None:
    """Report what this machine has, what weft will use and why, and how to get what is missing.

    Exit status 1: nothing can run.
    """
    with one_line_errors(traceback=False):
        if nodes and measure:
            raise ValueError("--nodes and --measure measure different things; pass one")
        if costs is not None and not measure:
            raise ValueError(f"--costs {costs} goes with --measure; pass both, or neither")
    if nodes:
        _print_links(as_json)
        return
    if measure:
        _measure(costs, as_json)
        return
    from weft.runtime.doctor import examine, runnable

    findings = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print_findings(findings)
    raise typer.Exit(0 if runnable(findings) else 1)


def _measure(file: Path | None, as_json: bool) -> None:
    """Measure this GPU, and print its constants and the file that has them."""
    with one_line_errors(traceback=False):
        from weft.tune.constants import measure

        if file is not None:
            check_output("--costs", file)
        gpu, path = measure(file, (lambda line: None) if as_json else typer.echo)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(gpu), indent=2))
    else:
        typer.echo(f"{gpu.gpu}: {path}")


def _print_links(as_json: bool) -> None:
    """Print the matrix of links, on rank 0."""
    from weft.runtime.links import links_of_torchrun

    with one_line_errors(traceback=False):
        rank, topology = links_of_torchrun()
    if rank != 0:
        return
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(topology), indent=2))
        return
    size = len(topology.hosts)
    cells = {(link.one, link.other): link for link in topology.links}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rank", "host", "node", *map(str, range(size))):
        table.add_column(name)
    for one, host in enumerate(topology.hosts):
        row = [str(one), host, str(one // topology.shape.node_size)]
        for other in range(size):
            link = cells.get((min(one, other), max(one, other)))
            row.append("" if link is None else f"{link.kind} {link.microseconds:.0f} us {link.gb_per_s:.1f} GB/s")
        table.add_row(*row)
    console = Console(highlight=False, width=max(80, 28 + 26 * size))
    head = (
        f"{topology.shape}, {topology.backend}: one way, 4 KiB and 8 MiB; empty: weft goes by way of a rail and a node"
    )
    console.print(head, soft_wrap=True)
    console.print(table)


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

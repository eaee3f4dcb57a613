"""Command ``weft check script.py``: flags for ``weft.check``, and the output of its report.

weft.cli registers it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from weft.arguments import quoted, shortened
from weft.check.explanations import explain
from weft.check.script import load
from weft.console import WORLD_SIZE, TypedFlags, check_output, draws, from_flags, one_line_errors, option
from weft.errors import SimulatorMissing
from weft.runtime.files import put

if TYPE_CHECKING:
    from weft.check.report import Report

_SCHEDULES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFlags(TypedFlags):
    """Flags of `weft check`."""

    script: Annotated[
        Path | None, typer.Argument(help="A Python file that defines main(team), or a program (--torch)")
    ] = None
    torch: bool = option(False, "Run a program on torch.distributed and its symmetric memory, as torchrun would")
    gpu: bool = option(False, "Also run main on real GPUs, under GSan, Triton's sanitizer for races")
    gpu_seconds: float | None = option(None, "Most seconds of a run on GPUs [with --gpu; default: 120]")
    world_size: str = option("2", "Numbers of ranks, such as 2 or 2,4", *WORLD_SIZE)
    schedules: int = option(_SCHEDULES, "Number of runs for each number of ranks")
    strategy: str = option("mix", "Strategy of schedules: mix, uniform, pct, slow, delay or exhaustive")
    seed: int = option(0, "Seed of the first run")
    depth: int = option(3, "Number of ordering constraints that a bug needs [with --strategy pct]")
    sms: int | None = option(None, "Resident programs of a rank; by default 8, varied for kernels sized by it")
    like: str = option("h200", "GPU that ops plan for: h200, h100, b200 or a100")
    node_size: int | None = option(None, "Ranks of each node; by default all are of one")
    link: str = option("nvlink", "Links within a node: nvlink, or pcie, which carries no atomics")
    function: str | None = option(
        None, "Function to run instead of main; with --torch f(rank, world_size), not the file"
    )
    args: str = option("", "Arguments of the program [with --torch]")
    json: Path | None = option(None, "Write the report to this file")
    html: Path | None = option(None, "Write the report to this file as a page with drawings")
    sarif: Path | None = option(None, "Write the report to this file as SARIF, for code scanning")
    explain: str | None = option(None, "Say what a kind of finding is, with an example, and end", metavar="KIND")
    any_results: bool = option(False, "Allow results to differ between schedules")
    no_compile: bool = option(False, "Do not ask whether Triton compiles the kernels for sm_90")
    traceback: bool = option(False, "Show the traceback of a usage error")


# Default of --gpu-seconds.
GPU_SECONDS = 120.0


def check(flags: CheckFlags) -> None:
    """Look for races, deadlocks and lost signals, without a GPU, and with --gpu also on GPUs.

    Exit status 0: clean, 1: findings, 2: wrong usage.
    """
    # Needed by a replay besides the schedule.
    named = " ".join([
        shlex.quote(f"{flags.script}"), *(["--torch"] if flags.torch else []),
        *([f"--function {flags.function}"] if flags.function not in (None, "main") else []),
        *([f"--args {shlex.quote(flags.args)}"] if flags.args else []),
    ])  # fmt: skip
    same = ("schedules", "strategy", "seed", "depth", "sms", "like", "node_size", "link")
    with one_line_errors(flags.traceback):
        if flags.explain is not None:
            _check_alone(flags)
            typer.echo(explain(flags.explain))
            raise typer.Exit(0)
        _check_strategy(flags)
        for name in ("json", "html", "sarif"):
            check_output(f"--{name}", getattr(flags, name))
        if flags.gpu:
            _check_gpu(flags)
        elif flags.gpu_seconds is not None:
            raise ValueError(f"--gpu-seconds {flags.gpu_seconds:g} is of --gpu; pass both, or leave it out")
        report = _checked(
            _main(flags), world_size=_sizes(flags.world_size), script=named,
            deterministic=not flags.any_results, compile=not flags.no_compile,
            **{name: getattr(flags, name) for name in same},
        )  # fmt: skip
        if flags.gpu:
            report = _on_gpus(flags, report)
        _show(report)
        _write(flags, report)
    raise typer.Exit(0 if report.ok else 1)


command = from_flags(CheckFlags, check)


def _check_alone(flags: CheckFlags) -> None:
    """ValueError for an argument beside --explain, which checks nothing."""
    if given := [flag for flag in flags.given() if flag not in ("--explain", "--traceback")]:
        name = str(flags.script) if given[0] == "--script" else given[0]
        raise ValueError(f"{name} does not go with --explain, which prints a text and checks nothing; leave one out")


def _check_strategy(flags: CheckFlags) -> None:
    """ValueError for a flag that the strategy does not use. Replays of exhaustive searches name seed 0."""
    if flags.given("depth") and flags.strategy in ("uniform", "slow", "delay", "exhaustive"):
        raise ValueError(
            f"--depth {flags.depth} has no effect with --strategy {flags.strategy}, only with pct; leave it out"
        )
    if flags.seed and flags.strategy == "exhaustive":
        raise ValueError(
            f"--seed {flags.seed} has no effect with --strategy exhaustive, which draws nothing; leave it out"
        )


def _write(flags: CheckFlags, report: Report) -> None:
    """Write the report to the files that the flags name."""
    from weft.check.page import page
    from weft.check.sarif import sarif

    for path, text in (
        (flags.json, report.to_json),
        (flags.html, lambda: page(report)),
        (flags.sarif, lambda: sarif(report)),
    ):
        if path is not None:
            put(path, text().rstrip("\n") + "\n")


def _main(flags: CheckFlags) -> Callable[..., Any]:
    if flags.script is None:
        raise ValueError("name a Python file that defines main(team), or a kind of finding with --explain")
    if not flags.torch:
        if flags.given("args"):
            raise ValueError(f"--args {quoted(flags.args)} is for programs; add --torch")
        return load(flags.script, flags.function or "main")
    if not flags.script.is_file():
        raise ValueError(f"{flags.script}: no such file; pass a Python program")
    from weft.check.torch_programs.program import TorchProgram

    try:
        args = tuple(shlex.split(flags.args))
    except ValueError as error:
        raise ValueError(f"--args {shortened(flags.args)}: {error}; quote them as for a shell") from None
    return TorchProgram(flags.script, flags.function, args)


def _check_gpu(flags: CheckFlags) -> None:
    """ValueError for flags that --gpu excludes, Unsupported where GSan cannot run."""
    from weft.arguments import MOST_RANKS_PER_GPU
    from weft.check.gpu.runs import check_available

    if flags.torch:
        raise ValueError("--gpu runs main(team), and --torch a program on torch's symmetric memory; leave one out")
    if flags.node_size is not None:
        raise ValueError(f"--node-size {flags.node_size} with --gpu: GSan follows the GPUs of one node; leave one out")
    if flags.gpu_seconds is not None and not flags.gpu_seconds > 0:
        raise ValueError(f"--gpu-seconds {flags.gpu_seconds:g} must be more than 0")
    check_available()
    import torch

    most = MOST_RANKS_PER_GPU * torch.cuda.device_count()
    if max(_sizes(flags.world_size)) > most:
        raise ValueError(f"--world-size {flags.world_size} with --gpu: at most {most} ranks fit on the GPUs here")


def _on_gpus(flags: CheckFlags, report: Report) -> Report:
    from weft.check.gpu.check import check_on_gpus
    from weft.check.gpu.runs import Program

    assert flags.script is not None
    program = Program(script=flags.script.resolve(), function=flags.function or "main")
    return check_on_gpus(program, _sizes(flags.world_size), report, seconds=flags.gpu_seconds or GPU_SECONDS)


def _checked(main: Callable[..., Any], **options: Any) -> Report:
    try:
        from weft.check.run import check as run
    except ImportError as error:
        raise SimulatorMissing(str(error.name)) from error
    console = Console(stderr=True)
    columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[findings]}"))
    # Drawn between runs only, without touching standard output, so that a debugger in a kernel can use the terminal.
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not draws(console),
        auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
    ) as bar:  # fmt: skip
        task = bar.add_task("schedules", total=None, findings="")

        def progress(done: int, total: int, findings: int) -> None:
            bar.update(
                task, completed=done, total=total, findings=f"{findings} finding(s)" if findings else "", refresh=True
            )

        return run(main, progress=progress, **options)


def _show(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for line in report.text(pictures=True).splitlines():
        # A finding's first line begins with its number; the rest is indented.
        is_head = line[:1].isdigit() and ". " in line[:5]
        style = "bold red" if is_head else "green" if report.ok else ""
        console.print(Text(line, style=style))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--world-size {shortened(text)} is not a list of numbers such as 2,4") from None

"""Command ``weft bench``: flags to a frozen dataclass, output of the reports. cli.py registers it."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from weft.bench.models.flags import LevelFlags, level_plan
from weft.bench.models.names import LEVELS
from weft.console import check_output, check_torchrun, numbers, one_line_errors, progress, talks, words
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.bench.harness.report import Report
    from weft.bench.harness.runner import Save
    from weft.bench.ops.workload import Plan
    from weft.runtime.team.team import Team

SIMULATED_RANKS = 2
# Most simulated ranks: 32 deadlock, since their kernels need more SMs than are simulated.
MOST_SIMULATED_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Flags as typed. ValueError for values that are wrong on any machine."""

    op: str
    world_sizes: tuple[int, ...] = ()
    shapes: tuple[str, ...] = ()
    dtype: str = "bf16"
    providers: tuple[str, ...] = ()
    json: Path | None = None
    plot: Path | None = None
    check_only: bool = False
    quick: bool = False
    eager: bool = False
    device: str = "auto"
    command: str = ""
    level: LevelFlags = field(default_factory=LevelFlags)

    def __post_init__(self) -> None:
        from weft.bench.ops.shapes import ALL
        from weft.bench.render.plot import check_matplotlib
        from weft.runtime.launch import DEVICES

        if self.op not in ALL:
            raise ValueError(f"op {self.op!r} is unknown; choose one of {', '.join(ALL)}")
        self.level.check_op(self.op, self.shapes, self.eager)
        if self.device not in DEVICES:
            raise ValueError(f"--device {self.device} is unknown; choose one of {', '.join(DEVICES)}")
        check_output("--json", self.json)
        check_output("--plot", self.plot)
        check_apart("--json", self.json, "--plot", self.plot)
        if self.plot is not None and self.plot.suffix != ".svg":
            raise ValueError(
                f"--plot {self.plot}: plots are SVG pictures; name the file {self.plot.with_suffix('.svg')}"
            )
        if self.plot is not None:
            check_matplotlib()

    def lacking(self) -> list[str]:
        """Members of ``providers`` that only other ops have."""
        from weft.bench.ops.providers import lacking

        return [] if self.op in LEVELS else lacking(self.op, self.providers)


def bench(
    op: Annotated[
        str,
        typer.Argument(
            help="all-reduce, all-reduce-rms-norm, all-gather, reduce-scatter, all-to-all, gemm, gemm-silu, ag-gemm, gemm-rs, "
            "gemm-ar; a layer: mlp, attn; a step of a model: model; complete generations: generate"
        ),
    ],
    world_size: Annotated[str | None, typer.Option(help="2 or 2,4 [default: all GPUs]")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="qwen3-32b, llama3-70b or symm-mem-recipes, also SET/down and SET:1024,2048; M,N,K; 64KiB,1MiB; of layers "
            "and models decode:32x1024 or prefill:32x128, of generate 32x128+64. Several with commas, or repeated"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    providers: Annotated[
        str | None,
        typer.Option(
            help="Names or families, as in weft,nccl,torch [default: all, but on GPUs not weft.fused, weft.pipelined "
            "and others, the designs of GEMMs]"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the results to this file (SVG)")] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check the answers, measure nothing")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Also time without CUDA graphs")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or sim")] = "auto",
    model: Annotated[str | None, typer.Option(help="qwen3-32b, … with random weights [of layers and models]")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of its layers [default: all]")] = None,
    run_type: Annotated[str | None, typer.Option(help="prefill or decode [default: both]")] = None,
    bsz: Annotated[str | None, typer.Option(help="Numbers of sequences, as in 1,32")] = None,
    ctx: Annotated[str | None, typer.Option(help="Tokens per sequence, as in 128,1024")] = None,
    mode: Annotated[str | None, typer.Option(help="auto, ag_rs, gemm_ar [default: all]")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="First compare logits over given tokens, or all layers [generate: always]")
    ] = False,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Break down the time of a step")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error")] = False,
) -> None:
    """Time all providers of an op side by side. Exit status 1: weft was wrong or did not run somewhere."""
    from weft.bench.ops.shapes import alias_of, stand_ins

    with one_line_errors(traceback):
        options = BenchOptions(
            op=alias_of(op),
            world_sizes=numbers("world-size", world_size),
            shapes=tuple(shapes or ()),
            dtype=dtype,
            providers=words("providers", providers),
            json=json,
            plot=plot,
            check_only=check_only,
            quick=quick,
            eager=eager,
            device=device,
            command=shlex.join(["weft", *sys.argv[1:]]),
            level=LevelFlags(
                model=model,
                layers=layers,
                run_type=run_type,
                batches=numbers("bsz", bsz),
                contexts=numbers("ctx", ctx),
                modes=words("mode", mode),
                check=check,
                breakdown=breakdown,
            ),
        )
        plans, simulated = _plans(options)
        if talks() and (absent := options.lacking()):
            typer.echo(f"weft: {options.op} has no provider {', '.join(absent)}; the others are measured", err=True)
        if simulated and talks() and options.op not in LEVELS:
            for size, _ in plans:
                for line in stand_ins(options.op, options.shapes, size, options.dtype):
                    typer.echo(f"weft: {line}", err=True)
        reports: list[Report] = []
        lost = _measure(plans, simulated, options.json, reports)
        if talks():
            show(reports)
            _write(options, reports)
            if lost is not None:
                typer.echo(f"weft: {str(lost) or 'interrupted, so the rest was not measured'}", err=True)
        if lost is not None and traceback:
            raise lost
    if lost is not None:
        leave(130 if isinstance(lost, KeyboardInterrupt) else 1)
    raise typer.Exit(1 if weft_failed(reports) else 0)


def check_apart(flag: str, file: Path | None, other_flag: str, other: Path | None) -> None:
    """Raise ValueError if both flags name the same file, since one output would overwrite the other."""
    if file is not None and other is not None and file.resolve() == other.resolve():
        raise ValueError(f"{flag} and {other_flag} are both {file}; name two files")


def leave(status: int) -> NoReturn:
    """End the command after a run that ended early."""
    from weft.runtime.launch import coordinates

    if coordinates() is not None:
        sys.stdout.flush()
        os._exit(status)  # this process is a rank, and a normal exit would wait for kernels that never end
    raise typer.Exit(status)


def _plans(options: BenchOptions) -> tuple[list[tuple[int, Plan]], bool]:
    """Plans for each world size, and whether their ranks are simulated.

    Everything that can be refused is refused here, before the first rank starts.
    """
    from weft.bench.ops.shapes import parse_shapes
    from weft.bench.ops.workload import Plan

    sizes, simulated = ranks(options.world_sizes, options.device)
    how: dict[str, Any] = {
        "dtype": options.dtype, "providers": options.providers, "check_only": options.check_only, "quick": options.quick,
        "eager": options.eager, "command": options.command,
    }  # fmt: skip
    plans: list[Plan] = [
        level_plan(options.op, options.level, options.shapes, size, simulated=simulated, **how)
        if options.op in LEVELS
        else Plan(
            op=options.op,
            shapes=parse_shapes(options.op, options.shapes, size, dtype=options.dtype, tiny=simulated),
            **how,
        )
        for size in sizes
    ]
    return list(zip(sizes, plans, strict=True)), simulated


def _measure(
    plans: list[tuple[int, Plan]], simulated: bool, json: Path | None, reports: list[Report]
) -> WeftError | KeyboardInterrupt | None:
    """Append a report for each world size.

    Returns the error that ended the run early, or raises it if nothing was measured. ``json``: file written after every
    shape.
    """
    from weft.bench.harness.report import read, write_all
    from weft.bench.ops.workload import heap_bytes
    from weft.runtime.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        # Ranks are other processes: if they are lost, their reports so far are read from this file.
        found = Path(folder) / "found.json"
        for size, plan in plans:
            before = list(reports)
            try:
                reports += launch(
                    on_rank,
                    size,
                    "sim" if simulated else "cuda",
                    args=((plan,), partial(write_all, [found, *([json] if json else [])], before)),
                    heap_bytes=None if simulated else heap_bytes((plan,)),
                )[0]
            except (WeftError, KeyboardInterrupt) as error:
                # Reports of Stuck and OutOfStep, with the reason at all shapes that were not measured.
                more = getattr(error, "reports", None) or (read(found)[len(before) :] if found.is_file() else [])
                reports += more
                if not any(report.rows for report in reports):
                    raise
                return error
    return None


def ranks(world_sizes: tuple[int, ...], device: str) -> tuple[tuple[int, ...], bool]:
    """World sizes given by the flags, and whether their ranks are simulated.

    NotEnoughGPUs if they are not available.
    """
    import torch

    from weft.errors import NotEnoughGPUs
    from weft.runtime.launch import coordinates

    check_torchrun(device)
    gpus, where = torch.cuda.device_count(), coordinates()
    simulated = device == "sim" or (device == "auto" and gpus == 0)
    own_ranks = where.world_size if where is not None else None
    sizes = world_sizes or (own_ranks or (SIMULATED_RANKS if simulated else max(gpus, 1)),)
    if own_ranks is not None and sizes != (own_ranks,):
        raise ValueError(
            f"--world-size {','.join(map(str, sizes))}: torchrun started {own_ranks} ranks; leave it out, or run the command "
            f"without torchrun"
        )
    if not simulated and own_ranks is None and max(sizes) > gpus:
        raise NotEnoughGPUs(max(sizes), gpus)
    if simulated:
        check_simulable_ranks(max(sizes))
    return sizes, simulated


def check_simulable_ranks(world_size: int) -> None:
    """Raise ValueError for more ranks than can be simulated."""
    if world_size > MOST_SIMULATED_RANKS:
        raise ValueError(
            f"--world-size {world_size}: at most {MOST_SIMULATED_RANKS} ranks are simulated; take "
            f"{MOST_SIMULATED_RANKS}, or a machine with GPUs"
        )


def on_rank(team: Team, plans: tuple[Plan, ...], save: Save) -> list[Report]:
    """Run the plans on one rank. Rank 0 prints progress."""
    from weft.bench.harness.runner import run_plans

    with progress(team.rank == 0) as say:
        return run_plans(team, plans, save, say)


def show(reports: list[Report]) -> None:
    from weft.bench.render import table

    console = Console(highlight=False)
    for report in reports:
        for made in table.sheets(report):
            table.show(made, console)


def weft_failed(reports: list[Report]) -> bool:
    return any(row.role == "weft" and row.reason and row.median_us is None for report in reports for row in report.rows)


def _write(options: BenchOptions, reports: list[Report]) -> None:
    from weft.bench.harness.report import write
    from weft.bench.render.plot import svg
    from weft.runtime.files import put

    if options.json is not None:
        write(options.json, reports)
    if options.plot is not None:
        put(options.plot, svg(reports))

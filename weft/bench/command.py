"""Command ``weft bench``: flags to a frozen dataclass, output of the reports. weft.cli registers it."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.arguments import DEVICES
from weft.bench.models.flags import ModelFlags
from weft.bench.models.names import is_model
from weft.bench.names import DTYPES, EAGER, MEASURED, OPS, REGRET, TRAIN, VARIED, complete_op, shapes_by_op, unknown_op
from weft.bench.ranks import leave, ranks
from weft.bench.regret.command import RegretFlags
from weft.console import (
    WORLD_SIZE,
    TypedFlags,
    check_output,
    complete_device,
    from_flags,
    notices,
    numbers,
    one_line_errors,
    one_of,
    option,
    progress,
    talks,
    words,
)
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.bench.harness.bench import Options
    from weft.bench.harness.report import Report
    from weft.bench.harness.workload import Workload
    from weft.runtime.team.team import Team

    # World sizes, each with its workloads.
    Runs = list[tuple[int, tuple[Workload, ...]]]


NODE_OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ag-gemm", "gemm-rs", "gemm-ar")
# Other providers know one node, or would need names of weft's designs in a node.
NODE_PROVIDERS = ("weft.auto", "nccl", "cublas+nccl")
# Providers of ``--eager`` without ops.
EAGER_PROVIDERS = ("weft.auto", "nccl", "cublas+nccl", "torch.fused", "torch.one_shot", "torch.two_shot")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags(TypedFlags):
    """Flags of `weft bench` as typed. ValueError for values that are wrong on any machine.

    ops     OP or OP@SHAPES; shapes of one op are measured together; none with ``nodes``: NODE_OPS, with ``eager``: EAGER,
            with --regret: the ones of REGRET that are collective, or are not, at one rank
    shapes  for ops without their own
    """

    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP[@SHAPES]...",
            help=f"{', '.join([*OPS, *VARIED])}; a layer: mlp, attn, forward and backward: train; a step of a model: model; "
            "complete generations: generate. Several are measured in one launch, as in all-reduce "
            "ag-gemm@qwen3-32b:1024,2048 model@decode:1x128",
            autocompletion=complete_op,
        ),
    ] = None
    world_size: str | None = option(None, "Numbers of ranks, such as 2 or 2,4 [default: all GPUs]", *WORLD_SIZE)
    shapes: list[str] | None = option(
        None,
        "Shapes: qwen3-32b, llama3-70b or symm-mem-recipes, also SET/down and SET:1024,2048; M,N,K; 64KiB,1MiB; of "
        "experts qwen3-30b-a3b, mixtral-8x7b and more, also SET/zipf, SET/recorded and SET:128,4096; of layers and "
        "models decode:32x1024 or prefill:32x128, of generate 32x128+64, of train qwen3-32b:1x4096. Several with "
        "commas, or repeated",
    )
    dtype: str = option("bf16", "Dtype: bf16, fp16 or fp32")
    providers: str | None = option(
        None,
        "Providers, by names or families, as in weft,nccl,torch [default: all, but on GPUs not weft.fused, "
        "weft.pipelined and more, the designs of GEMMs]",
    )
    baselines: Path | None = option(
        None, "Folder of providers that are not weft's [default: benchmarks/providers of a checkout]"
    )
    list_providers: bool = option(False, "List the providers of the ops [default: of all], measure nothing")
    json: Path | None = option(None, "Write the results to this file")
    out: Path | None = option(None, "Write OP.wW.json into this folder for each op and world size, after every shape")
    plot: Path | None = option(None, "Plot the results to this file (SVG)")
    check_only: bool = option(False, "Check the answers, measure nothing")
    quick: bool = option(False, "Measure fewer rounds")
    eager: bool = option(False, "Also time calls without CUDA graphs [without OP: a set of ops]")
    one_by_one: bool = option(
        False, "Time a provider before the next is made, where memory does not hold them together"
    )
    device: str = option("auto", "Where ranks run: auto, cuda or sim", autocompletion=complete_device)
    algorithm_cache: Path | None = option(
        None, "File of cuBLAS algorithms that weft tune has written, for weft and baselines [default: none]"
    )
    nodes: bool = option(
        False, "Measure over several nodes: torchrun's, or logical ones [default: the ops that span nodes]"
    )
    node_size: int | None = option(None, "Ranks of a logical node [with --nodes]")
    of_models: ModelFlags = field(default_factory=ModelFlags)
    of_regret: RegretFlags = field(default_factory=RegretFlags)
    traceback: bool = option(False, "Show the traceback of an error")

    def __post_init__(self) -> None:
        # First what needs no torch, which takes seconds to load.
        if not self.shapes_by_op():
            raise ValueError(
                "no op is named; name one, or pass --nodes for the ops over nodes, --eager for eager calls, or --regret for "
                "all ops that choose"
            )
        if self.node_size is not None and not self.nodes:
            raise ValueError(f"--node-size {self.node_size} is of --nodes; pass both")
        for op in self.shapes_by_op():
            if op not in MEASURED:
                raise unknown_op(op, MEASURED)
            if self.nodes and op not in NODE_OPS:
                raise ValueError(f"op {op!r} is not measured over nodes; choose one of {', '.join(NODE_OPS)}")
        one_of("device", self.device, DEVICES)
        one_of("dtype", self.dtype, DTYPES)
        self.of_models.check_ops(self.shapes_by_op(), self.eager)
        self.of_regret.check(tuple(self.shapes_by_op()))
        from weft.bench.harness.machine import check_clean
        from weft.bench.render.plot import check_matplotlib

        check_output("--json", self.json)
        check_output("--plot", self.plot)
        check_apart("--json", self.json, "--plot", self.plot)
        if self.baselines is not None and not self.baselines.is_dir():
            raise ValueError(f"--baselines {self.baselines}: no such folder; name one with Python files of providers")
        check_clean("--json", self.json)
        check_clean("--out", self.out)
        if self.plot is not None and self.plot.suffix != ".svg":
            raise ValueError(
                f"--plot {self.plot}: plots are SVG pictures; name the file {self.plot.with_suffix('.svg')}"
            )
        if self.plot is not None:
            check_matplotlib()

    def shapes_by_op(self) -> dict[str, tuple[str, ...]]:
        sets = (
            (self.list_providers, MEASURED), (self.nodes, NODE_OPS), (self.of_regret.regret, REGRET), (self.eager, EAGER),
        )  # fmt: skip
        ops = self.ops or next((ops for asked, ops in sets if asked), ())
        return shapes_by_op(ops, self.shapes or ())

    def workloads(self, world_size: int, simulated: bool) -> tuple[Workload, ...]:
        """Workloads at one world size. ValueError for shapes, providers or models that there are not."""
        from weft.bench.ops.shapes import parse_shapes
        from weft.bench.ops.workload import OpWorkload
        from weft.bench.training.shapes import parse_layers
        from weft.bench.training.workload import TrainWorkload
        from weft.bench.workloads import check_words

        providers = words("providers", self.providers)
        made: list[Workload] = []
        for op, shapes in self.shapes_by_op().items():
            if is_model(op):
                how = {"simulated": simulated, "dtype": self.dtype, "words": providers}
                made.append(self.of_models.workload(op, shapes, world_size, **how))
            elif op == TRAIN:
                layers = parse_layers(shapes, world_size, tiny=simulated)
                made.append(TrainWorkload(name=op, shapes=layers, dtype=self.dtype, words=providers))
            else:
                parsed = parse_shapes(op, shapes, world_size, dtype=self.dtype, tiny=simulated)
                asked = providers or (
                    NODE_PROVIDERS if self.nodes else EAGER_PROVIDERS if self.eager and not self.ops else ()
                )
                made.append(OpWorkload(name=op, shapes=parsed, dtype=self.dtype, words=asked))
        workloads = tuple(replace(one, baselines=self.baselines) for one in made)
        check_words(workloads, providers)
        return workloads

    def hints(self, runs: Runs, simulated: bool) -> list[str]:
        """Lines for the user: providers that are lacking, flags without effect, shapes of simulated ranks."""
        from weft.bench.harness.baselines import WITHOUT, folder_of
        from weft.bench.ops.shapes import stand_ins

        lines = [WITHOUT] if not self.providers and folder_of(self.baselines) is None else []
        for workload in runs[0][1]:
            if absent := workload.lacking(words("providers", self.providers)):
                lines.append(f"{workload.name} has no provider {', '.join(absent)}; the others are measured")
        if without := "without GPUs" if simulated else "with --check-only" if self.check_only else "":
            given = {
                "--breakdown": self.of_models.breakdown, "--eager": self.eager,
                "--algorithm-cache": simulated and self.algorithm_cache is not None, "--quick": self.check_only and self.quick,
            }  # fmt: skip
            lines += (f"{flag} has no effect {without}" for flag, on in given.items() if on)
        for op, shapes in self.shapes_by_op().items():
            if is_model(op) or op == TRAIN:
                continue
            for size, _ in runs if simulated else ():
                lines += stand_ins(op, shapes, size, self.dtype)
        return lines


def bench(asked: BenchFlags) -> None:
    """Time all providers of ops side by side. Exit status 1: weft was wrong or did not run somewhere.

    A design that does not take a dtype or shape, and says so by name, is shown as refused.
    """
    with one_line_errors(asked.traceback):
        from weft.bench.harness.bench import Options

        # Everything that can be refused is refused here, before the first rank starts.
        sizes, simulated = ranks(numbers("world-size", asked.world_size), asked.device)
        if asked.of_regret.regret:
            return _regret(asked, sizes, simulated)
        runs = [(size, asked.workloads(size, simulated)) for size in sizes]
        if asked.list_providers:
            return _list_providers(asked, runs)
        _check_folder(asked.out, runs)
        if talks():
            for line in asked.hints(runs, simulated):
                notices.info("weft: %s", line)
        how = Options(
            check_only=asked.check_only, quick=asked.quick, eager=asked.eager, one_by_one=asked.one_by_one,
            command=shlex.join(["weft", *sys.argv[1:]]),
        )  # fmt: skip
        reports: list[Report] = []
        lost = _measure(runs, how, simulated, asked, reports)
        if talks():
            _tell(reports, asked.plot, lost)
        if lost is not None and asked.traceback:
            raise lost
    if lost is not None:
        leave(130 if isinstance(lost, KeyboardInterrupt) else 1)
    raise typer.Exit(1 if weft_failed(reports) else 0)


command = from_flags(BenchFlags, bench)


def _regret(asked: BenchFlags, sizes: Sequence[int], simulated: bool) -> None:
    """Run ``weft bench --regret``. ValueError for flags that do not fit, or for its shapes without GPUs."""
    from weft.bench.regret import command as regret

    shapes = asked.shapes_by_op()
    unfit = "out", "plot", "nodes", "eager", "providers", "baselines", "list_providers", "one_by_one"
    for flag in asked.given(*unfit):
        raise ValueError(f"{flag} does not go with --regret; leave it out, and write rows with --json FILE")
    if all(shapes.values()) and (given := asked.of_regret.given("seed", "listed", "drawn")):
        raise ValueError(f"{next(iter(given))} has no effect, since each op has shapes; leave it out")
    if simulated and not asked.check_only and not all(shapes.values()):
        raise ValueError(
            "--regret times designs at shapes of published models, which takes GPUs; pass --check-only for their plans, or "
            "small shapes as in all-gather@4KiB"
        )
    here = {size: regret.machine_here(size, simulated) for size in sizes}
    runs = [
        (size, regret.workloads(asked.of_regret, shapes, asked.dtype, here[size], every=not asked.ops))
        for size in sizes
    ]
    if asked.check_only:
        for flag in asked.given("json", "quick", "algorithm_cache") | asked.of_regret.given("seconds"):
            raise ValueError(
                f"{flag} does not go with --regret --check-only, which prints plans and times nothing; leave one out"
            )
        for size, made in runs:
            for line in regret.listing(asked.of_regret, made, here[size]):
                typer.echo(line)
        return
    more = regret.Asked(file=asked.json, algorithm_cache=asked.algorithm_cache, quick=asked.quick)
    regret.measure(asked.of_regret, runs, simulated, more)


def _list_providers(asked: BenchFlags, runs: Runs) -> None:
    """Print the providers of each workload. ValueError for a flag of a measurement."""
    names = "json", "out", "plot", "check_only", "quick", "eager", "one_by_one", "algorithm_cache"
    for flag in asked.given(*names) | asked.of_models.given("check", "breakdown", "random_cache"):
        raise ValueError(
            f"{flag} does not go with --list-providers, which prints names and measures nothing; leave one out"
        )
    for workload in runs[0][1]:
        typer.echo(f"{workload.name}: {', '.join(one.name for one in workload.available())}")


def _tell(reports: list[Report], plot: Path | None, lost: BaseException | None) -> None:
    """Print the reports and the error that ended the run early, and write the picture."""
    from weft.bench.render.plot import svg
    from weft.runtime.files import put

    show(reports)
    if plot is not None:
        put(plot, svg(reports))
    if lost is not None:
        typer.echo(f"weft: {str(lost) or 'interrupted, so the rest was not measured'}", err=True)


def check_apart(flag: str, file: Path | None, other_flag: str, other: Path | None) -> None:
    """Raise ValueError if both flags name the same file, since one output would overwrite the other."""
    if file is not None and other is not None and file.resolve() == other.resolve():
        raise ValueError(f"{flag} and {other_flag} are both {file}; name two files")


def _check_folder(folder: Path | None, runs: Runs) -> None:
    """Raise ValueError unless all files of ``--out`` can be written."""
    from weft.bench.harness.report import file_name

    for size, workloads in runs if folder is not None else ():
        for workload in workloads:
            check_output("--out", folder / file_name(workload.name, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Writer of the reports so far, called after every shape. ``before``: of earlier launches."""

    files: tuple[Path, ...]
    folder: Path | None
    before: tuple[Report, ...]

    def __call__(self, reports: list[Report]) -> None:
        from weft.bench.harness.report import write, write_each

        for file in self.files:
            write(file, [*self.before, *reports])
        if self.folder is not None:
            write_each(self.folder, reports[-1:])


def _measure(
    runs: Runs,
    how: Options,
    simulated: bool,
    asked: BenchFlags,
    reports: list[Report],
) -> WeftError | KeyboardInterrupt | None:
    """Append a report for each workload at each world size.

    Returns the error that ended the run early, or raises it if nothing was measured.
    """
    from weft.bench.harness.runner import heap_bytes
    from weft.bench.workloads import read
    from weft.runtime.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        # Ranks are other processes: if they are lost, their reports so far are read from this file.
        saved = Path(folder) / "saved.json"
        files = (saved, *([asked.json] if asked.json else []))
        for size, workloads in runs:
            before = tuple(reports)
            try:
                reports += launch(
                    on_rank,
                    size,
                    "sim" if simulated else "cuda",
                    args=(workloads, how, Save(files=files, folder=asked.out, before=before), asked),
                    node_size=asked.node_size,
                    heap_bytes=None if simulated else heap_bytes(workloads),
                )[0]
            except (WeftError, KeyboardInterrupt) as error:
                # Reports of Stuck and OutOfStep, with the reason at all shapes that were not measured.
                more = getattr(error, "reports", None) or (read(saved)[len(before) :] if saved.is_file() else [])
                reports += more
                if not any(report.rows for report in reports):
                    raise
                return error
    return None


def on_rank(team: Team, workloads: tuple[Workload, ...], how: Options, save: Save, asked: BenchFlags) -> list[Report]:
    """Measure on one rank. Rank 0 prints progress. ValueError for ``--nodes`` on a team of one node."""
    from weft.bench.harness.runner import run_workloads
    from weft.ops import warm_up

    if asked.nodes and team.rail is None:
        raise ValueError(
            f"--nodes: all {team.size} ranks are of one node; pass --node-size, or start it by torchrun on several machines"
        )
    warm_up(team, algorithm_cache=asked.algorithm_cache)
    with progress(team.rank == 0) as say:
        return run_workloads(team, workloads, how, save, say)


def show(reports: list[Report]) -> None:
    from weft.bench.render import table
    from weft.bench.render.sheets import sheets

    console = Console(highlight=False)
    for report in reports:
        for made in sheets(report):
            table.show(made, console)


def weft_failed(reports: list[Report]) -> bool:
    """True if weft was wrong or did not run at some shape, other than a design that refused it."""
    from weft.bench.harness.report import REFUSED

    rows = [row for report in reports for row in report.rows if row.role == "weft" and row.median_us is None]
    return any(row.reason and not row.reason.startswith(REFUSED) for row in rows)

"""Command ``weft tune``: flags to a frozen dataclass, a search on all ranks, its table.

weft.cli registers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from weft.arguments import DEVICES
from weft.bench.command import check_apart
from weft.bench.names import DTYPES, OPS, complete_tuned_op, shapes_by_op, unknown_op
from weft.bench.ranks import leave, ranks
from weft.console import (
    WORLD_SIZE,
    TypedFlags,
    check_output,
    complete_device,
    from_flags,
    message_of,
    notices,
    numbers,
    one_line_errors,
    one_of,
    option,
    progress,
    talks,
)
from weft.engine.config import DEFAULTS
from weft.errors import SimulatorMissing, WeftError

if TYPE_CHECKING:
    from weft.plan.algorithms import Entry
    from weft.runtime.team.team import Team
    from weft.tune.model import ModelSearch
    from weft.tune.search import Outcome, TunePlan


# Flags that belong to a search of ops, and to one of a model.
OF_OPS = ("shapes", "dtype", "quick", "out", "json", "algorithm_cache")
OF_MODEL = ("seconds", "max_batch", "max_seq_len", "quantization", "tune_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags(TypedFlags):
    """Flags of `weft tune` as typed. ValueError for values that are wrong on any machine.

    ops  OP or OP@SHAPES; words of one op are searched together. ``shapes``: for words without their own
    """

    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP[@SHAPES]...",
            help="Ops, as in weft bench; also ag-gemm+local_first (rows in the order of an MLP), gemm+partials and "
            "gemm+deferred_norm (small GEMMs of a decode step), grouped-gemm+gather (rows by token). Several are searched in "
            "one launch, as in ag-gemm@qwen3-32b:1024,2048 gemm-rs",
            autocompletion=complete_tuned_op,
        ),
    ] = None
    model: str | None = option(
        None,
        "Model whose calls are searched, in place of ops: qwen3-32b, a checkpoint directory or OWNER/NAME; keep "
        "the results where weft generate --tune and weft serve --tune read them",
    )
    seconds: float = option(600.0, "Most seconds of the search [with --model]")
    max_batch: int = option(DEFAULTS["max_batch"], "Most sequences that decode at once [with --model]")
    max_seq_len: int | None = option(None, "Most tokens of prompt and answer [with --model; default: the model's]")
    quantization: str | None = option(None, "As to weft generate [with --model]")
    tune_cache: Path | None = option(None, "Folder of the results [with --model; default: ~/.cache/weft]")
    world_size: str | None = option(None, "Numbers of ranks, such as 2 or 2,4 [default: all GPUs]", *WORLD_SIZE)
    shapes: list[str] | None = option(None, "Shapes, as in weft bench: SET, SET/PART, SET:M,M; M,N,K; 64KiB,1MiB")
    dtype: str = option("bf16", "Dtype: bf16, fp16 or fp32")
    quick: bool = option(False, "Try fewer candidates in fewer rounds")
    out: Path | None = option(None, "File to write [default: weft's own, which the ops read]")
    json: Path | None = option(None, "Write the times of all candidates to this file")
    algorithm_cache: Path | None = option(
        None,
        "Search cuBLAS's algorithms only, for all GEMMs that the ops ask of cuBLAS and that have no row, and add them "
        "to this JSON file, which weft bench, weft generate and EngineConfig(algorithm_cache=) read",
    )
    device: str = option("auto", "Where ranks run: auto, cuda or sim", autocompletion=complete_device)
    traceback: bool = option(False, "Show the traceback of an error")

    def __post_init__(self) -> None:
        # First what needs no torch, which takes seconds to load.
        self._check_model()
        words = self.shapes_by_op()
        for word in words:
            if word.partition("+")[0] not in OPS:
                raise unknown_op(word, tuple(OPS))
        one_of("dtype", self.dtype, DTYPES)
        one_of("device", self.device, DEVICES)
        from weft.tune.spaces import parse

        for word in words:
            parse(word)
        check_apart("--out", self.out, "--json", self.json)
        if self.algorithm_cache is not None and (given := self.given("out", "json", "quick")):
            raise ValueError(
                f"--algorithm-cache {self.algorithm_cache}: cuBLAS's algorithms are searched whole, and no table is written; "
                f"leave out {' and '.join(given)}"
            )
        for flag, file in (("--out", self.out), ("--json", self.json)):
            if file is not None and len(self.world_sizes) > 1:
                raise ValueError(
                    f"{flag} {file}: a file holds one world size, not {', '.join(map(str, self.world_sizes))}; "
                    f"run weft tune once for each"
                )

    def _check_model(self) -> None:
        if (self.model is None) == (not self.ops):
            given = f"--model {self.model}" if self.ops else "neither"
            raise ValueError(
                f"weft tune takes ops or --model, and got {given}{' and ops' if self.ops else ''}; pass one"
            )
        if given := self.given(*(OF_OPS if self.model else OF_MODEL)):
            flag, value = next(iter(given.items()))
            if self.model is not None:
                why = f"--model {self.model}: {flag} is for ops, and the model names its calls"
            else:
                why = f"{flag} {value} is of --model, and ops are named"
            raise ValueError(f"{why}; leave it out")

    @property
    def world_sizes(self) -> tuple[int, ...]:
        return numbers("world-size", self.world_size)

    def shapes_by_op(self) -> dict[str, tuple[str, ...]]:
        return shapes_by_op(self.ops or (), self.shapes or ())


def tune(options: TuneFlags) -> None:
    """Find the fastest tiles, transports and designs of ops here, and write them where ops look them up.

    Exit status 1: the search ended early; the file holds the results so far.
    """
    if options.model is not None:
        with one_line_errors(options.traceback):
            _tune_model(options.model, *plan_model(options))
        return
    with one_line_errors(options.traceback):
        from weft.bench.ops.shapes import stand_ins
        from weft.tune.spaces import parse

        plans = plan(options)
        if talks() and any(run.device == "sim" for run in plans):
            for word, named in options.shapes_by_op().items():
                for line in stand_ins(parse(word)[0], named, plans[0].world_size):
                    notices.info("weft: %s", line)
    lost = _tune(plans, options.traceback)
    if lost is None:
        return
    if talks():
        typer.echo(f"weft: {message_of(lost)}", err=True)
    leave(2 if isinstance(lost, SimulatorMissing) else 1)


command = from_flags(TuneFlags, tune)


def plan_model(options: TuneFlags) -> tuple[tuple[int, ...], ModelSearch]:
    """World sizes and the search of --model; refuses what can be refused before the first rank starts."""
    from weft.engine.config import EngineConfig
    from weft.models import DecoderConfig
    from weft.tune import model

    sizes, simulated = ranks(options.world_sizes, options.device)
    if simulated:
        raise ValueError(
            f"--model {options.model}: virtual ranks search nothing, since their times mean nothing; run it on GPUs"
        )
    engine = EngineConfig(
        tune=options.seconds,
        tune_cache=options.tune_cache,
        max_batch=options.max_batch,
        max_seq_len=options.max_seq_len,
        quantization=options.quantization,
        pages=2,
    )
    return sizes, model.ModelSearch(model=DecoderConfig.find(options.model), engine=engine)


def _tune_model(name: str, sizes: tuple[int, ...], asked: ModelSearch) -> None:
    """Search the calls of a model, one world size after the other."""
    from weft.runtime.launch import launch
    from weft.tune import model

    for size in sizes:
        made = launch(model.on_rank, size, "cuda", args=(asked,))[0]  # with the heap of an engine
        if talks():
            typer.echo(f"{name}, world size {size}: {made}; kept in {asked.folder}")
            for entry in made.entries:
                if (row := entry.row) is not None:
                    gain = f", {row.default_us / row.us:.2f}x of the rule's" if row.default_us else ""
                    typer.echo(f"  {row.key}: {row.design}, {row.us:.4g} µs{gain}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    world_size: int
    device: str
    plans: tuple[TunePlan, ...]
    json: Path | None = None
    algorithm_cache: Path | None = None


def plan(options: TuneFlags) -> list[Run]:
    """Runs, one for each world size.

    Everything that can be refused is refused here, before the first rank starts.
    """
    from weft.plan import algorithms
    from weft.tune.search import world_of

    sizes, simulated = ranks(options.world_sizes, options.device)
    check_output("--json", options.json)
    check_output("--algorithm-cache", options.algorithm_cache)
    runs = []
    for size in sizes:
        words = options.shapes_by_op().items()
        plans = [_plan_of(options, word, shapes, size, simulated) for word, shapes in words]
        if options.out is not None and len(worlds := {world_of(plan.op, size) for plan in plans}) > 1:
            raise ValueError(
                f"--out {options.out}: a file holds one world size, and rows of a GEMM alone are of 1, rows of other ops of "
                f"{max(worlds)}; run weft tune once for each"
            )
        device, files = (
            "sim" if simulated else "cuda",
            {"json": options.json, "algorithm_cache": options.algorithm_cache},
        )
        runs.append(Run(world_size=size, device=device, plans=tuple(plans), **files))
    if options.algorithm_cache is not None and options.algorithm_cache.exists():
        algorithms.read(options.algorithm_cache)
    return runs


def _plan_of(options: TuneFlags, word: str, shapes: tuple[str, ...], size: int, simulated: bool) -> TunePlan:
    import torch

    from weft.bench.ops.shapes import op_of, parse_shapes
    from weft.plan import table as tuned
    from weft.tune.search import TunePlan, world_of
    from weft.tune.spaces import parse

    op, variants = parse(word)
    file, world = options.out, world_of(op, size)
    if options.algorithm_cache is not None and op_of(op).form != "gemm":
        raise ValueError(f"--algorithm-cache {options.algorithm_cache}: {op} computes no GEMM; leave it out")
    gpu = None if simulated else torch.cuda.get_device_name()
    if file is None and gpu is not None and options.algorithm_cache is None:
        file = tuned.file_for(gpu, world)
    if file is not None:
        _check_file(file, gpu, world, simulated)
    parsed = parse_shapes(op, shapes, size, tiny=simulated)
    return TunePlan(op=op, shapes=parsed, dtype=options.dtype, quick=options.quick, out=file, variants=variants)


def _check_file(file: Path, gpu: str | None, world_size: int, simulated: bool) -> None:
    """Raise ValueError unless rows of this machine may be added to ``file``, or it can be created."""
    from weft.plan import table as tuned

    check_output("--out", file)
    if not file.is_file():
        return
    table = tuned.read(file)
    if (table.world_size, table.simulated) != (world_size, simulated) or (gpu is not None and table.gpu != gpu):
        raise ValueError(
            f"--out {file} holds rows of {table.gpu} at world size {table.world_size}, and these are of "
            f"{gpu or 'simulated'} at {world_size}; name another file"
        )


def _tune(runs: list[Run], traceback: bool) -> Exception | None:
    """Run them one after the other. Returns the error that ended them early, if any."""
    from weft.bench.harness.runner import heap_bytes
    from weft.bench.ops.workload import OpWorkload
    from weft.runtime.launch import launch

    for run in runs:
        workloads = [OpWorkload(name=one.op, shapes=one.shapes, dtype=one.dtype, words=("weft",)) for one in run.plans]
        heap = heap_bytes(workloads) if run.device == "cuda" else None
        try:
            if run.algorithm_cache is not None:
                arguments = run.plans, run.algorithm_cache
                searched = launch(algorithms_on_rank, run.world_size, run.device, args=arguments, heap_bytes=heap)[0]
                if talks():
                    show_algorithms(run, searched)
                continue
            outcomes = launch(on_rank, run.world_size, run.device, args=(run.plans, run.json), heap_bytes=heap)[0]
        except (WeftError, OSError) as error:  # OSError: the file can no longer be written
            if traceback:
                raise
            files = dict.fromkeys(one.out for one in run.plans if one.out is not None and one.out.is_file())
            if talks() and files:
                notices.info("results so far are in %s", ", ".join(map(str, files)))
            return error
        if talks():
            for one, searched in zip(run.plans, outcomes, strict=True):
                show(run, one, searched)
    return None


def on_rank(team: Team, plans: tuple[TunePlan, ...], tried: Path | None) -> list[list[Outcome]]:
    """Run the search on one rank. Rank 0 prints progress."""
    from weft.tune.search import search

    with progress(team.rank == 0) as say:
        return search(team, plans, say, tried)


def algorithms_on_rank(team: Team, plans: tuple[TunePlan, ...], file: Path) -> list[Entry]:
    """Search cuBLAS's algorithms on one rank. Rank 0 prints progress."""
    from weft.tune.algorithms import search_algorithms

    with progress(team.rank == 0) as say:
        return search_algorithms(team, plans, file, say)


def show_algorithms(run: Run, entries: list[Entry]) -> None:
    """Print a line for each GEMM that was searched, and the file."""
    from weft.bench.render.table import show_cells

    if run.device == "sim":
        typer.echo("Simulated ranks run no cuBLAS: nothing was searched.")
        return
    console = Console(highlight=False)
    header = ("GEMM", "algorithm", "µs", "torch.mm µs", "gain")
    rows = [
        (
            f"{entry.dtype} {'x'.join(map(str, entry.shape))}",
            "torch.mm's choice" if entry.algorithm is None else str(entry.algorithm).removeprefix("Algorithm"),
            f"{entry.us:.4g}",
            f"{entry.torch_us:.4g}",
            f"{entry.torch_us / entry.us:.2f}x",
        )
        for entry in entries
    ]
    show_cells(header, [list(map(Text, row)) for row in rows], console, left=2)
    console.print(
        f"{len(entries)} GEMMs searched, all other ones were known; added to {run.algorithm_cache}", soft_wrap=True
    )


def show(run: Run, plan: TunePlan, outcomes: list[Outcome]) -> None:
    """Print a line for each shape, the dropped candidates with reasons, and the file written."""
    from weft.bench.render.table import show_cells

    console = Console(highlight=False)
    console.print(Text(f"{plan.name}, {plan.dtype}, world size {run.world_size}", style="bold"))
    header = ("shape", "chosen", "µs", "default µs", "gain", "tried", "dropped")
    show_cells(header, [list(map(Text, _cells(outcome))) for outcome in outcomes], console, left=2)
    for name, reason in dict.fromkeys(pair for outcome in outcomes for pair in outcome.dropped):
        console.print(Text(f"dropped {name}: {reason}", style="dim"), soft_wrap=True)
    if run.device == "sim":
        console.print(
            "Simulated ranks: the search ran, but its times mean nothing and no op uses them.", soft_wrap=True
        )
    if plan.out is not None:
        console.print(f"written to {plan.out}", soft_wrap=True)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    row = outcome.row
    if row is None:
        return outcome.label, outcome.reason, "–", "–", "–", str(outcome.tried), str(len(outcome.dropped))
    gain = f"{row.default_us / row.us:.2f}x" if row.default_us else "–"
    chosen = outcome.winner + (" (the default)" if outcome.winner == outcome.default else "")
    default = "–" if row.default_us is None else f"{row.default_us:.4g}"
    return outcome.label, chosen, f"{row.us:.4g}", default, gain, str(outcome.tried), str(len(outcome.dropped))

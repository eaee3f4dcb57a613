"""Command `weft bench invariance`: flags to configurations, a table of bits that differ."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from weft.arguments import DEVICES, check_optional, positive
from weft.bench.ranks import ranks
from weft.console import (
    DTYPES,
    WORLD_SIZE,
    check_output,
    complete_device,
    from_flags,
    layout_of,
    numbers,
    one_line_errors,
    one_of,
    option,
    single_valued,
)

if TYPE_CHECKING:
    from weft.bench.invariance.answers import Answered, Difference
    from weft.bench.invariance.run import Asked, Result

SCHEMA = 1
# Parameters up to which a model answers MANY requests, and FEW beyond: about 10**6 and 10**5 places that are compared.
SMALL, MANY, FEW, SIMULATED = 2e9, 288, 28, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceFlags:
    """Flags of `weft bench invariance`."""

    model: str | None = option(
        None,
        "Checkpoint directory or name, or with --dummy-weights a name such as qwen3-0.6b [default: the built-in adder]",
    )
    world_size: str | None = option(
        None, "Numbers of ranks, such as 1 or 1,2: the first is compared with the rest [default: all GPUs]", *WORLD_SIZE
    )
    dummy_weights: bool = option(False, "Random weights, of one model at every world size")
    device: str = option("auto", "Where ranks run: auto, cuda or sim", autocompletion=complete_device)
    dtype: str = option("auto", f"Dtype of the computation: {', '.join(('auto', *DTYPES))}")
    expert_layout: str | None = option(None, "Layout of a mixture of experts, as of weft serve")
    kv_cache_dtype: str = option("auto", "Format of the KV cache: auto or fp8")
    quantization: str | None = option(None, "fp8: put weights in blocks of 128 in fp8 as they are read")
    requests: int | None = option(
        None, f"Number of answers [default: {MANY}, of models above 2 billion parameters {FEW}]"
    )
    prompt_tokens: int | None = option(None, "Most tokens of a prompt [default: 1024]")
    max_tokens: int | None = option(None, "Most tokens of an answer [default: 64]")
    compare: Path | None = option(None, "File of --json, of another world size or machine, whose bits are expected")
    quick: bool = option(False, "Compare fewer configurations, on GPUs")
    cost: bool = option(False, "Time decode steps against the default mode, on GPUs")
    json: Path | None = option(None, "Write the results and the answers' bits to this file")
    traceback: bool = option(False, "Show where an error came from")


def invariance(flags: InvarianceFlags) -> None:
    """Compare bits of answers over batches, chunks, caches, drafts and ranks. Exit status 1: some differ."""
    with one_line_errors(flags.traceback):
        one_of("device", flags.device, DEVICES)
        one_of("dtype", flags.dtype, ("auto", *DTYPES))
        check_output("--json", flags.json)
        expected = None if flags.compare is None else read(flags.compare)
        sizes, simulated = ranks(numbers("world-size", flags.world_size), flags.device)
        asked = asked_of(flags, simulated)
        if flags.cost and simulated:
            raise ValueError("--cost times steps on GPUs; leave it out with simulated ranks")
        from weft.bench.invariance.answers import compare
        from weft.bench.invariance.run import on_rank
        from weft.runtime.launch import launch

        rows: list[dict[str, Any]] = []
        costs: dict[int, dict[int, tuple[float, float]]] = {}
        for size in sizes:
            result: Result = launch(on_rank, size, "sim" if simulated else "cuda", args=(asked,))[0]
            rows += [{"world_size": size, **outcome._asdict()} for outcome in result.outcomes]
            if expected is not None:
                same_requests(expected, result.answers, flags)
                against = compare(expected, result.answers)
                rows.append({"world_size": size, "configuration": against_name(flags, sizes), "seconds": 0.0})
                rows[-1] |= dict(zip(("compared", "differing", "first"), against, strict=True))
            else:
                expected = result.answers
            costs[size] = result.cost
            _show(rows, size, result.cost, flags)
            if flags.json is not None:
                write(flags.json, rows, expected, costs, asked)
    raise typer.Exit(1 if any(row["differing"] for row in rows) else 0)


command = single_valued(from_flags(InvarianceFlags, invariance))


def asked_of(flags: InvarianceFlags, simulated: bool) -> Asked:
    """Work of the ranks. ValueError for a value that no model can take."""
    import torch

    from weft.bench.invariance.configurations import configurations
    from weft.bench.invariance.run import Asked
    from weft.engine.config import EngineConfig
    from weft.models import Checkpoint, DecoderConfig
    from weft.models.builtin import PATH
    from weft.models.hub import find_checkpoint

    if flags.dummy_weights:
        if flags.model is None:
            raise ValueError("--dummy-weights takes --model NAME, such as qwen3-0.6b")
        model = config = DecoderConfig.named(flags.model)
    else:
        model = PATH if flags.model is None else find_checkpoint(flags.model)
        config = DecoderConfig.of(Checkpoint(model))
    many = SIMULATED if simulated else MANY if config.parameters <= SMALL else FEW
    longest = check_optional(positive, "--prompt-tokens", flags.prompt_tokens)
    new = check_optional(positive, "--max-tokens", flags.max_tokens) or (6 if simulated else 64)
    longest = longest or min(40 if simulated else 1024, config.max_position_embeddings - new - 1)
    engine = EngineConfig(
        invariant=True,
        dtype=None if flags.dtype == "auto" else getattr(torch, DTYPES[flags.dtype]),
        expert_layout=layout_of(flags.expert_layout),
        kv_cache_dtype=flags.kv_cache_dtype,
        quantization=flags.quantization,
        max_seq_len=longest + new + 1,
        page_size=16 if simulated else 64,
    )
    return Asked(
        model=model,
        engine=engine,
        configurations=tuple(configurations(simulated, flags.quick)),
        requests=check_optional(positive, "--requests", flags.requests) or many,
        longest=longest,
        new_tokens=new,
        cost=flags.cost,
    )


def against_name(flags: InvarianceFlags, sizes: tuple[int, ...]) -> str:
    """Name of the comparison between world sizes, or with a file."""
    return f"against {flags.compare.name}" if flags.compare is not None else f"against world size {sizes[0]}"


def same_requests(expected: list[Answered], given: list[Answered], flags: InvarianceFlags) -> None:
    """ValueError unless both are answers to the same requests."""
    if [one.prompt.tokens for one in expected] != [one.prompt.tokens for one in given]:
        raise ValueError(f"--compare {flags.compare}: its requests are other ones; pass the flags of its run")


def write(
    file: Path,
    rows: list[dict[str, Any]],
    answers: list[Answered],
    costs: dict[int, dict[int, tuple[float, float]]],
    asked: Asked,
) -> None:
    """Write rows, costs by world size and number of sequences, and bits as JSON."""
    from weft.runtime.files import put

    content = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["weft", *sys.argv[1:]]),
        "requests": asked.requests,
        "rows": [{**row, "first": None if row["first"] is None else asdict(row["first"])} for row in rows],
        "cost_ms": {size: {batch: list(pair) for batch, pair in cost.items()} for size, cost in costs.items() if cost},
        "answers": [[part._asdict() for part in one] for one in answers],
    }
    put(file, json.dumps(content) + "\n")


def read(file: Path) -> list[Answered]:
    """Bits of a file of ``write``. ValueError for another file."""
    from weft.bench.invariance.answers import Answered, Bits

    try:
        content = json.loads(file.read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, and this weft reads {SCHEMA}")
        return [
            Answered(*(Bits(**{name: tuple(part[name]) for name in Bits._fields}) for part in one))
            for one in content["answers"]
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--compare {file} is no file of weft bench invariance --json: {error}") from None


def _show(rows: list[dict[str, Any]], size: int, cost: dict[int, tuple[float, float]], flags: InvarianceFlags) -> None:
    console = Console(highlight=False)
    shown = [row for row in rows if row["world_size"] == size]
    table = Table(title=f"{flags.model or 'the built-in adder'}, world size {size}")
    table.add_column("configuration")
    for column in ("compared", "differing", "seconds"):
        table.add_column(column, justify="right")
    for row in shown:
        table.add_row(row["configuration"], f"{row['compared']:,}", f"{row['differing']:,}", f"{row['seconds']:.1f}")
    console.print(table)
    firsts: list[tuple[str, Difference]] = [(row["configuration"], row["first"]) for row in shown if row["first"]]
    for name, first in firsts[:1]:
        console.print(f"first difference: {name}: {first}")
    compared, differing = (sum(row[name] for row in shown) for name in ("compared", "differing"))
    console.print(f"{compared:,} places compared, {differing:,} differ")
    for batch, (default, invariant) in cost.items():
        console.print(
            f"decode step of {batch} sequences: {default:.3f} ms by default, {invariant:.3f} ms invariant, "
            f"{invariant / default - 1:+.1%}"
        )

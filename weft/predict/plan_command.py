"""Command ``weft plan MODEL``: how to serve a model on given GPUs under a load. weft.cli registers it."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.console import check_output, from_flags, one_line_errors, option
from weft.engine.config import DEFAULTS

if TYPE_CHECKING:
    from weft.predict.serving import Asked, Outlook

MAX_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """Flags of `weft plan`."""

    model: Annotated[
        str, typer.Argument(help="A published name such as qwen3-32b, a checkpoint directory, or OWNER/NAME[@REVISION]")
    ]
    gpus: str = option(MISSING, "GPUs of one machine, such as 4xH200; also H100, A100, B200, MI300X")
    load: Path = option(MISSING, "JSON file of requests and targets (docs/planning.md)")
    out: Path | None = option(None, "Write the plan to this file, which weft serve --plan follows")
    max_batch: int = option(MAX_BATCH, "Most sequences that run at once in a server")
    page_size: int = option(DEFAULTS["page_size"], "As to weft serve")
    kv_cache_dtype: str = option(DEFAULTS["kv_cache_dtype"], "As to weft serve")
    quantization: str | None = option(DEFAULTS["quantization"], "As to weft serve")
    as_json: bool = option(False, "Print the plan as JSON", "--json")
    traceback: bool = option(False, "Show where an error came from")


def plan(flags: PlanFlags) -> None:
    """Plan how to serve a model on some GPUs under a load, by predicted times. No GPU is needed.

    Exit status 1: nothing fits, or the targets are missed.
    """
    with one_line_errors(flags.traceback):
        check_output("--out", flags.out)
        from weft.engine import followed
        from weft.predict import plan_file

        asked, every = planned(flags)
        best = every[0]
        if best.refused:
            typer.echo(f"weft: {flags.model} does not fit on {asked.cluster}: {best.refused}", err=True)
            raise typer.Exit(1)
        content = plan_file.content_of(asked, every, flags.model, json.loads(flags.load.read_text()))
        if flags.out is not None:
            followed.write(flags.out, content)
        if flags.as_json:
            typer.echo(json.dumps(content, indent=1))
        else:
            for line in plan_file.lines(asked, every, flags.model):
                typer.echo(line)
            if flags.out is not None:
                typer.echo(f"written to {flags.out}, for weft serve and weft generate with --plan {flags.out}")
        raise typer.Exit(0 if best.meets(asked.load) else 1)


def planned(flags: PlanFlags) -> tuple[Asked, list[Outlook]]:
    """The question, and the outlooks of all candidates, the best first.

    ValueError for a load that the model cannot take.
    """
    from weft.engine.config import EngineConfig
    from weft.models import DecoderConfig
    from weft.predict import load
    from weft.predict.cluster import Cluster
    from weft.predict.serving import Asked, ranked

    config, read = DecoderConfig.find(flags.model), load.read(flags.load)
    if read.longest > config.max_position_embeddings:
        raise ValueError(
            f"--load {flags.load}: a prompt and its answer have up to {read.longest:,} tokens, and {flags.model} has "
            f"{config.max_position_embeddings:,} positions; shorten them"
        )
    engine = EngineConfig(
        max_seq_len=min(config.max_position_embeddings, -(-read.longest // 64) * 64),
        max_batch=flags.max_batch,
        page_size=flags.page_size,
        kv_cache_dtype=flags.kv_cache_dtype,
        quantization=flags.quantization,
    )
    asked = Asked(config=config, cluster=Cluster.of(flags.gpus), load=read, engine=engine)
    every = ranked(asked)
    if not every:
        raise ValueError(f"--gpus {flags.gpus}: no number of ranks divides {flags.model}; pass another count")
    return asked, every


command = from_flags(PlanFlags, plan)

"""Command `weft`: the application that has all subcommands."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import weft
from weft.bench.command import command as bench
from weft.bench.invariance.command import command as bench_invariance
from weft.bench.serving.command import command as bench_serve
from weft.check.command import command as check
from weft.cli import doctor, generate, serve
from weft.cli.vllm_flags import COMMANDS, rewritten
from weft.console import Commands, logged, one_line_errors, single_valued
from weft.predict.command import predict
from weft.predict.plan_command import command as plan
from weft.trace.command import app as trace
from weft.tune.command import command as tune


class WeftCommands(Commands):
    """Subcommands of `weft`; the ones that run an engine take vLLM's flags."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            with one_line_errors("--traceback" in rest):
                rest = rewritten(rest, name)
        return name, command, rest


app = typer.Typer(
    cls=WeftCommands,
    help="Overlapped multi-GPU kernels in plain Python, and a simulator for machines without a GPU.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weft {weft.__version__}")
        raise typer.Exit


@app.callback(help=app.info.help)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the flags that stand before a subcommand."""


for command in (bench, check, tune, predict):
    app.command()(logged(single_valued(command)))
app.add_typer(trace, name="trace")
app.command("plan")(logged(single_valued(plan)))
app.command()(logged(generate.command))
app.command()(logged(serve.command))
app.command("bench serve")(logged(bench_serve))
app.command("bench invariance")(logged(bench_invariance))
app.command()(logged(doctor.doctor))

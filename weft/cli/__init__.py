"""Command `weft`: the application that has all subcommands."""

from __future__ import annotations

import sys
from typing import Annotated, Any

try:  # an interrupt while these load
    import typer

    import weft
    from weft.bench.command import command as bench
    from weft.bench.invariance.command import command as bench_invariance
    from weft.bench.serving.command import command as bench_serve
    from weft.check.command import command as check
    from weft.cli import doctor, generate, serve
    from weft.cli.vllm_flags import rewritten
    from weft.cli.vllm_table import COMMANDS
    from weft.console import Commands, logged, one_line_errors, single_valued
    from weft.predict.command import predict
    from weft.predict.plan_command import command as plan
    from weft.trace.command import app as trace
    from weft.tune.command import command as tune
except KeyboardInterrupt:
    sys.exit(130)


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


# Each with the line that `weft --help` has for it, which 80 columns hold.
for name, command, line in (
    ("bench", single_valued(bench), "Time ops, layers and models beside baselines"),
    ("check", single_valued(check), "Find races and deadlocks, without a GPU"),
    ("tune", single_valued(tune), "Search the fastest designs of ops here"),
    ("predict", single_valued(predict), "Predict an op's time on more GPUs"),
    ("plan", single_valued(plan), "Plan how to serve a model under a load"),
    ("generate", generate.command, "Continue prompts by a model over ranks"),
    ("serve", serve.command, "Serve a model by OpenAI's API over HTTP"),
    ("bench serve", bench_serve, "Time a server under load"),
    ("bench invariance", bench_invariance, "Compare answers bit by bit"),
    ("doctor", doctor.doctor, "Report what this machine has, and what is missing"),
):
    app.command(name, short_help=line)(logged(command))
app.add_typer(trace, name="trace")

"""Completion of the command line by bash, zsh and fish, through the protocol of their scripts."""

import re

import pytest
from typer.testing import CliRunner

from weft.bench.models.names import LEVELS
from weft.bench.names import MEASURED, NOT_TUNED, OPS, VARIED, complete_op
from weft.bench.ops.shapes import OPS as SHAPED
from weft.bench.ops.shapes import op_of
from weft.cli import app
from weft.ops.op import Op


def ask(shell, line):
    words = line.split(" ")
    environment = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment["_WEFT_COMPLETE"] = f"complete_{shell}"
    result = CliRunner().invoke(app, [], env=environment, prog_name="weft")
    assert result.exit_code == 0 and not result.stderr, result.output
    if shell == "zsh":  # "word":"help", or "word"
        return re.findall(r'"([^"]+)"(?::"[^"]*")?', result.stdout)
    return [one.partition("\t")[0] for one in result.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_subcommands_ops_by_both_names_flags_and_devices_complete(shell):
    for line, among, not_among in (
        ("weft ge", ["generate"], ["bench"]),
        ("weft be", ["bench"], ["bench serve"]),
        ("weft bench ag", ["ag-gemm", "ag-moe"], ["gemm-rs"]),
        ("weft bench all_g", ["all_gather", "all_gather_matmul"], ["all-gather"]),
        ("weft bench se", ["serve", "sequence-to-heads"], []),
        ("weft bench serve --ra", ["--rates"], []),
        ("weft tune moe-", ["moe-dispatch"], ["moe-schedule"]),
        ("weft predict ag", ["ag-gemm"], ["all-reduce"]),
        ("weft generate --device s", ["sim"], ["cuda"]),
        ("weft generate --qu", ["--quiet"], []),
    ):
        found = ask(shell, line)
        assert [word for word in among if word not in found] == [], (line, found)
        assert [word for word in not_among if word in found] == [], (line, found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_prints_the_script_of_a_shell(shell):
    script = CliRunner().invoke(app, [], env={"_WEFT_COMPLETE": f"source_{shell}"}, prog_name="weft").stdout
    assert f"complete_{shell}" in script


def test_the_names_in_help_and_completion_are_those_of_the_ops():
    """An op with shapes is also named in weft/bench/names.py, which help and completion read without loading ops."""
    assert {name: op_of(name).name for name in SHAPED} == OPS
    assert {name for name in SHAPED if type(op_of(name)).space is Op.space} == {*NOT_TUNED}
    assert {*MEASURED} == {*OPS, *VARIED, *LEVELS, "train"}
    assert {word for word, _ in complete_op("")} == {*MEASURED, *OPS.values(), "serve"}

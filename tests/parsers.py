"""Parsers of the programs that commands of the documents name: AssertionError or the parser's own error if one is wrong."""

import argparse
import functools
import importlib.metadata
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import typer
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import weft.bench.command
import weft.tune.command
from tests.benchmarks.scripts import commands_of
from tests.documents import ROOT, blocks
from weft.bench.regret import command as regret
from weft.cli import app

# A file of the reader's own is one of these.
MAINS = ("main.py", "my_kernel.py", "port.py", "script.py")


@functools.cache
def weft_command():
    """The command `weft` with its subcommands, which takes a twentieth of a second to make."""
    return typer.main.get_command(app)


def parse(command):
    """Parse a command's arguments by the parser of its program."""
    program, *words = command.words
    assert program in PARSERS, f"{program} has no parser here; write one, or place it in tests/test_commands.py"
    PARSERS[program](filled(words), command)


def filled(words):
    """Words with a number for each placeholder such as W or FILE, which some parsers want and all take."""
    return ["2" if re.fullmatch(r"[A-Z_]+", word) else word for word in words]


def has_placeholders(words):
    """True if words as OP, OP@SHAPES or FOLDER/x stand for others. FILE and DIR are names as well."""
    return any(re.search(r"(^|@)(?!(FILE|DIR)$)[A-Z_]+($|/)", word) for word in words[1:])


def is_only_named(words):
    """True for `weft tune`, not for `weft generate`, which takes no arguments."""
    if words[0] != "weft" or len(words) != 2:
        return False
    names = weft_command().commands
    return words[1] == "bench" or words[1] in names and any(one.required for one in names[words[1]].params)


def measures(command):
    """True if a command has values that `parse_values` takes, also behind torchrun."""
    return bool(re.search(r"\bweft (bench (?!serve|invariance|OP)|tune (?!OP))", str(command)))


def parse_values(command):
    """Ops, shapes and providers of a `weft bench` or `weft tune`, as on GPUs, up to where the ranks would start."""
    arguments = filled(command.words[command.words.index("weft") + 1 :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        of_tune = ((weft.tune.command, name) for name in ("_tune", "_tune_model"))
        for module, run_ranks in ((weft.bench.command, "_measure"), *of_tune):
            patch.setattr(module, "ranks", lambda sizes, device: (sizes or (2,), False))
            patch.setattr(module, run_ranks, lambda *_: None)
        here = regret.machine_here
        patch.setattr(regret, "machine_here", lambda size, _: here(size, True))
        patch.setattr(regret, "measure", lambda *_: None)
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def parse_weft(arguments, command):
    """By the parser of the subcommand."""
    group, context, name = weft_command(), None, "weft"
    while hasattr(group, "resolve_command"):
        if arguments[0].startswith("-"):
            context = group.make_context(name, [], resilient_parsing=True)
            assert arguments[0] in {word for one in group.get_params(context) for word in one.opts}
            return
        context = group.make_context(name, arguments[:], parent=context, resilient_parsing=True)
        name, group, arguments = group.resolve_command(context, arguments)
        assert group is not None, f"weft has no such command: {command}"
    if arguments or not is_only_named(command.words):
        group.make_context(name, arguments[:], parent=context)


def parse_python(arguments, command):
    """`python -c …`, weft, pytest and pip as modules, a script of this checkout, of the page, or of the reader."""
    if arguments[0] == "-c":
        compile(arguments[1], str(command), "exec")
    elif arguments[0] == "-m" and arguments[1] in PARSERS:
        PARSERS[arguments[1]](arguments[2:], command)
    elif arguments[0] == "-m":
        file = ROOT / arguments[1].replace(".", "/")
        parse_script(file / "__main__.py" if file.is_dir() else file.with_suffix(".py"), arguments[2:])
    elif (ROOT / arguments[0]).is_file():
        parse_script(ROOT / arguments[0], arguments[1:])
    else:
        assert arguments[0] in {*files_of(command.page), *MAINS}, f"{command.page.name}: no file {arguments[0]}"


def files_of(page):
    """Files that a page has its reader write: name -> text."""
    named = (re.match(r"# (\S+\.py)\n", block.text) for block in blocks(page))
    return {found[1]: found.string for found in named if found}


class Parsed(Exception):
    """End of a program whose arguments are parsed."""


def parse_script(file, arguments):
    """By the parser that the script makes; it is stopped there. A script without one takes no arguments."""
    # examples/running.py parses, and a command that another script has.
    if not any(words in file.read_text() for words in ("argparse", "from running import", "command(__doc__")):
        assert not arguments, f"{file} takes no arguments"
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *given):
        parse_args(parser, *given)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [str(file), *arguments])
        patch.syspath_prepend(str(file.parent if file.parent.name == "examples" else ROOT))
        runpy.run_path(str(file), run_name="__main__")


def parse_torchrun(arguments, command):
    """By torchrun's parser, and what it starts by its own."""
    asked = get_args_parser().parse_args(arguments)
    parse_python([*(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args], command)


def parse_make(arguments, command):
    """Targets and variables."""
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        assert re.search(rf"^{word.partition('=')[0]} ?{'[?:]=' if '=' in word else ':'}", makefile, flags=re.MULTILINE)


def parse_sh(arguments, command):
    """A script that measures takes its arguments: with them it runs some Python."""
    script, *rest = arguments
    assert (ROOT / script).is_file()
    if script != "benchmarks/packages.sh":
        with tempfile.TemporaryDirectory() as folder:
            assert commands_of(Path(script).name, Path(folder), *rest), f"{script} refuses {rest}"


def parse_pytest(arguments, command):
    """Files, names of tests, markers, and words of -k, which stand in the files, in their names or in Python of the page."""
    parser = argparse.ArgumentParser()
    for flag in ("-k", "-m", "-n"):
        parser.add_argument(flag, default="")
    parser.add_argument("-q", action="store_true")
    parser.add_argument("paths", nargs="*")
    asked = parser.parse_args(arguments)
    text = "".join(block.text for block in blocks(command.page) if block.language == "python")
    for path in asked.paths:
        file, _, name = path.partition("::")
        text += "".join(found.read_text() for found in [ROOT / file, *(ROOT / file).rglob("*.py")] if found.is_file())
        assert (ROOT / file).exists() and name.partition("[")[0] in text, path
    text += " ".join(asked.paths)
    of_logic = {"and", "or", "not"}
    assert all(word in text for word in {*re.findall(r"\w+", asked.k)} - of_logic), asked.k
    markers = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert {*re.findall(r"\w+", asked.m)} - of_logic <= {*markers}, asked.m


def parse_pip(arguments, command):
    """Extras of weft; packages of others are theirs."""
    assert arguments[0] == "install"
    for word in arguments[1:]:
        if extras := re.fullmatch(r"(?:\.|weft)\[(.*)\]", word):
            assert {*extras[1].split(",")} <= {*importlib.metadata.metadata("weft").get_all("Provides-Extra")}, word


PARSERS = {
    "make": parse_make,
    "pip": parse_pip,
    "pytest": parse_pytest,
    "python": parse_python,
    "sh": parse_sh,
    "torchrun": parse_torchrun,
    "weft": parse_weft,
}

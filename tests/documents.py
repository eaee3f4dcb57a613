"""Blocks and commands of the documents, and a session that follows a page as its reader would.

A block of
    python   whose first line is "# NAME.py" is that file, or an excerpt of the checkout's file of that name; a block without a
             name continues the last file
    diff     edits the file that "--- NAME.py" names: its lines with "-" are replaced by those with "+"
    sh       has commands that the session does not run; tests/test_commands.py parses them
    console  has lines "$ command", each with what it prints; "..." stands for any text
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelInterface
from typer.testing import CliRunner

from tests.compiling import compiled

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Files and commands in these are of the past, or of the commits that were measured.
PAST = (ROOT / "docs" / "performance.md", *(ROOT / "docs" / "performance").glob("*.md"))
# Pages whose files and console commands a test runs, which compares what they print.
FOLLOWED = dict.fromkeys(TUTORIALS, "tests/test_tutorials.py") | {
    ROOT / "docs" / "adding-an-op.md": "tests/ops/test_adding_an_op.py",
    ROOT / "docs" / "long-context.md": "tests/ops/attention/test_long_context_page.py",
    ROOT / "docs" / "models.md": "tests/models/test_models_page.py",
    ROOT / "docs" / "moe.md": "tests/ops/moe/test_moe_page.py",
    ROOT / "docs" / "training.md": "tests/layers/test_training_page.py",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Fenced block of a page; ``line`` is that of its first line of text."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield Block(page=page, line=text.count("\n", 0, found.start(2)) + 1, language=found[1], text=found[2])


def turns(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with the output that follows it."""
    for turn in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = turn.partition("\n")
        yield command, output.strip("\n")


def follow(page: Path, folder: Path) -> None:
    """Write the files of a page to ``folder``, edit them and run its commands; then compile the kernels that ran.

    AssertionError where the page is wrong. The simulator interprets some code that Triton does not compile.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(torch.cuda, "device_count", lambda: 0)  # on a machine with GPUs less would be virtual
        launches = record_launches(patch)
        _follow(page, folder)
    for (file, _), (kernel, arguments, constants) in launches.items():
        if Path(file).is_relative_to(folder):
            compiled(kernel, *arguments, arch="sm_90", **constants)


def record_launches(patch: pytest.MonkeyPatch) -> dict[tuple[str, str], tuple[Any, tuple, dict[str, Any]]]:
    """The first launch of each kernel while ``patch`` lasts: (file, name) -> (kernel, arguments, keyword arguments)."""
    launches: dict[tuple[str, str], tuple[Any, tuple, dict[str, Any]]] = {}
    getitem = KernelInterface.__getitem__

    def record(kernel: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            at = kernel.fn.__code__.co_filename, kernel.__name__
            launches.setdefault(at, (kernel, arguments, constants))
            return getitem(kernel, grid)(*arguments, **constants)

        return launch

    patch.setattr(KernelInterface, "__getitem__", record)
    return launches


def _follow(page: Path, folder: Path) -> None:
    last = None
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python":
            last = write(block, folder, last)
        elif block.language == "diff":
            edit(block, folder)
        elif block.language == "console":
            for command, expected in turns(block):
                check_output(f"{where}: {command}", expected, run(command))
        elif block.language != "sh":
            raise AssertionError(f"{where}: a block of {block.language or 'no language'} is not run")


def write(block: Block, folder: Path, last: Path | None) -> Path | None:
    """Write a Python block to the file that it names, or to the end of ``last``; returns the file."""
    if named := re.match(r"# ([\w/]+\.py)\n", block.text):
        if (ROOT / named[1]).is_file():
            excerpt = block.text[named.end() :]
            assert excerpt in (ROOT / named[1]).read_text(), f"{block.page.name}:{block.line}: not in {named[1]}"
            return last
        file = folder / named[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        return file
    assert last is not None, f"{block.page.name}:{block.line}: the first block names its file"
    last.write_text(f"{last.read_text()}\n\n{block.text}")
    return last


def edit(block: Block, folder: Path) -> None:
    """Apply a diff block, whose lines with "-" and " " stand once in the file."""
    header, _, body = block.text.partition("\n")
    file, lines = folder / header.removeprefix("--- "), body.splitlines()
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != left_out) for left_out in "+-")
    assert file.read_text().count(old) == 1, (
        f"{block.page.name}:{block.line}: {file.name} has not these lines once:\n{old}"
    )
    file.write_text(file.read_text().replace(old, new))


def run(command: str) -> str:
    """Standard output of ``weft …``, ``python FILE …``, ``python -m …`` or ``python -c …``, in this process.

    Findings are no failure.
    """
    from weft.cli import app  # it lists the ops that are registered by now

    program, *arguments = shlex.split(command)
    if program == "weft":
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0 or arguments[0] == "check" and result.exit_code == 1, result.output
        return result.stdout
    assert program == "python", f"{command}: the session runs weft and python"
    printed, loaded = io.StringIO(), set(sys.modules)
    folder = str(Path.cwd() if arguments[0].startswith("-") else Path(arguments[0]).absolute().parent)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
            run_python(arguments, patch)
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - loaded:  # another page may have a file of that name
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]
    return printed.getvalue()


def run_python(arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    """Run what ``python`` runs with these arguments; ``patch`` lasts as long."""
    if arguments[0] == "-c":
        exec(arguments[1], {})
    elif arguments[0] == "-m":
        patch.setattr(sys, "argv", arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(str(Path(arguments[0]).absolute()), run_name="__main__")


def scripts(page: Path, folder: Path) -> list[Path]:
    """Write the files of a page to ``folder``, as before its edits; those that the page runs by ``python``."""
    last, ran = None, []
    for block in blocks(page):
        if block.language == "python":
            last = write(block, folder, last)
        elif block.language == "console":
            ran += [folder / command.split()[1] for command, _ in turns(block) if command.startswith("python ")]
    return ran


def check_output(where: str, expected: str, printed: str) -> None:
    """AssertionError unless ``printed`` is what the page shows."""
    printed = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    checker = doctest.OutputChecker()
    assert checker.check_output(f"{expected}\n", f"{printed}\n", doctest.ELLIPSIS), (
        f"{where}\nThe page shows:\n{expected}\nIt prints:\n{printed}"
    )

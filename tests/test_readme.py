"""The README's Python runs as it stands, and its report is what `weft check` prints. Other commands: tests/test_commands.py."""

import importlib.util

import torch

import weft
from benchmarks.pictures import cast
from tests.compiling import compiled
from tests.documents import ROOT, blocks, check_output, record_launches, run

README = ROOT / "README.md"
HELLO = ROOT / "examples" / "hello.py"


def test_the_kernel_is_the_file_that_a_newcomer_runs():
    first = next(block for block in blocks(README) if block.language == "python")
    assert first.text == HELLO.read_text()
    assert "python examples/hello.py" in README.read_text()
    spec = importlib.util.spec_from_file_location("hello", HELLO)
    hello = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hello)
    report = weft.check(hello.main, [2, 3], schedules=4)
    assert report.ok, str(report)


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # so that it says the same everywhere
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "readme.py"  # a file: Triton reads a kernel's source from it
    script.write_text("\n\n".join(block.text for block in blocks(README) if block.language == "python"))
    launches = record_launches(monkeypatch)
    # Where the README says what is printed, that is what is printed.
    assert run("python readme.py").strip() == str([[0.0, 1.0, 2.0, 3.0]] * 4)
    kernel, arguments, constants = launches[str(script), "all_gather"]
    assert compiled(kernel, *arguments, arch="sm_90", **constants).asm


def test_the_report_and_its_picture_are_what_the_command_prints(monkeypatch):
    """But for what "..." stands for in the report."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(ROOT)
    assert f"    {cast.COMMAND}  " in README.read_text()
    printed = run(cast.COMMAND)
    [report] = (block.text for block in blocks(README) if block.text.startswith("1. "))
    check_output("README.md", f"{report}...", printed)
    assert cast.picture(cast.broken(printed)) == (ROOT / "docs" / "pictures" / "check.svg").read_text()

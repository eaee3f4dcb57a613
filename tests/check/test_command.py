"""``weft check`` and the pytest plugin, from the command line."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import typer
from typer.testing import CliRunner

from tests.check import examples
from weft.check.command import command as check

app = typer.Typer()
app.command()(check)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_clean_script_exits_with_0():
    result = run(examples.__file__, "--schedules", 2, "--world-size", "2,3")
    assert result.exit_code == 0, result.output
    assert "0 finding(s) in 4 schedules at world size 2, 3" in result.output


def test_findings_exit_with_1_and_are_written(tmp_path):
    result = run(examples.__file__, "--function", "racy", "--schedules", 2, "--json", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "missing-barrier  data[0..31] of rank 1" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["finding"]["kind"] == "missing-barrier"


@pytest.mark.parametrize(
    ("function", "flags", "says"),
    [
        ("main", ("--link", "pcie"), ""),
        ("racy", ("--link", "pcie"), "atomic xchg on landed[0] of rank 1: the link is PCIe, which carries no atomics"),
        ("main", ("--node-size", "1"), "empty() of a team of 2 nodes x 1 ranks"),
    ],
)
def test_links_and_nodes_are_checked_and_replayed(function, flags, says):
    result = run(examples.__file__, "--function", function, "--schedules", 2, *flags)
    assert result.exit_code == (1 if says else 0), result.output
    assert says in result.output
    assert not says or f"--schedules 1 --depth 1 {' '.join(flags)}" in result.output


def test_findings_are_shown_before_they_are_written(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.runtime.files.os.replace", full)
    result = run(examples.__file__, "--function", "racy", "--schedules", 2, "--json", tmp_path / "report.json")
    assert result.exit_code == 2
    assert "missing-barrier  data[0..31] of rank 1" in result.stdout
    assert "No space left on device" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.py"], "no such file"),
        ([examples.__file__, "--function", "absent"], "defines no absent(team)"),
        ([examples.__file__, "--world-size", "two"], "not a list of numbers"),
        ([examples.__file__, "--strategy", "wild"], "is not one of mix"),
        ([examples.__file__, "--link", "infiniband"], "link='infiniband' is not one of nvlink, pcie"),
        ([examples.__file__, "--node-size", "2", "--world-size", "2,3"], "node_size=2 does not divide world_size=3"),
        ([examples.__file__, "--schedules", "0"], "schedules=0 is not a positive integer"),
        ([examples.__file__, "--torch", "--args", "'open"], "--args 'open: No closing quotation; quote them"),
        ([examples.__file__, "--gpu-seconds", "3"], "--gpu-seconds 3 is of --gpu; pass both, or leave it out"),
        (["--explain", "race", "--json", "x.json"], "--json does not go with --explain, which prints a text"),
        ([examples.__file__, "--explain", "race"], "examples.py does not go with --explain"),
        (["--explain", "race", "--gpu-seconds", "3"], "--gpu-seconds does not go with --explain"),
        (["--explain", "race", "--world-size", "2"], "--world-size does not go with --explain"),
        ([examples.__file__, "--args", ""], "is for programs; add --torch"),
        (
            [examples.__file__, "--strategy", "slow", "--depth", "3"],
            "--depth 3 has no effect with --strategy slow, only",
        ),
        (
            [examples.__file__, "--strategy", "exhaustive", "--seed", "1"],
            "--seed 1 has no effect with --strategy exhaus",
        ),
        (["--explain", "xyz"], "--explain xyz is no kind of finding; kinds: race, "),
        ([examples.__file__, "--json", "/tmp"], "--json /tmp: no file can be written there (Is a directory)"),
        ([examples.__file__, "--json", "/proc/x/y.json"], "--json /proc/x/y.json: no file can be written there"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize("text", ["import nowhere_to_be_found\n", "import sys\nsys.exit(0)\n"])
def test_a_script_that_does_not_load_is_wrong_usage(tmp_path, text):
    script = tmp_path / "broken.py"
    script.write_text(text)
    result = run(script)
    assert result.exit_code == 2
    assert "cannot be imported" in result.output


def test_main_imports_from_its_folder_and_a_replay_quotes_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "it's here.py"
    script.write_text("def main(team):\n    import beside_the_script\n")
    (tmp_path / "beside_the_script.py").write_text("1 / 0\n")
    result = run(script, "--world-size", 1, "--schedules", 1)
    assert "ZeroDivisionError" in result.output and "ModuleNotFoundError" not in result.output
    _, _, command = result.output.partition("replay: weft ")
    assert shlex.split(command)[:2] == ["check", str(script)]


def test_a_main_that_would_never_run_is_wrong_usage(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text("async def main(team):\n    raise AssertionError\n")
    result = run(script, "--schedules", 2)
    assert result.exit_code == 2
    assert "weft: main=main is an async function, so its body would never run" in result.output


def test_a_main_with_other_arguments_or_without_kernels_says_so(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("def main():\n    pass\n\n\ndef hosts(team):\n    pass\n")
    result = run(script)
    assert result.exit_code == 2 and "weft: main=main() cannot be called as main(team)" in result.output
    note = "no kernel ran, so only operations of hosts were checked"
    for more in (("--function", "hosts"), ("--torch",)):
        result = run(script, *more, "--schedules", 1)
        assert result.exit_code == 0 and note in result.output
    assert note not in run(examples.__file__, "--schedules", 1).output


def test_a_main_that_leaves_early_has_not_shown_that_it_is_right(tmp_path):
    script = tmp_path / "leaving.py"
    script.write_text("import sys\n\n\ndef main(team):\n    sys.exit(0)\n")
    result = run(script, "--schedules", 2)
    assert result.exit_code == 1
    assert "SystemExit" in result.output


def test_without_the_simulator_s_packages_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "weft.check.run", None)
    result = run(examples.__file__)
    assert result.exit_code == 2
    assert (
        "weft: the simulator needs weft.check.run, which is not installed: pip install greenlet ml_dtypes"
        in result.output
    )


TESTS = """
import pytest
from tests.check import examples

@pytest.mark.weft(world_size=[2, 3], schedules=2)
def test_clean(team, tmp_path):
    assert tmp_path.exists()
    examples.main(team)

@pytest.mark.weft(world_size=2, schedules=2)
def test_racy(team):
    examples.racy(team)

@pytest.mark.weft(world_size=2, schedules=2)
def test_assertion(team):
    assert team.rank == 0, "ranks disagree"

@pytest.mark.weft(world_size=2, schedules=2)
async def test_async(team):
    assert False

@pytest.mark.weft(world_size=0)
def test_no_rank(team):
    pass

@pytest.mark.weft(schedule=2)
def test_mistyped(team):
    pass

def test_unmarked(team):
    pass
"""


def test_the_pytest_plugin(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    is_installed = any(entry.value == "weft.check.plugin" for entry in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "weft.check.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    assert re.search(r"5 failed, 1 passed,( \d+ warnings?,)? 1 error", output)  # newer torch warns
    assert "main=test_async is an async function" in output
    assert "test_no_rank cannot be checked: world_size=0 is not a positive integer" in output
    assert (
        "test_mistyped cannot be checked: marker weft: got an unexpected keyword argument 'schedule'; it takes "
        in output
    )
    assert "During handling" not in output
    assert "plugin.py" not in output
    assert "missing-barrier  data[0..31] of rank 1" in output
    assert "replay: @pytest.mark.weft(world_size=2, strategy='pct', seed=" in output
    assert "ranks disagree" in output
    assert "needs the marker" in output

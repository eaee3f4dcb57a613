"""The examples: right on virtual ranks and under schedules, on GPUs; their kernels compile for sm_90."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import weft
import weft.check
from tests.compiling import compiled
from tests.documents import record_launches
from weft.check.torch_programs.program import TorchProgram

FOLDER = Path(__file__).parent.parent / "examples"
# The README's, tests/test_readme.py; what several share; two without a kernel; a mistake; a program of torch's.
APART = ("hello", "running", "quantized_model", "speculative_answers", "scales_after_rows", "torch_all_reduce")
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in APART)


@pytest.fixture
def main(request, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module(request.param).main


def test_there_are_examples_of_four_things():
    assert NAMES == ["gather_grouped_matmul", "gather_softmax", "gemm_all_to_all", "ring_halos"]


@pytest.mark.parametrize("main", ["quantized_model"], indirect=True)
def test_a_quantized_model_adds_in_fewer_bytes(main):
    lines = weft.simulate(main, 2)[0]
    assert all("3 of 3 sums" in line for line in lines)
    nbytes = [int(re.search(r"([\d,]+) bytes", line)[1].replace(",", "")) for line in lines]
    assert nbytes[0] > nbytes[1] > max(nbytes[2:])


@pytest.mark.parametrize("main", ["speculative_answers"], indirect=True)
def test_drafts_are_accepted_and_change_no_answer(main):
    lines = weft.simulate(main, 2)[0].splitlines()
    counts = dict(re.match(r"(\w+): equal answers; (\d+ of \d+) ", line).groups() for line in lines)
    accepted, drafted = map(int, counts["ngram"].split(" of "))
    assert accepted > drafted / 2 > 20
    # Of random heads.
    assert all(int(counts[method].split(" of ")[1]) > 100 for method in ("eagle3", "mtp"))


@pytest.mark.parametrize("main", NAMES, indirect=True)
def test_an_example_is_right_and_clean_and_compiles(main, monkeypatch):
    launches = record_launches(monkeypatch)
    report = weft.check.check(main, 2, schedules=1)
    assert report.ok, str(report)
    monkeypatch.undo()
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert names & {"gather_kernel", "exchange_kernel", "stencil"}
    for kernel, arguments, constants in launches.values():
        compiled(kernel, *arguments, arch="sm_90", **constants)


def test_the_program_of_torch_is_clean():
    report = weft.check.check(TorchProgram(FOLDER / "torch_all_reduce.py", None), [2, 3], schedules=4)
    assert report.ok, str(report)


@pytest.mark.parametrize("main", ["scales_after_rows"], indirect=True)
def test_the_signal_of_the_scales_does_not_cover_the_rows(main):
    findings = weft.check.check(main, [2, 3], schedules=4).findings
    assert {entry.finding.kind for entry in findings} == {"unquieted"}
    report = weft.check.check(lambda team: main(team, True), [2, 3], schedules=4)
    assert report.ok, str(report)


@pytest.mark.sweep
@pytest.mark.parametrize(("world_size", "schedules"), [(1, 1), (2, 16), (3, 16), (4, 8)])
@pytest.mark.parametrize("main", NAMES, indirect=True)
def test_an_example_is_clean(main, world_size, schedules):
    report = weft.check.check(main, world_size, schedules=schedules)
    assert report.ok, str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_and_writes_its_times(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("sys.argv", [name, "--bench", str(tmp_path / "times.json")])
    import_module("running").run(import_module(name).main)
    times, said = json.loads((tmp_path / "times.json").read_text()), capsys.readouterr().out
    assert "weft" in times and any("torch" in other for other in times) and all(f"{one} " in said for one in times)
    assert all(us > 0 for us in times.values())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_on_gpus(name):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for flags in ((), ("--bench",)):
        command = [sys.executable, FOLDER / f"{name}.py", *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

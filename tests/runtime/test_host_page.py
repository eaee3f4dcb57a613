"""docs/host.md is what the code gives, and its example runs."""

import re

import pytest

import weft
from tests.compiling import compiled
from tests.documents import record_launches
from tests.runtime import host_example, host_page


def test_the_page_is_the_generated_one():
    assert host_page.lacking() == []
    assert host_page.PAGE.read_text() == host_page.write(), "run python -m tests.runtime.host_page"


def test_every_public_call_is_on_the_page(monkeypatch):
    headings = set(re.findall(r"^### (\S+)$", host_page.PAGE.read_text(), flags=re.MULTILINE))
    team = {name for name in vars(weft.Team) if not name.startswith("_") and callable(getattr(weft.Team, name))}
    assert {f"team.{name}" for name in team - {"of", "record_into"}} | {"weft.Team.of"} <= headings
    assert {"weft.launch", "weft.simulate", "weft.init", "channel.begin", "channel.send"} <= headings
    assert {f"copy_engine.{name}" for name in ("fork", "put", "get", "signal", "join")} <= headings
    monkeypatch.setattr(weft.Team.barrier, "__doc__", None)
    assert [line.partition(" ")[0] for line in host_page.lacking()] == ["team.barrier"]


def test_the_example_is_right_free_of_races_and_compiles(monkeypatch):
    launches = record_launches(monkeypatch)
    report = weft.check(host_example.main, [2, 3], schedules=4)
    assert report.ok, str(report)
    for kernel, arguments, constants in launches.values():
        assert compiled(kernel, *arguments, arch="sm_90", **constants).asm
    monkeypatch.undo()
    assert weft.simulate(host_example.main, 3) == [3.0, 2.0, 1.0]


@pytest.mark.gpu(2)
def test_the_example_runs_on_gpus():
    assert weft.launch(host_example.main, 2, "cuda") == [1.0, 0.0]

"""docs/porting.md: its files run and are free of races; the names of its tables exist."""

import re
import runpy
from pathlib import Path

import pytest

import weft
import weft.language as wl

PAGE = (Path(__file__).parent.parent / "docs" / "porting.md").read_text()
FILES = {
    text.split("\n", 1)[0].removeprefix("# "): text
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
}


def main_of(name, folder):
    file = folder / name  # Triton reads a kernel's source from it
    file.write_text(FILES[name])
    return runpy.run_path(str(file))["main"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_page_is_right_and_free_of_races(name, tmp_path):
    report = weft.check(main_of(name, tmp_path), [1, 2, 3], schedules=4)
    assert report.ok, str(report)


def test_the_check_finds_the_buffer_that_is_written_too_soon(monkeypatch, tmp_path):
    without = FILES["shift.py"].replace("    wl.wait(consumed, now - 2, team)\n", "")
    monkeypatch.setitem(FILES, "shift.py", without)
    report = weft.check(main_of("shift.py", tmp_path), 3, schedules=4)
    assert "race" in {found.finding.kind for found in report.wrong}, str(report)


def test_names_of_the_tables_exist():
    named = set(re.findall(r"wl\.(shmem\.)?([a-z]\w+)", PAGE))
    assert len(named) > 30
    assert [name for shmem, name in sorted(named) if not hasattr(wl.shmem if shmem else wl, name)] == []


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_page_runs_on_gpus(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    weft.launch(run_file, 2, "cuda", args=(str(tmp_path / name),))


def run_file(team, file):
    runpy.run_path(file)["main"](team)

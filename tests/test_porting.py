"""docs/porting.md: its files run and are free of races; the names of its tables exist."""

import itertools
import re
import runpy
from pathlib import Path

import pytest
import triton.language as tl

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


TEXT = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
# Rows of the tables as lists of cells.
ROWS = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\|(.*)\|$", TEXT, flags=re.MULTILINE)]
OF_NVSHMEM = ROWS.index(["NVSHMEM", "by NVSHMEM's name", "weft's own"])
NVSHMEM = list(itertools.takewhile(lambda row: len(row) == 3, ROWS[OF_NVSHMEM + 2 :]))
ARGUMENTS = ("nbytes", "nelems", "team")


def spans(text):
    """Names that are the whole of a code span, without their arguments."""
    return re.findall(r"`([a-zA-Z][\w.]*)(?:\([^`]*\)|\*)?`", text)


def test_names_of_the_page_exist():
    """Those of weft, a team and a channel; and in a cell those without a dot, which are of the module named before them."""
    of_kernels = {name for text in FILES.values() for name in re.findall(r"\bwl\.[\w.]+", text)}
    ours = re.compile(r"(wl|weft|team|channel|tl)\.(?!shmem\.NAME)")
    dotted = of_kernels | set(filter(ours.match, spans(TEXT)))
    for cell in (cell for row in ROWS for cell in row[1:]):
        module = None
        for name in spans(cell):
            if "." in name:
                module = name.rpartition(".")[0]
            elif module in ("wl", "wl.shmem") and name not in ARGUMENTS:
                dotted.add(f"{module}.{name}")
    assert len(dotted) > 60 and {"wl.get_nbi", "wl.shmem.NVSHMEM_CMP_NE", "channel.send"} <= dotted
    assert weft.simulate(missing, 1, args=(dotted,)) == [[]]


def missing(team, dotted):
    """Members of ``dotted`` that do not exist; of one that ends in "_", as in tl.atomic_*, any that begins so."""
    known = {"wl": wl, "weft": weft, "team": team, "channel": team.channel(1), "tl": tl}
    wrong = []
    for name in sorted(dotted):
        first, *rest = name.split(".")
        found = known[first]
        for part in rest:
            parts = [each for each in dir(found) if each.startswith(part)] if part.endswith("_") else [part]
            found = getattr(found, parts[0], None) if parts else None
        if found is None:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("row", NVSHMEM, ids=lambda row: row[0])
def test_names_of_nvshmem_exist_or_say_what_to_use(row):
    """With and without NVSHMEM's prefix. "The same names" exist."""
    original, here, _ = row
    names = [re.sub("_$", "_WORLD", name.replace("TYPE", "int")) for name in spans(original)]
    if "`_nbi_`" in original:
        names += [name.replace("_block", "_nbi_block") for name in names]
    for bare in (re.sub("^nvshmemx?_", "", name) for name in names):
        assert hasattr(wl.shmem, bare) or not here.startswith("the same names")
        for name in (bare, f"nvshmem_{bare}", f"nvshmemx_{bare}"):
            try:
                getattr(wl.shmem, name)
            except AttributeError as error:
                assert f"weft.language.shmem has no {name}: " in str(error)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_page_runs_on_gpus(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    weft.launch(run_file, 2, "cuda", args=(str(tmp_path / name),))


def run_file(team, file):
    runpy.run_path(file)["main"](team)

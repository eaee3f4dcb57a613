"""Files that the user names are written atomically, through no link; errors are one line."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

import weft
from tests.limits import ANSWER
from weft.console import check_output
from weft.errors import CannotWrite
from weft.runtime import files
from weft.runtime.files import check_target, put


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path, monkeypatch):
    path = tmp_path / "new" / ("long" * 60 + ".json")
    before = os.umask(0o027)
    try:
        put(path, "one ä")
        put(path, "two ä")
    finally:
        os.umask(before)
    assert path.read_text(encoding="utf-8") == "two ä" and list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_folder_that_cannot_be_made_is_told_before_the_work(victim):
    """weft.trace writes at its end, and makes the folder like every command; a place where it cannot is refused at once."""
    for target in (victim / "x.json", Path("/proc/none/x.json")):
        with pytest.raises(CannotWrite, match="x.json: no file can be written there .*; name another"):
            check_target(target)
    began = []

    def main(team):
        with weft.trace(victim / "new" / "x.json", team):
            began.append(team.rank)

    with pytest.raises(CannotWrite, match="Not a directory"):
        weft.simulate(main, 2)
    assert began == []


def test_a_link_at_the_name_of_an_unfinished_file_is_not_followed(tmp_path, victim, monkeypatch):
    (tmp_path / "x.json.part").symlink_to(victim)  # the name that it once had
    put(tmp_path / "x.json", "text")
    assert (tmp_path / "x.json").read_text() == "text" and victim.read_text() == "precious"
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".weft-guessed.part").symlink_to(victim)
    with pytest.raises(CannotWrite, match="File exists"):
        put(tmp_path / "x.json", "more")
    assert (tmp_path / "x.json").read_text() == "text" and victim.read_text() == "precious"


def test_a_link_in_the_place_of_the_file_is_refused(tmp_path, victim):
    for target in (victim, tmp_path / "nothing"):
        (tmp_path / "x.json").unlink(missing_ok=True)
        (tmp_path / "x.json").symlink_to(target)
        with pytest.raises(
            CannotWrite, match="x.json: no file can be written there .it is a symbolic link.; name another"
        ):
            put(tmp_path / "x.json", "text")
        with pytest.raises(ValueError, match="--json .*x.json: no file can be written there .it is a symbolic link"):
            check_output("--json", tmp_path / "x.json")
    assert victim.read_text() == "precious" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full", "/dev/stdout", "fifo", "."])
def test_what_is_no_file_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / "fifo")
    said = []

    def write():
        with pytest.raises(CannotWrite) as caught:
            put(tmp_path / name, "text")
        said.append(str(caught.value))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(ANSWER)
    assert said and "\n" not in said[0] and "no file can be written there" in said[0]


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_write_that_fails_leaves_what_was_there_and_no_litter(tmp_path, victim, monkeypatch, step):
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_):
        raise full

    if step == "replace":
        monkeypatch.setattr(files.os, "replace", fail)
    else:
        real = os.open
        monkeypatch.setattr(files.os, "open", lambda path, *how: real(path, *how) and real("/dev/full", os.O_WRONLY))
    with pytest.raises(CannotWrite, match="No space left on device"):
        put(victim, "text")
    assert victim.read_text() == "precious" and list(tmp_path.iterdir()) == [victim]


def test_everything_that_writes_a_file_of_the_users_goes_by_it():
    root = Path(__file__).parents[2]
    texts = {file: file.read_text() for folder in ("weft", "benchmarks") for file in (root / folder).rglob("*.py")}
    assert not [str(file) for file, text in texts.items() if ".write_text(" in text or ".write_bytes(" in text]

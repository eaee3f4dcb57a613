"""docs/adding-an-op.md: in a copy of the tree its op passes all that ops must, and its list of files is complete."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, follow
from tests.limits import PROCESS

PAGE = Path("docs", "adding-an-op.md")


def test_the_op_of_the_page_is_an_op(tmp_path):
    """In another process, which imports the copy. One thread, as in all tests."""
    for folder in ("weft", "tests", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    for file in (PAGE, Path("pyproject.toml")):
        shutil.copy(ROOT / file, tmp_path / file)
    python(tmp_path, "-m", "tests.ops.test_adding_an_op")
    touched = sorted(
        file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.py") if is_touched(file, tmp_path)
    )
    assert touched == sorted(re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / PAGE).read_text(), flags=re.MULTILINE))
    python(tmp_path, "-m", "ruff", "check", *touched)
    python(tmp_path, "-m", "ruff", "format", "--check", *touched)


def line_of_the_page() -> list[str]:
    """Words of the pytest line that finds what is missing."""
    [block] = (block for block in blocks(ROOT / PAGE) if block.language == "sh")
    return shlex.split(block.text.replace("\\\n", " "))


def is_touched(file: Path, copy: Path) -> bool:
    original = ROOT / file.relative_to(copy)
    return not original.is_file() or file.read_bytes() != original.read_bytes()


def python(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=PROCESS
    )
    failed = done.returncode != 0  # pytest would show all of ``done``
    assert not failed, done.stdout + done.stderr


def main() -> int:
    """In the copy: write the page's files, edit the others, run its commands, then the tests that it names."""
    follow(ROOT / PAGE, ROOT)
    from weft.ops import explain

    assert "the only design" in str(explain("ring_add", shape=(2048,), world_size=2))
    program, *words = line_of_the_page()
    assert program == "pytest"
    return pytest.main([*words, "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main())

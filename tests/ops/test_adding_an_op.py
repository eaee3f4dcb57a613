"""docs/adding-an-op.md: in a copy of the tree its op passes all that ops must, and its list of files is complete."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT, follow

PAGE = Path("docs", "adding-an-op.md")
OP, ALIAS = "ring_shift", "ring-shift"
# What notices a place that is missing or wrong: tests of all ops, and of lists of them.
NOTICE = (
    "tests/test_arguments.py::test_ops",
    "tests/test_english.py",
    "tests/test_imports.py",
    "tests/test_reference.py::test_every_public_name_is_in_the_reference_with_its_docstring",
    "tests/bench/ops/test_baselines.py",
    "tests/check/test_ops.py",
    "tests/cli/test_completion.py::test_the_names_in_help_and_completion_are_those_of_the_ops",
    "tests/golden/test_golden.py::test_names_are_unique_and_cover_every_op",
    "tests/ops/test_cases.py",
    "tests/ops/test_op.py",
    "tests/ops/collectives/test_ring_shift.py",
    "tests/trace/test_traced_ops.py",
)
LISTS = "test_arguments or weft.ops or test_the_names or cover_every_op or are_among_them"


def test_the_op_of_the_page_is_an_op(tmp_path):
    """In processes of their own, which import the copy. One thread, as in all tests."""
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
    chosen = "-k", f"{OP} or {ALIAS} or {LISTS}", "-m", "not gpu"
    python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *NOTICE)


def is_touched(file: Path, copy: Path) -> bool:
    original = ROOT / file.relative_to(copy)
    return not original.is_file() or file.read_bytes() != original.read_bytes()


def python(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    failed = done.returncode != 0  # pytest would show all of ``done``
    assert not failed, done.stdout + done.stderr


def main() -> None:
    """In the copy: write the page's files, edit the others, run its commands. ``explain`` says what the page does."""
    follow(ROOT / PAGE, ROOT)
    from weft.ops import explain

    assert "the only design" in str(explain(OP, shape=(2048,), world_size=2))


if __name__ == "__main__":
    main()

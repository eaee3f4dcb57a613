"""docs/adding-an-op.md: its op passes what all ops must, its commands print what the page shows."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from tests.documents import ROOT, follow, scripts

PAGE = ROOT / "docs" / "adding-an-op.md"


def test_the_op_of_the_page_is_an_op(tmp_path):
    """In a process of its own: torch keeps what is registered. One thread, as in all tests."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ops.test_adding_an_op", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def main(folder: Path) -> None:
    from tests.ops.checking import check_replicated, run_cases
    from tests.ops.test_cases import test_cases_name_every_design_and_move_every_field
    from weft.ops import collectives, explain

    scripts(PAGE, folder)
    collectives.__path__.append(str(folder / "weft" / "ops" / "collectives"))
    op = importlib.import_module("weft.ops.collectives.ring_shift").RING_SHIFT
    test_cases_name_every_design_and_move_every_field(op)
    for world_size in (1, 2, 3, 4):
        cases = [case for case in op.cases() if case.world_size == world_size]
        check_replicated(weft.simulate(run_cases, world_size, args=(cases,)))
    assert "the only design" in str(explain("ring_shift", shape=(2048,), world_size=2))
    follow(PAGE, folder)
    tests = folder / "tests" / "ops" / "collectives" / "test_ring_shift.py"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(tests)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

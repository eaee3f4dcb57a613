"""The GPU suite, in a process of its own, for the world sizes this machine has GPUs for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "world_size", [pytest.param(w, marks=pytest.mark.gpu(w), id=f"{w} GPUs") for w in (2, 4, 8)]
)
def test_suite(world_size, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu.suite", "--world-size", str(world_size), "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert json.loads(report.read_text())["failed"] == 0

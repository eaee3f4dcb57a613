"""The Makefile's recipes, with a stand-in for Python."""

import os
import shutil
import subprocess

import pytest

from tests.documents import ROOT

# A Python that writes down its arguments, and fails where they have a word of `failing`.
STAND_IN = """#!/bin/sh
echo "$*" >> {log}
case "$*" in {failing}) exit 3;; esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("failing", "status"), [("*--table*|*triton-sensitive*", 2), ("nothing", 0)])
def test_a_sweep_runs_all_commands_and_lists_those_that_failed(failing, status, tmp_path):
    log = tmp_path / "log"
    for environment in (".venv", ".venv-newest"):
        python = tmp_path / environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(STAND_IN.format(log=log, failing=failing))
        python.chmod(0o755)
    ready = [word for name in (".venv/.ready", ".venv-newest/.ready") for word in ("-o", name)]
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    swept = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *ready, "sweep"], cwd=tmp_path, env=alone, capture_output=True, text=True
    )
    assert len(log.read_text().splitlines()) == 7 and swept.returncode == status, swept.stderr
    failed = swept.stdout.partition("weft: these commands of the sweep failed:\n")[2].splitlines()
    assert [line.split()[0] for line in failed] == ([".venv-newest/bin/python", ".venv/bin/python"] if status else [])
    assert not status or ("--triton-sensitive" in failed[0] and "--table" in failed[1])

"""Commands that a shell script of benchmarks/ runs, by a python in its place that only writes them down."""

import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def commands_of(script, tmp_path, *arguments):
    """Arguments of each python command, without `-m`; none if the script fails."""
    tmp_path.mkdir(exist_ok=True)
    log = tmp_path / "python.txt"
    log.unlink(missing_ok=True)
    (tmp_path / "python").write_text('#!/bin/sh\nshift\nprintf "%s\\n" "$@" -- >> "$0.txt"\n')
    (tmp_path / "python").chmod(0o755)
    found = subprocess.run(
        ["sh", FOLDER / script, *arguments], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True
    )
    lines = log.read_text().split("\n--\n")[:-1] if found.returncode == 0 else []
    return [line.split("\n") for line in lines]

"""The driver of peers: its commands are ones that the modules take, and a step that fails leaves the others."""

import importlib.util
import subprocess
import tarfile

import pytest

from tests.benchmarks.scripts import FOLDER
from weft.bench.command import BenchFlags


@pytest.fixture
def run(tmp_path):
    """Run the script with archives of nothing and a python that writes its arguments down, and fails for one module."""
    for name in ("titan", "flashinfer", "deepgemm"):
        with tarfile.open(tmp_path / f"{name}.tar.xz", "w:xz"):
            pass
    (tmp_path / "python").write_text(
        '#!/bin/sh\nshift\nprintf "%s\\n" "$@" -- >> "$0.txt"\necho "$1 printed this"\n[ "$1" != "$FAILS" ]\n'
    )
    (tmp_path / "python").chmod(0o755)

    def script(*steps, fails=""):
        environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "TMPDIR": str(tmp_path), "FAILS": fails}
        return subprocess.run(
            ["bash", FOLDER / "peers.sh", tmp_path / "out", tmp_path, *steps],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip

    return script


def commands(tmp_path):
    return [line.split("\n") for line in (tmp_path / "python.txt").read_text().split("\n--\n")[:-1]]


def test_every_command_is_valid(run, tmp_path):
    done = run()
    assert done.returncode == 0 and "done" in done.stdout, done
    modules = [words[0] for words in commands(tmp_path)]
    assert set(modules) == {
        "benchmarks.doors.torchtitan_llama", "weft", "benchmarks.fp8_grouped", "benchmarks.fp8_gemm", "benchmarks.mega_moe",
    }  # fmt: skip
    assert all(importlib.util.find_spec(module) for module in modules)
    [words] = [words[2:] for words in commands(tmp_path) if words[0] == "weft"]
    ops = tuple(word for word in words[: words.index("--providers")])
    providers = words[words.index("--providers") + 1]
    found = BenchFlags(ops=ops, providers=providers).workloads(2, simulated=False)
    assert all(any(one.name.startswith("flashinfer.") for one in workload.providers()) for workload in found)


def test_a_step_that_fails_leaves_the_others(run, tmp_path):
    done = run("titan", "deepgemm", fails="benchmarks.doors.torchtitan_llama")
    assert done.returncode == 1 and "failed: titan" in done.stdout
    assert [words[0] for words in commands(tmp_path)][1:] == ["benchmarks.fp8_grouped", "benchmarks.fp8_gemm"]
    assert "torchtitan_llama printed this" in done.stdout  # the end of its log
    assert run("all").returncode == 2

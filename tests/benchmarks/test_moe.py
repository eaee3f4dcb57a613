"""The commands of benchmarks/moe.sh: each is one that weft takes on two GPUs."""

import subprocess

from tests.benchmarks.scripts import FOLDER, commands_of
from weft.bench.command import BenchFlags
from weft.bench.models.flags import ModelFlags
from weft.tune.command import TuneFlags


def commands(tmp_path, *steps):
    """Arguments of weft in the commands that the script runs."""
    return [words for _, *words in commands_of("moe.sh", tmp_path, "h200-x2-moe", *steps)]


def test_every_command_of_the_script_is_valid(tmp_path):
    found = commands(tmp_path, "exchange", "overlap", "local", "layer", "model", "tune")
    assert [command for command, *_ in found] == ["bench"] * 5 + ["tune"]
    shapes = {}
    for command, *words in found:
        assert words[words.index("--world-size") + 1] == "2"
        ops = tuple(words[: next(at for at, word in enumerate(words) if word.startswith("--"))])
        if command == "tune":
            assert set(TuneFlags(ops=ops).shapes_by_op()) == {*GROUPED, *EXCHANGES}
            continue
        model = words[words.index("--model") + 1] if "--model" in words else None
        for workload in BenchFlags(ops=ops, of_models=ModelFlags(model=model)).workloads(2, simulated=False):
            shapes[workload.name] = [shape.label for shape in workload.shapes]
            assert len(set(shapes[workload.name])) == len(workload.shapes)
    local = {"route", "moe-schedule", "moe-route", "moe-sum"}
    assert set(shapes) == {*GROUPED, *EXCHANGES, *local, "moe-ar-rms-norm", "mlp", "model"}
    assert {"deepseek-v3 T=128", "qwen3-30b-a3b T=4096 zipf", "kraken-a2a T=4096"} <= set(shapes["moe-dispatch"])


def test_an_unknown_step_and_a_missing_folder_are_refused(tmp_path):
    assert commands(tmp_path, "all") == []
    assert subprocess.run(["sh", FOLDER / "moe.sh"], capture_output=True).returncode != 0


EXCHANGES = ("moe-dispatch", "moe-dispatch+fp8", "moe-combine", "ag-moe", "moe-rs")
GROUPED = ("grouped-gemm-silu", "grouped-gemm")

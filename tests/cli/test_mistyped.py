"""A mistyped name is answered with the one that was meant, and at once: nothing that loads torch runs before."""

import json
import subprocess
import sys

import pytest

from tests.limits import PROCESS
from weft.arguments import DEVICES, check_choice, did_you_mean
from weft.bench import names
from weft.bench.harness import workload
from weft.errors import CheckpointError
from weft.models.hub import find_checkpoint
from weft.ops import registration
from weft.ops.op import find_op
from weft.parallel.modes import check_mode
from weft.predict import command as predict

MISTYPED = {
    "genrate": "'generate'",
    "bench all-redcue": "op 'all-redcue' is unknown; choose one of all-reduce, *; did you mean all-reduce?",
    "bench ag_gem": "; did you mean ag-gemm?",
    "bench moe-dispatch+fp9": "; did you mean moe-dispatch+fp8?",
    "bench gemm --device cude": "--device cude is unknown; choose one of auto, cuda, sim; did you mean cuda?",
    "bench gemm --dtype pf16": "--dtype pf16 is unknown; *; did you mean fp16?",
    "bench mlp --model qwen3-23b": "--model qwen3-23b is unknown; *; did you mean qwen3-32b?",
    "bench mlp --mode ag-rs": "--mode ag-rs is unknown; *; did you mean ag_rs?",
    "bench model --run-type decod": "--run-type decod is unknown; *; did you mean decode?",
    "tune gem-rs": "op 'gem-rs' is unknown; *; did you mean gemm-rs?",
    "tune gemm-rs --device sin": "; did you mean sim?",
    "predict allreduce": "op='allreduce' has no model; *; did you mean all-reduce?",
    "check nosuch.py": "nosuch.py: no such file",
    "generate --mode replicate": "--mode replicate is unknown; *; did you mean replicated?",
    "generate --device gpu": "--device gpu is unknown; choose one of auto, cuda, sim",
    "generate --dtype bfloat61": "; did you mean bfloat16?",
    "generate --model nosuch": "nosuch: no such directory; pass a directory with config.json*, such as Qwen/Qwen3-0.6B",
    "generate --model addr": "; did you mean adder?",
    "generate --model Qwen3-32b": "names the sizes of a published model, without its weights: "
    "`weft bench model --model qwen3-32b` times it*--dummy-weights*a name of the Hugging Face hub",
    "generate --model qwen3-32 --dummy-weights": "is not one whose sizes are known; *; did you mean qwen3-32b?",
    "generate --model nosuch/model": "no revision main of it",
    "serve qwen3-8b": "names the sizes of a published model, without its weights",
    "serve nosuch": "no such directory",
    "serve --mode auto2": "; did you mean auto?",
    "generate --tune-cache x": "--tune-cache x goes with --tune; pass both, or neither",
    "doctor --costs x": "--costs x goes with --measure; pass both, or neither",
    "doctor --nodes --measure": "--nodes and --measure measure different things; pass one",
}  # fmt: skip

SCRIPT = """
import json, sys
from typer.testing import CliRunner
from weft.cli import app
for line in json.load(sys.stdin):
    result = CliRunner().invoke(app, line.split())
    print(json.dumps([result.exit_code, result.output, "torch" in sys.modules]))
"""


def test_a_mistyped_name_is_answered_without_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps([*MISTYPED]), capture_output=True, text=True, timeout=PROCESS,
        cwd=tmp_path, check=True,
    )  # fmt: skip
    for (command, says), line in zip(MISTYPED.items(), done.stdout.splitlines(), strict=True):
        status, output, loaded = json.loads(line)
        assert status == 2 and not loaded, (command, output)
        position = 0
        for part in says.split("*"):
            position = output.find(part, position)
            assert position >= 0, (command, part, output)


def test_the_nearest_name_is_meant():
    assert did_you_mean("CUDA", DEVICES) == "; did you mean cuda?"
    for value in ("nothing like it", "", "x" * 100_000, None, 3):
        assert did_you_mean(value, DEVICES) == ""
    with pytest.raises(ValueError, match=r"^x='simm' is not one of auto, cuda, sim; did you mean sim\?$"):
        check_choice("x", "simm", DEVICES)
    with pytest.raises(ValueError, match=r"; did you mean all_reduce\?$"):
        find_op("all_redduce")
    with pytest.raises(ValueError, match=r"^mode='gem_ar' is unknown; .*; did you mean gemm_ar\?$"):
        check_mode("gem_ar")
    with pytest.raises(ValueError, match=r"^all_gather: algorithm='pusch' is not one of .*; did you mean push\?$"):
        registration.check_choice("all_gather", "algorithm", "pusch", find_op("all_gather").algorithms)


def test_a_name_of_sizes_is_no_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="model='llama-3.1-8b' names the sizes of a published model"):
        find_checkpoint("llama-3.1-8b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()
    assert find_checkpoint("llama-3.1-8b").name == "llama-3.1-8b"  # a directory comes first


def test_names_that_are_checked_early_are_those_that_are_read_later():
    assert tuple(predict.KNOWN) == predict.OPS
    assert {*names.DTYPES} == {*workload.DTYPES}

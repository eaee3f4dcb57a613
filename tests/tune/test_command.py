"""`weft tune` from the flags to the file, on simulated ranks."""

import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from tests.sampled import sampled
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import OPS, op_of
from weft.cli import app
from weft.ops.op import Op
from weft.plan import table as tuned

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
SMALL = {
    "all-reduce": "96",
    "all-gather": "96",
    "reduce-scatter": "96",
    "all-to-all": "96",
    "all-reduce-rms-norm": "4,32",
    "paged-attention": "2,20,32",
    "decode-attention": "2,20,32",
    "paged-prefill-attention": "2,20,32",
    "sequence-to-heads": "96",
    "heads-to-sequence": "96",
    "gathered-prefill-attention": "9,4,2,16",
    "sharded-decode-attention": "1,4,1,16,40",
    "moe-ar-rms-norm": "6,2,8,4,32,48",
    **dict.fromkeys(
        ("grouped-gemm", "grouped-gemm-silu", "moe-dispatch", "moe-combine", "ag-moe", "moe-rs", "moe-route"),
        "6,2,8,4,32,48",
    ),
}


def tune(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments])


SEARCHED = [op for op in OPS if type(op_of(op)).space is not Op.space]


@pytest.mark.parametrize("op", sampled(((op,) for op in SEARCHED), lambda op: SEARCHED.index(op) % 2 == 0))
def test_every_op_is_searched_and_written(op, tmp_path):
    file = tmp_path / "out" / "x.json"
    result = tune(op, "--quick", "--shapes", SMALL.get(op, "4,24,16"), "--out", str(file))
    assert result.exit_code == 0, result.output
    assert "times mean nothing" in result.stdout
    table = tuned.read(file)
    assert (table.gpu, table.simulated, table.world_size) == (
        "simulated",
        True,
        2 if op_of(op).collective else 1,
    )
    (row,) = table.rows
    assert row.op == op_of(op).name
    assert row.us > 0
    assert row.candidates > 1
    assert "torch" in row.versions
    assert row.design in op_of(op).designs
    if row.config:
        row.as_design(op_of(op).designs)


def test_calls_with_own_first_have_rows_of_their_own(tmp_path):
    file, tried = tmp_path / "x.json", tmp_path / "tried.json"
    result = tune(
        "ag-gemm", "ag-gemm+own_first", "--quick", "--shapes", "4,24,16", "--out", str(file), "--json", str(tried)
    )
    assert result.exit_code == 0, result.output
    assert {row.op for row in tuned.read(file).rows} == {"all_gather_matmul", "all_gather_matmul+local_first"}
    plain, own = json.loads(tried.read_text())["shapes"]
    assert (plain["op"], own["op"]) == ("ag-gemm", "ag-gemm+local_first")
    assert plain["dropped"] == own["dropped"] == {}  # each has the right answer in its order


def test_a_second_search_adds_to_the_file(tmp_path):
    file = tmp_path / "x.json"
    for shape in ("96", "2048"):
        assert tune("all-gather", "--quick", "--shapes", shape, "--out", str(file)).exit_code == 0
    assert [row.shape for row in tuned.read(file).rows] == [(96,), (2048,)]
    result = tune("all-gather", "--world-size", "3", "--shapes", "96", "--out", str(file))
    assert result.exit_code == 2
    assert "holds rows of simulated at world size 2" in result.stderr


def test_the_algorithm_cache_is_for_gemms_and_replaces_no_file(tmp_path):
    file = tmp_path / "x.json"
    result = tune("ag-gemm", "gemm-silu", "--shapes", "4,24,16", "--algorithm-cache", str(file))
    assert (result.exit_code, result.stdout) == (0, "Simulated ranks run no cuBLAS: nothing was searched.\n"), (
        result.output
    )
    assert not file.exists()
    file.write_text("{}")
    for flags, reason in (
        (("all-reduce",), "all-reduce computes no GEMM; leave it out"),
        (("gemm", "--out", "y.json"), "no table is written; leave out --out"),
        (("gemm", "--quick"), "leave out --quick"),
        (("gemm", "--shapes", "4,24,16"), "x.json: it is not a cache of cuBLAS algorithms of schema 1"),
    ):
        result = tune(*flags, "--algorithm-cache", str(file))
        assert result.exit_code == 2
        assert reason in " ".join(result.stderr.split())
    assert file.read_text() == "{}"


def test_several_ops_are_searched_in_one_launch(tmp_path):
    file = tmp_path / "x.json"
    result = tune("all-gather@96", "gemm-rs", "all-gather@2048", "--quick", "--shapes", "4,24,16", "--out", str(file))
    assert result.exit_code == 0, result.output
    found = [(row.op, row.shape) for row in tuned.read(file).rows]
    assert found == [("all_gather", (96,)), ("all_gather", (2048,)), ("matmul_reduce_scatter", (4, 24, 16))]
    assert result.stdout.count(f"written to {file}") == 2


def test_the_times_of_all_candidates_are_written_on_request(tmp_path):
    file = tmp_path / "made" / "tried.json"
    result = tune("all-gather@96", "gemm@4,24,16", "--quick", "--json", str(file))
    assert result.exit_code == 0, result.output
    tried = json.loads(file.read_text())
    assert (tried["world_size"], tried["simulated"]) == (2, True)
    assert [(one["op"], one["shape"]) for one in tried["shapes"]] == [
        ("all-gather", [96]), ("gemm", [4, 24, 16]),
    ]  # fmt: skip
    for one in tried["shapes"]:
        assert {one["chosen"], one["default"]} <= set(one["us"])
        assert len(one["us"]) > 2
        assert all(us > 0 for us in one["us"].values())
        assert one["dropped"] == {}


def test_without_a_file_nothing_is_written_in_the_simulator():
    before = sorted(tuned.file_for("x", 1).parent.iterdir())
    result = tune("gemm", "--quick", "--shapes", "5,24,16", "--world-size", "1,2")
    assert result.exit_code == 0, result.output
    assert "world size 1" in result.stdout
    assert "world size 2" in result.stdout
    assert "written" not in result.stdout
    assert sorted(tuned.file_for("x", 1).parent.iterdir()) == before


@pytest.mark.parametrize(("good", "shapes"), [(0, "96"), (1, "2048,96")])
def test_ranks_that_come_apart_are_one_line_and_exit_1(good, shapes, monkeypatch, tmp_path):
    call, file = OpProblem.call, tmp_path / "x.json"

    def failing(problem, tensors, design):
        if problem.team.rank == 1 and file.exists() == bool(good):
            raise RuntimeError("lost")
        return call(problem, tensors, design)

    monkeypatch.setattr(OpProblem, "call", failing)
    result = tune("all-reduce", "--quick", "--shapes", shapes, "--out", str(file))
    assert result.exit_code == 1
    assert (f"results so far are in {file}" in result.stderr) == file.exists() == bool(good)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all"], "op 'all' is unknown"),
        (["gemm-rs+own_first"], r"op 'gemm-rs\+own_first' is unknown"),
        (["moe-sum"], "op 'moe-sum': moe-sum has one design, so there is nothing to search; leave it out"),
        (["gemm", "--shapes", "qwen4"], "neither a set"),
        (["ag-gemm", "--shapes", "4096,12800,5121"], "simulated ranks take at most 512 in each of M, N and K"),
        (["gemm-rs", "--shapes", "3,16,16"], "take 4"),
        (["gemm", "--world-size", "0"], "not a list of positive numbers"),
        (["gemm", "--world-size", "17"], "at most 16 ranks are simulated; take 16, or a machine with GPUs"),
        (["gemm", "--dtype", "int8"], "--dtype int8 is unknown"),
        (["gemm", "--device", "tpu"], "choose one of auto, cuda, sim"),
        (["gemm", "--device", "cuda", "--world-size", "2"], "needs 2 GPUs"),
        (["all-reduce", "--device", "cuda"], "needs 1 GPU and this machine has 0; use device sim"),
        (["gemm", "--world-size", "1,2", "--out", "x.json"], "a file holds one world size"),
        (["gemm", "gemm-rs", "--out", "x.json"], "rows of a GEMM alone are of 1, rows of other ops of 2"),
        (["gemm-rs@llama"], "neither a set"),
        (
            ["gemm", "ag-gemm@"],
            "'ag-gemm@' names no shape after the @; write ag-gemm@SHAPES, or ag-gemm for its first set",
        ),
        (["gemm", "--out", f"{__file__}/x.json"], "--out .* no file can be written there"),
        (["gemm", "--json", f"{__file__}/x.json"], "--json .* no file can be written there"),
        (["gemm", "--out", "/proc/x/y.json"], "--out /proc/x/y.json: no file can be written there"),
        (["gemm", "--world-size", "1,2", "--json", "x.json"], "--json x.json: a file holds one world size"),
        (["gemm", "--out", __file__], "not a file of weft tune"),
        (["gemm", "--out", "x.json", "--json", "./x.json"], "--out and --json are both x.json; name two files"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, message):
    result = tune(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: ")
    assert re.search(message, result.stderr)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_file_that_is_no_table_is_refused_by_name(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("[1, 2]")
    result = tune("gemm", "--out", str(file))
    assert (result.exit_code, result.stderr) == (
        2,
        f"weft: {file}: not a file of weft tune, schema 2: schema is another\n",
    )


def test_without_the_simulator_s_packages_it_is_exit_2(monkeypatch):
    monkeypatch.setitem(sys.modules, "weft.simulator.machine.machine", None)
    result = tune("all-reduce", "--quick", "--device", "sim")
    assert result.exit_code == 2
    assert "weft: the simulator needs weft.simulator.machine.machine, which is not installed" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "weft tune takes ops or --model, and got neither; pass one"),
        (("gemm", "--model", "qwen3-8b"), "got --model qwen3-8b and ops; pass one"),
        (("--model", "qwen3-8b", "--shapes", "1,2,3"), "--shapes is for ops, and the model names its calls"),
        (("--model", "qwen3-8b", "--quick"), "--quick is for ops, and the model names its calls; leave it out"),
        (("--model", "qwen3-8b", "--algorithm-cache", "x.json"), "--algorithm-cache is for ops"),
        (("gemm", "--max-batch", "8"), "--max-batch 8 is of --model, and ops are named; leave it out"),
        (("gemm", "--seconds", "600"), "--seconds 600.0 is of --model, and ops are named; leave it out"),
        (("--model", "qwen3-8b", "--dtype", "bf16"), "--dtype is for ops"),
        (("--model", "qwen3-8b", "--device", "sim"), "virtual ranks search nothing, since their times mean nothing"),
    ],
)
def test_a_model_takes_the_place_of_ops(flags, reason):
    result = CliRunner().invoke(app, ["tune", *flags])
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())

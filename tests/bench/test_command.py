"""`weft bench` from the flags to the table, on simulated ranks."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.sampled import sampled
from weft.bench.command import command as bench
from weft.bench.harness import bench as harness_bench
from weft.bench.harness import report
from weft.bench.names import VARIED
from weft.bench.ops.shapes import OPS, op_of
from weft.bench.workloads import read
from weft.console import logged
from weft.errors import WeftError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
app = typer.Typer(pretty_exceptions_enable=False)
app.command("bench")(logged(bench))
# One of each form of shapes runs in fp32, the other ops in bf16.
IN_FP32 = ("all-reduce", "all-reduce-rms-norm", "decode-attention", "moe-combine")
SMALL = {"gemm-ar": ["--shapes", "5,24,16"], "gemm": ["--shapes", "5,24,16"]}


@pytest.mark.parametrize(
    ("op", "dtype"),
    sampled(
        [*((op, "bf16") for op in (*OPS, *VARIED)), *((op, "fp32") for op in OPS if op_of(op).form != "gemm")],
        lambda op, dtype: op in IN_FP32 if dtype == "fp32" else op not in IN_FP32,
    ),
)
def test_every_op_runs_checks_and_reports(op, dtype, tmp_path):
    """Timed are those in fp32 and those that are drawn: the harness times all ops alike."""
    file, picture = tmp_path / "out" / "x.json", tmp_path / "x.svg"
    plotted = op in ("all-reduce", "gemm-ar")
    plot = ["--plot", str(picture)] if plotted and pytest.importorskip("matplotlib") else []
    timed = plotted or dtype == "fp32"
    only = [] if timed else ["--check-only"]
    result = CliRunner().invoke(app, [op, "--dtype", dtype, "--json", str(file), *plot, *only, *SMALL.get(op, [])])
    assert result.exit_code == 0, result.output
    assert "times mean nothing" in result.stdout
    (found,) = read(file)
    assert (found.op, found.dtype, found.world_size, found.is_simulated) == (op, dtype, 2, True)
    assert not plotted or picture.read_text().startswith("<svg")
    for row in found.rows:
        if (op, dtype, row.provider) == ("gathered-prefill-attention", "fp32", "weft.pipelined"):
            assert row.reason.startswith("refused: ")
            continue
        ports = "sorted-blocks", "triton-distributed"
        if row.role == "weft" or row.provider in ("weft.gemm_alone", *ports) or row.provider.startswith("tiles."):
            assert row.max_abs_error is not None
            assert (row.median_us or 0) > 0 if timed else row.median_us is None
            assert row.mode == ("host" if timed else None)
            assert row.reason is None
        else:
            absent = (
                "is not installed"
                if row.provider in ("deep_ep", "pplx", "liger")
                else "needs GPUs; these are simulated ranks"
            )
            assert absent in row.reason


@pytest.mark.parametrize(
    ("error", "status", "shown", "reason"),
    [
        (
            None,
            0,
            "refused",
            "refused: gathered_prefill_attention: algorithm='pipelined' does not take this call: cuDNN",
        ),
        (ValueError("no such size"), 1, "–", "no such size"),
        (TypeError("gathered_prefill_attention: no"), 1, "–", "TypeError: gathered_prefill_attention: no"),
    ],
    ids=["refused by name", "another ValueError", "another error"],
)
def test_a_design_that_refuses_a_call_by_name_has_not_failed(error, status, shown, reason, monkeypatch):
    op = op_of("gathered-prefill-attention")
    choose = type(op).choose

    def failing(self, call, machine):
        if error is not None and call.design == "pipelined":
            raise error
        return choose(self, call, machine)

    monkeypatch.setattr(type(op), "choose", failing)
    words = [op.alias, "--dtype", "fp32", "--check-only", "--providers", "weft.gathered,weft.pipelined"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == status, result.output
    cells = next(line.split() for line in result.stdout.splitlines() if line.startswith("8x4x2x16"))
    assert cells[1:3] == ["right", shown]
    assert reason in result.stdout


def test_designs_are_checked_in_the_simulator_and_by_name():
    named = CliRunner().invoke(app, ["ag-gemm", "--check-only", "--providers", "weft.segments"])  # the former name
    assert named.exit_code == 0, named.output
    assert "weft.pipelined" in named.stdout and "weft.auto" not in named.stdout
    everything = CliRunner().invoke(app, ["gemm-ar", "--check-only", "--world-size", "3"])
    assert everything.exit_code == 0, everything.output
    assert everything.stdout.count("right") == 4


def test_providers_of_other_ops_are_named_when_they_are_left_out():
    result = CliRunner().invoke(app, ["all-reduce", "--check-only", "--providers", "weft.auto,cublas"])
    assert result.exit_code == 0, result.output
    assert "weft: all-reduce has no provider cublas; the others are measured\n" in result.stderr


def test_flags_and_providers_that_need_gpus_are_named():
    words = ["mlp@decode:1x3", "--breakdown", "--eager", "--mode", "auto", "--quick", "--algorithm-cache", "x.json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for flag in ("--breakdown", "--eager", "--algorithm-cache"):
        assert f"weft: {flag} has no effect without GPUs\n" in result.stderr
    for outcome in ("weft.auto checked", "weft.auto set up", "torch.compile excluded"):
        assert f"  decode 1x3: {outcome}, " in result.stderr
    assert "torch.compile checked" not in result.stderr


@pytest.mark.parametrize("ops", [("all-reduce@96", "mlp@decode:1x3"), ("mlp@decode:1x3", "all-reduce@96")])
def test_a_workload_without_the_named_baselines_runs_with_weft_alone(ops, tmp_path):
    for words, only_weft, other in (
        ("weft.auto,torch.eager", "all-reduce", ("mlp", ["weft.auto", "torch.eager"])),
        ("weft.auto,nccl", "mlp", ("all-reduce", ["weft.auto", "nccl", "nccl.window"])),
    ):
        file = tmp_path / words
        result = CliRunner().invoke(app, [*ops, "--check-only", "--providers", words, "--json", str(file)])
        assert result.exit_code == 0, result.output
        absent = words.partition(",")[2]
        assert f"weft: {only_weft} has no provider {absent}; the others are measured\n" in result.stderr
        found = {one.op: report.providers_of(one) for one in read(file)}
        assert found == dict([(only_weft, ["weft.auto"]), other])


@pytest.mark.parametrize("ops", [("all-reduce", "mlp", "train"), ("train", "mlp", "all-reduce")])
def test_words_that_no_workload_knows_are_refused_with_what_each_has(ops):
    result = CliRunner().invoke(app, [*ops, "--providers", "weft,torch.eagre,nccl"])
    assert result.exit_code == 2 and result.stdout == ""
    has = {
        "all-reduce": "all-reduce has weft.auto, weft.one_shot, ",
        "mlp": "mlp has weft.auto, weft.sequence_parallel, weft.replicated, torch.eager, torch.compile",
        "train": "train has weft.auto, weft.under_scatter, ",
    }
    assert result.stderr.startswith(f"weft: provider 'torch.eagre' is unknown; {has[ops[0]]}")
    assert all(f"; {has[op]}" in result.stderr for op in ops)
    result = CliRunner().invoke(app, [*ops, "--providers", "nccl,torch.fused"])
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "weft: mlp has no provider nccl, torch.fused; it has weft.auto, weft.sequence_parallel, "
    )


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (WeftError("rank 1: gone"), 1, "rank 1: gone"),
        (KeyboardInterrupt(), 130, "interrupted, so the rest was not measured"),
    ],
)
def test_what_was_measured_before_a_run_ends_early_is_shown_and_written(error, status, said, monkeypatch, tmp_path):
    measure, file = harness_bench.Bench.measure, tmp_path / "x.json"

    def failing(bench, shape):
        if (bench.team.size, bench.team.rank, shape.size) == (3, 0, (240,)):
            raise error
        return measure(bench, shape)

    monkeypatch.setattr(harness_bench.Bench, "measure", failing)
    words = ["all-gather", "--check-only", "--providers", "weft.auto", "--json", str(file)]
    result = CliRunner().invoke(app, [*words, "--shapes", "96,240", "--world-size", "2,3"])
    assert result.exit_code == status, result.output
    assert f"weft: {said}" in result.stderr
    assert result.stdout.count("right") == 3
    found = read(file)
    assert [(one.world_size, report.shapes_of(one)) for one in found] == [(2, [(96,), (240,)]), (3, [(96,)])]
    file.unlink()
    result = CliRunner().invoke(app, [*words, "--shapes", "240", "--world-size", "3"])
    assert result.exit_code == (2 if status == 1 else 130) and not file.exists()


def test_check_only_at_two_world_sizes():
    result = CliRunner().invoke(
        app, ["all-gather", "--check-only", "--world-size", "2,3,2", "--providers", "weft", "--shapes", "96,240"]
    )
    assert result.exit_code == 0, result.output
    assert "world size 2" in result.stdout
    assert "world size 3" in result.stdout
    assert result.stdout.count("right") == 12  # two shapes and two world sizes by three providers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all"], "op 'all' is unknown"),
        (["gemm", "--shapes", "qwen4"], "neither a set"),
        (["ag-gemm", "--shapes", "4096,12800,5121"], "simulated ranks take at most 512 in each of M, N and K"),
        (
            ["gemm", "--providers", "weft,cudnn"],
            "provider 'cudnn' is unknown; gemm has weft.auto, weft.cublas, weft.small_m, weft.persistent, ",
        ),
        (["all-reduce", "--providers", "cublas"], "it has weft.auto"),
        (["gemm-rs", "--shapes", "3,16,16"], "take 4"),
        (["all-reduce-rms-norm", "--shapes", "3,16,16"], "neither a set (qwen3-32b, llama3-70b) nor M,H"),
        (["all-reduce-rms-norm", "--shapes", "3,12"], "takes rows of 16 bytes or a multiple"),
        (
            ["all-reduce-rms-norm", "--shapes", "1,32768", "--dtype", "fp32", "--check-only"],
            "131072 bytes; take 1,16384",
        ),
        (["all-reduce-rms-norm", "--shapes", "1,8", "--dtype", "int8"], "dtype int8 is unknown"),
        (["gemm", "--world-size", "0"], "not a list of positive numbers"),
        (
            ["all-reduce", "--world-size", "2,1000"],
            "--world-size 1000: at most 16 ranks are simulated; take 16, or a machine",
        ),
        (["gemm", "--world-size", ","], "--world-size ',' names nothing; name something, or leave --world-size out"),
        (["gemm", "--world-size", "²"], "--world-size ² is not a list of positive numbers, as in 2,4"),
        (["gemm", "--providers", ","], "--providers ',' names nothing"),
        (["gemm", "--providers", ""], "--providers '' names nothing"),
        (["gemm", "--world-size", "two"], "not a list of positive numbers"),
        (["gemm", "--dtype", "int8"], "dtype int8 is unknown"),
        (["gemm", "--device", "tpu"], "choose one of auto, cuda, sim"),
        (["gemm", "--seconds", "60"], "--seconds 60.0 is of --regret; pass both"),
        (["gemm", "--seed", "0"], "--seed 0 is of --regret; pass both"),
        (["gemm@3,4,5", "--shapes", "3,4,5"], "--shapes 3,4,5 has no effect, since each op has shapes after its @"),
        (["gemm@3,4,5", "--regret", "--check-only", "--drawn", "2"], "--drawn has no effect, since each op has shapes"),
        (["gemm", "--regret", "--check-only", "--json", "x.json"], "--json does not go with --regret --check-only"),
        (["gemm", "--device", "cuda", "--world-size", "2"], "needs 2 GPUs"),
        (["all-reduce", "--device", "cuda"], "needs 1 GPU and this machine has 0; use device sim"),
        (["gemm", "--plot", "x.png"], "name the file x.svg"),
        (["gemm", "--plot", "x.svg", "--json", "x.svg"], "--json and --plot are both x.svg; name two files"),
        (["gemm", "--plot", "/proc/foo/x.svg"], "--plot /proc/foo/x.svg: no file can be written there"),
        (["gemm", "--json", "/tmp"], "--json /tmp: no file can be written there (Is a directory); name another"),
        (["gemm", "--json", ""], "--json .: no file can be written there (Is a directory)"),
        (["gemm", "--json", "/dev/null"], "it is a device or a pipe"),
        (
            ["gemm@3,4,5", "all-reduce", "--out", "/proc/x"],
            "--out /proc/x/gemm.w2.json: no file can be written there (",
        ),
        (["gemm", "all@96"], "op 'all' is unknown"),
        (["gemm@qwen4", "all-reduce"], "neither a set"),
        (
            ["gemm", "--list-providers", "--json", "x.json"],
            "--json does not go with --list-providers, which prints names",
        ),
        (["gemm", "--list-providers", "--algorithm-cache", "x"], "--algorithm-cache does not go with --list-providers"),
        (["--list-providers", "--check-only"], "--check-only does not go with --list-providers"),
        (
            ["gemm", "all-reduce", "--bsz", "4"],
            "--bsz belongs to mlp, attn, model, generate; gemm, all-reduce takes --shapes",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_several_ops_in_one_launch(tmp_path):
    words = ["all-reduce@96", "gemm@3,16,16", "all_reduce@2KiB", "--out", str(tmp_path), "--json", str(tmp_path / "x")]
    result = CliRunner().invoke(app, [*words, "--providers", "weft", "--check-only", "--world-size", "2,3"])
    assert result.exit_code == 2 and "--shapes 2KiB: 2048 bytes do not divide into 3 parts" in result.stderr
    result = CliRunner().invoke(app, [*words, "--providers", "weft", "--check-only", "--world-size", "1,2"])
    assert result.exit_code == 0, result.output
    written = [f"{op}.w{size}.json" for op in ("all-reduce", "gemm") for size in (1, 2)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [*written, "x"]
    (found,) = read(tmp_path / "all-reduce.w2.json")
    assert report.shapes_of(found) == [(96,), (2048,)]
    assert set(found.machine) >= {"commit", "clean", "revision"}
    assert [(one.op, one.world_size) for one in read(tmp_path / "x")] == [
        ("all-reduce", 1), ("gemm", 1), ("all-reduce", 2), ("gemm", 2),
    ]  # fmt: skip


def test_shapes_and_flags_belong_to_those_that_take_them(tmp_path):
    """--shapes to ops without their own, --check and --mode to layers and models, providers to those that have them."""
    words = [
        "gemm", "ag-gemm@4,16,16", "mlp@decode:1x3", "--shapes", "3,16,16", "--mode", "gemm_ar", "--check", "--check-only",
    ]  # fmt: skip
    result = CliRunner().invoke(
        app, [*words, "--providers", "weft.auto,weft.sequence_parallel", "--json", str(tmp_path / "x")]
    )
    assert result.exit_code == 2 and "provider 'weft.sequence_parallel' is unknown; gemm has" in result.stderr
    result = CliRunner().invoke(
        app, [*words, "--providers", "weft.auto,weft.replicated", "--json", str(tmp_path / "x")]
    )
    assert result.exit_code == 0, result.output
    assert [report.providers_of(one) for one in read(tmp_path / "x")] == [
        ["weft.auto"],
        ["weft.auto"],
        ["weft.replicated"],
    ]
    assert [report.shapes_of(one) for one in read(tmp_path / "x")] == [[(3, 16, 16)], [(4, 16, 16)], [(1, 3, 1)]]

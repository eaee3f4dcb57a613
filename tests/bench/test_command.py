"""`weft bench` from the flags to the table, on simulated ranks."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import run as benchmarks_run
from weft.bench.command import bench
from weft.bench.harness import report, runner
from weft.bench.ops.shapes import OPS, is_gemm
from weft.errors import WeftError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
app = typer.Typer(pretty_exceptions_enable=False)
app.command("bench")(bench)
SMALL = {"gemm-ar": ["--shapes", "5,24,16"], "gemm": ["--shapes", "5,24,16"]}


@pytest.mark.parametrize(
    ("op", "dtype"), [*((op, "bf16") for op in OPS), *((op, "fp32") for op in OPS if not is_gemm(op))]
)
def test_every_op_runs_checks_and_reports(op, dtype, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "out" / "x.json", tmp_path / "x.svg"
    result = CliRunner().invoke(
        app, [op, "--dtype", dtype, "--json", str(file), "--plot", str(picture), *SMALL.get(op, [])]
    )
    assert result.exit_code == 0, result.output
    assert "times mean nothing" in result.stdout
    (found,) = report.read(file)
    assert (found.op, found.dtype, found.world_size, found.is_simulated) == (op, dtype, 2, True)
    assert picture.read_text().startswith("<svg")
    for row in found.rows:
        if row.role == "weft":
            assert row.median_us > 0
            assert row.max_abs_error is not None
            assert row.mode == "host"
            assert row.reason is None
        else:
            assert row.reason == "needs GPUs; these are simulated ranks"


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


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (WeftError("rank 1: gone"), 1, "rank 1: gone"),
        (KeyboardInterrupt(), 130, "interrupted, so the rest was not measured"),
    ],
)
def test_what_was_measured_before_a_run_ends_early_is_shown_and_written(error, status, said, monkeypatch, tmp_path):
    measure, file = runner.Bench.measure, tmp_path / "x.json"

    def failing(bench, shape):
        if (bench.team.size, bench.team.rank, shape.size) == (3, 0, (240,)):
            raise error
        return measure(bench, shape)

    monkeypatch.setattr(runner.Bench, "measure", failing)
    words = ["all-gather", "--check-only", "--providers", "weft.auto", "--json", str(file)]
    result = CliRunner().invoke(app, [*words, "--shapes", "96,240", "--world-size", "2,3"])
    assert result.exit_code == status, result.output
    assert f"weft: {said}" in result.stderr
    assert result.stdout.count("right") == 3
    found = report.read(file)
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
        (["all-reduce-rms-norm", "--shapes", "1,8", "--dtype", "int8"], "dtype 'int8' is unknown"),
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
        (["gemm", "--dtype", "int8"], "dtype 'int8' is unknown"),
        (["gemm", "--device", "tpu"], "choose one of auto, cuda, sim"),
        (["gemm", "--device", "cuda", "--world-size", "2"], "needs 2 GPUs"),
        (["all-reduce", "--device", "cuda"], "needs 1 GPU and this machine has 0; use device sim"),
        (["gemm", "--plot", "x.png"], "name the file x.svg"),
        (["gemm", "--plot", "x.svg", "--json", "x.svg"], "--json and --plot are both x.svg; name two files"),
        (["gemm", "--plot", "/proc/foo/x.svg"], "--plot /proc/foo/x.svg: no file can be written there"),
        (["gemm", "--json", "/tmp"], "--json /tmp: no file can be written there (Is a directory); name another"),
        (["gemm", "--json", ""], "--json .: no file can be written there (Is a directory)"),
        (["gemm", "--json", "/dev/null"], "it is a device or a pipe"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_several_ops_in_one_launch(tmp_path, capsys):
    words = ["all-reduce@96", "gemm@3,16,16", "all-reduce@2KiB"]
    assert benchmarks_run.main([*words, "--out", str(tmp_path), "--providers", "weft", "--check-only"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all-reduce.w2.json", "gemm.w2.json"]
    (found,) = report.read(tmp_path / "all-reduce.w2.json")
    assert report.shapes_of(found) == [(96,), (2048,)]
    assert found.command.startswith("python benchmarks/run.py all-reduce@96")
    assert "2 ops in" in capsys.readouterr().out
    assert benchmarks_run.main(["all@96", "--out", str(tmp_path)]) == 2
    assert "op 'all' is unknown" in capsys.readouterr().err
    assert benchmarks_run.main(["gemm@3,4,5", "--out", "/proc/x", "--check-only"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("weft: --out /proc/x/gemm.w2.json: no file can be written there (")
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert benchmarks_run.main(["gemm", "--world-size", "0", "--out", str(tmp_path)]) == 2
    assert "--world-size 0 is not a positive number" in capsys.readouterr().err
    assert benchmarks_run.main(["gemm", "--providers", ",", "--out", str(tmp_path)]) == 2
    assert "--providers ',' names nothing" in capsys.readouterr().err
    assert benchmarks_run.main(["gemm", "--world-size", "17", "--out", str(tmp_path)]) == 2
    assert "at most 16 ranks are simulated" in capsys.readouterr().err

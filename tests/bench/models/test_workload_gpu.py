"""`weft bench model` on real GPUs: a small model of published sizes, captured, timed and taken apart."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from weft.bench.command import command as bench
from weft.bench.workloads import read

app = typer.Typer(pretty_exceptions_enable=False)
app.command("bench")(bench)
MODEL = ["--model", "qwen3-0.6b", "--layers", "3", "--providers", "weft.auto,torch.eager", "--quick"]


def run(tmp_path, *arguments):
    file = tmp_path / "x.json"
    result = CliRunner().invoke(app, [*MODEL, *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    (found,) = read(file)
    return found.rows


@pytest.mark.gpu(1)
@pytest.mark.slow
def test_steps_are_checked_and_timed_inside_graphs(tmp_path):
    size = str(min(2, torch.cuda.device_count()))
    flags = ["--world-size", size, "--check", "--breakdown", "--shapes", "decode:3x70", "--shapes", "prefill:2x40"]
    for row in run(tmp_path, "model", *flags):
        assert (row.reason, row.mode) == (None, "graph")
        assert row.rms_error < 0.05
        assert row.parts_us["gemm"] > 0
        assert row.parts_us["attention"] > 0
        # One replay beside the median of several, with the profiler at work.
        assert 0.5 < sum(row.parts_us.values()) / row.median_us < 2


@pytest.mark.gpu(1)
@pytest.mark.slow
@pytest.mark.parametrize("level", ["mlp", "attn"])
def test_layers_are_checked_and_timed_inside_graphs(level, tmp_path):
    size = str(min(2, torch.cuda.device_count()))
    for row in run(
        tmp_path, level, "--world-size", size, "--check", "--shapes", "decode:3x70", "--shapes", "prefill:2x40"
    ):
        assert (row.reason, row.mode) == (None, "graph")


@pytest.mark.gpu(1)
@pytest.mark.slow
def test_answers_are_generated(tmp_path):
    for row in run(tmp_path, "generate", "--world-size", "1", "--shapes", "3x20+6"):
        assert (row.reason, row.mode) == (None, "wall")
        assert row.tokens_per_second > 0


@pytest.mark.gpu(2)
@pytest.mark.slow
def test_answers_are_generated_by_compiled_steps(tmp_path):
    providers = ["--providers", "torch.compile,torch.compile+symm"]
    rows = run(tmp_path, "generate", "--world-size", "2", "--shapes", "3x20+6", *providers)
    assert [(row.provider, row.reason, row.mode) for row in rows] == [
        ("torch.compile", None, "wall"),
        ("torch.compile+symm", None, "wall"),
    ]


@pytest.mark.gpu(2)
@pytest.mark.slow
def test_compiled_baselines_are_right_with_symmetric_memory_and_micro_pipelined(tmp_path):
    # Sums of 6 KiB, of 700 KiB and of 8 MiB: one-shot, two-shot, and two-shot without autotuning.
    flags = ["--world-size", "2", "--shapes", "decode:3x70,350x20", "--shapes", "prefill:32x128"]
    providers = ["--providers", "torch.compile+symm,torch.compile+async_tp"]
    rows = {(row.provider, row.label): row.reason for row in run(tmp_path, "model", *flags, *providers)}
    for label in ("decode 3x70", "decode 350x20", "prefill 32x128"):
        assert rows["torch.compile+symm", label] is None
    assert rows["torch.compile+async_tp", "prefill 32x128"] is None
    assert "too few to split" in rows["torch.compile+async_tp", "decode 3x70"]

"""Plots of canned reports."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.bench import canned
from weft.bench.command import BenchFlags
from weft.bench.render import plot
from weft.bench.render.plot import svg


def test_plots_are_pictures_with_every_provider_that_ran():
    pytest.importorskip("matplotlib")
    untimed = canned.report("gemm", 1, [canned.row((1, 2, 3), "cublas", "other", reason="no GPU")])
    picture = svg([canned.all_reduce(), canned.ag_gemm(), untimed])
    groups = [e.get("id") for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("}g")]
    assert [name for name in groups if name in ("weft.auto", "weft.one_shot", "nccl", "cublas+nccl", "cublas")] == [
        "weft.auto", "weft.one_shot", "nccl", "weft.auto", "cublas+nccl", "cublas",
    ]  # fmt: skip
    for words in (
        "all-reduce, bf16, world size 4 (4 x NVIDIA H200)",
        "64 MiB",
        "nothing was timed",
        "size of the whole tensor",
        "µs of a call",
        "TFLOP/s of a rank",
        "rows M of the whole GEMM",
        "limit: cublas, the GEMM alone",
    ):
        assert words in picture
    assert "torch.one_shot" not in picture
    assert svg([canned.all_reduce(), canned.ag_gemm(), untimed]) == picture


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    for refused in (lambda: svg([]), lambda: BenchFlags(ops=["gemm"], plot=tmp_path / "x.svg")):
        with pytest.raises(ValueError, match=r"pip install 'weft\[plot\]'"):
            refused()


def test_a_model_is_drawn():
    pytest.importorskip("matplotlib")
    picture = svg([canned.model()])
    for words in (
        "model of qwen3-32b, bf16, world size 4 (4 x NVIDIA H200)",
        "time over the roofline",
        "step, and the roofline of a step",
        "µs per layer",
        "step and provider",
        "weft.auto",
        "torch.compile",
        "gap",
    ):
        assert words in picture
    assert svg([canned.model()]) == picture


def lines(picture, provider):
    """Points and style of each line of a provider."""
    for group in ElementTree.fromstring(picture).iter():
        if group.get("id") == provider:
            path = next(one for one in group if one.tag.endswith("}path"))
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d"))]
            yield list(zip(numbers[::2], numbers[1::2], strict=True)), path.get("style")


def test_sizes_grow_from_left_to_right_however_they_were_measured():
    pytest.importorskip("matplotlib")
    sizes = (1 << 10, 1 << 16, 1 << 20, 10 << 10, 320 << 10)
    rows = [canned.row((size,), "weft.auto", "weft", float(size), label=f"{size} B") for size in sizes]
    [(points, _)] = lines(svg([canned.report("all-reduce", 2, rows)]), "weft.auto")
    assert len(points) == 5 and points == sorted(points)  # to the right
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)  # and up: a larger one takes longer
    assert points[4][0] - points[3][0] < points[1][0] - points[0][0]  # 320 KiB and 1 MiB are nearer than 1 and 10 KiB
    # Rows M of two GEMMs: a line each, which do not touch.
    shapes = [(m, n, 64) for n in (32, 64) for m in (512, 64, 128)]
    rows = [canned.row(shape, "weft.auto", "weft", 9.0, label=f"{shape[1]} M={shape[0]}") for shape in shapes]
    (first, _), (second, _) = lines(svg([canned.report("ag-gemm", 2, rows)]), "weft.auto")
    assert first == sorted(first) and second == sorted(second) and first[-1][0] < second[0][0]


def test_what_computes_less_than_the_op_is_a_dashed_line():
    pytest.importorskip("matplotlib")
    picture = svg([canned.ag_gemm()])
    dashed = {name: ["dasharray" in style for _, style in lines(picture, name)] for name in ("cublas", "cublas+nccl")}
    assert dashed["cublas"] == [True] and dashed["cublas+nccl"] == [False]

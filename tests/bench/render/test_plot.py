"""Plots of canned reports."""

import xml.etree.ElementTree as ElementTree

import pytest

from tests.bench import canned
from weft.bench.command import BenchOptions
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
    for words in ("all-reduce, bf16, world size 4: µs", "64 MiB", "nothing was timed"):
        assert words in picture
    assert "torch.one_shot" not in picture
    assert svg([canned.all_reduce(), canned.ag_gemm(), untimed]) == picture


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    for refused in (lambda: svg([]), lambda: BenchOptions(ops=("gemm",), plot=tmp_path / "x.svg")):
        with pytest.raises(ValueError, match=r"pip install 'weft\[plot\]'"):
            refused()


def test_a_model_is_drawn():
    pytest.importorskip("matplotlib")
    picture = svg([canned.model()])
    for words in ("times the roofline; ms", "µs per layer", "weft.auto", "torch.compile", "gap"):
        assert words in picture
    assert svg([canned.model()]) == picture

"""Calls by which DeepGEMM's kernels are compiled before engines start."""

import pytest

from benchmarks import engine_kernels


@pytest.mark.parametrize(
    "model, shapes",
    [
        ("qwen3-8b", [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)]),
        ("qwen3-30b-a3b", [(5120, 2048), (2048, 4096)]),
    ],
)
def test_layers_of_a_model_leave_experts_out(model, shapes):
    assert engine_kernels.layers(model) == shapes


def test_measured_numbers_of_rows_come_first_and_each_call_once():
    """Two models of the same shapes ask for each kernel once."""
    calls = engine_kernels.calls(["qwen3-30b-a3b", "qwen3-30b-a3b"], 1024)
    assert len(calls) == len(set(calls))
    counts = list(dict.fromkeys(count for count, *_ in calls))
    assert counts[:5] == [8, 32, 128, 1024, 64] and sorted(counts)[2:] == list(range(64, 1025, 64))
    assert {tuple(shape) for _, *shape in calls} == set(engine_kernels.layers("qwen3-30b-a3b"))


def test_kernels_go_where_the_engine_looks_for_them(monkeypatch):
    made = []
    monkeypatch.setattr(
        engine_kernels.importlib,
        "import_module",
        lambda name: made.append(name) or type("M", (), {"set_pdl": made.append}),
    )
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/tmp/vllm-cache")
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    engine_kernels.library("vllm")
    assert engine_kernels.os.environ["DG_JIT_CACHE_DIR"] == "/tmp/vllm-cache/deep_gemm"
    assert made == ["vllm.third_party.deep_gemm", True]

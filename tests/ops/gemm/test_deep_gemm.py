"""DeepGEMM in place of cuBLAS: when it is called, the layouts that it is given, and what is said where it is missing."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from weft.bench.ops import fp8_baselines
from weft.kernels.fp8 import Fp8
from weft.ops.case import BF16, FP16
from weft.ops.gemm import cublas, deep_gemm
from weft.plan.memo import forget
from weft.runtime import deep_gemm as runtime


def rows_of(M, K, seed=0):
    """Rows in fp8 with scales as kernels write them: a group's one after the other."""
    x = torch.randn((M, K), generator=torch.Generator().manual_seed(seed)).bfloat16()
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(-1) / 448
    data = (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return Fp8(data, scales.t().contiguous().t())


def weight_of(N, K):
    blocks = torch.randn((N, K), generator=torch.Generator().manual_seed(1))
    scales = torch.rand((-(-N // 128), K // 128)) + 0.5
    return Fp8((blocks / 3).to(torch.float8_e4m3fn), scales)


@pytest.fixture
def fresh():
    """What a process keeps of the package is forgotten before and after."""

    def clear():
        for kept in (runtime.package, runtime.version, forget):
            getattr(kept, "cache_clear", kept)()

    clear()
    yield clear
    clear()


@pytest.fixture
def calls(monkeypatch, fresh):
    """Calls of a stand-in, which checks the layouts that the package's documentation asks for."""
    made = []

    def fp8_gemm_nt(a, b, out):
        (rows, of_rows), (weight, of_blocks) = a, b
        assert rows.is_contiguous() and weight.is_contiguous() and of_blocks.is_contiguous() and out.is_contiguous()
        assert of_rows.stride(0) == 1 and of_rows.stride(1) % 4 == 0 and of_rows.stride(1) >= len(rows)
        assert of_rows.data_ptr() % 16 == 0 and out.dtype == BF16
        out.copy_(Fp8(rows, of_rows).dequantized(torch.float64) @ Fp8(weight, of_blocks).dequantized(torch.float64).T)
        made.append((len(rows), len(weight)))

    monkeypatch.setenv("WEFT_DEEP_GEMM", "1")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    monkeypatch.setattr(deep_gemm, "FEWEST_ROWS", 20)
    monkeypatch.setattr(deep_gemm, "FEWEST_RESULTS", 0)
    return made


def scaled(a, b, dtype=BF16, out=None):
    """As ``cublas.scaled`` on a GPU; None where cuBLAS multiplies."""
    return deep_gemm.multiply(a, b, out) if deep_gemm.multiplies(a, b, dtype) else None


def product(a, b):
    return (a.dequantized(torch.float64) @ b.dequantized(torch.float64).T).to(BF16)


@pytest.mark.parametrize("M", [20, 23, 64])
def test_it_multiplies_many_rows_of_blocks(calls, M):
    a, b = rows_of(M, 256), weight_of(192, 256)
    assert_identical(scaled(a, b), product(a, b))
    out = torch.empty(M, 192, dtype=BF16)
    assert scaled(a, b, out=out) is out
    assert_identical(out, product(a, b))
    assert calls == [(M, 192)] * 2


def test_pieces_of_rows_and_of_results_are_read_and_written_in_place(calls):
    a, b, wide = rows_of(80, 256), weight_of(192, 256), torch.zeros(80, 400, dtype=BF16)
    for rows in (slice(0, 36), slice(36, 80)):
        piece = Fp8(a.data[rows], a.scales[rows])
        scaled(piece, b, out=wide[rows, 100:292])
    assert_identical(wide[:, 100:292], product(a, b))
    assert not wide[:, :100].any() and not wide[:, 292:].any() and calls == [(36, 192), (44, 192)]


@pytest.mark.parametrize(
    ("M", "N", "K", "dtype"), [(19, 192, 256, BF16), (64, 100, 256, BF16), (64, 192, 256, FP16)], ids=str
)
def test_other_products_stay_cublas_s(calls, M, N, K, dtype):
    a, b = rows_of(M, K), weight_of(N, K)
    assert scaled(a, b, dtype) is None and calls == []


def test_scales_of_channels_stay_cublas_s(calls):
    data = rows_of(64, 256).data
    assert scaled(Fp8(data, torch.ones(64, 1)), Fp8(data, torch.ones(64, 1))) is None and calls == []


def test_cublas_s_place_is_taken(calls, monkeypatch):
    """Of tensors that are not on a CPU, where torch adds up in fp64."""
    a, b = rows_of(64, 256), weight_of(192, 256)
    there = [Fp8(*(one.to("meta") for one in matrix[:2])) for matrix in (a, b)]
    monkeypatch.setattr(deep_gemm, "multiply", lambda a, b, out: (a, b, out))
    assert cublas.scaled(*there, BF16, "out") == (*there, "out")


def test_baselines_named_cublas_stay_cublas_s(calls, monkeypatch):
    there = [Fp8(*(one.to("meta") for one in matrix[:2])) for matrix in (rows_of(64, 256), weight_of(192, 256))]
    monkeypatch.setattr(cublas, "_scaled_by_blocks", lambda a, b, dtype, out: (a, b, out))
    assert fp8_baselines.by_cublas(*there, BF16, "out") == (*there, "out") and calls == []


@pytest.fixture
def installed(monkeypatch, fresh):
    """sgl-deep-gemm as pip sees it, and no variable."""
    monkeypatch.delenv("WEFT_DEEP_GEMM", raising=False)
    monkeypatch.setattr(runtime.importlib.metadata, "version", {"sgl-deep-gemm": "0.1.4"}.__getitem__)
    monkeypatch.setattr(runtime, "find_spec", lambda name: name == "deep_gemm" or None)


@pytest.mark.parametrize(
    ("op", "M", "N", "told"),
    [
        ("gemm", 512, 51200, False),
        ("gemm", 2048, 5120, False),
        ("gemm", 4096, 5120, True),
        ("gemm-silu", 1024, 8192, True),
    ],
)
def test_a_plan_s_reason_tells_of_it(monkeypatch, installed, fresh, op, M, N, told):
    plan = partial(weft.ops.explain, f"{op}+block_fp8", N=N, K=5120, M=M)
    assert ("by DeepGEMM" in str(plan())) is told
    monkeypatch.setenv("WEFT_DEEP_GEMM", "0")
    fresh()
    assert "DeepGEMM" not in str(plan())


def test_it_is_refused_on_other_gpus_than_hopper(monkeypatch, installed, fresh, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert runtime.package() is None and not caplog.records
    monkeypatch.setenv("WEFT_DEEP_GEMM", "1")
    fresh()
    with pytest.raises(
        RuntimeError, match=r"WEFT_DEEP_GEMM=1, but it is for Hopper \(sm_90\), and this GPU is of sm_100, or leave"
    ):
        runtime.package()


@pytest.mark.parametrize("variable", [None, "0"])
def test_it_is_not_imported_where_it_is_not_chosen(monkeypatch, fresh, variable):
    """Another package of that name alone chooses nothing."""
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    if variable is None:
        monkeypatch.delenv("WEFT_DEEP_GEMM", raising=False)
    else:
        monkeypatch.setenv("WEFT_DEEP_GEMM", variable)
    assert not runtime.is_chosen() and runtime.package() is None


def test_where_it_is_installed_it_multiplies(monkeypatch, installed):
    module = SimpleNamespace(fp8_gemm_nt=None)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    assert runtime.package() is module and deep_gemm.takes(4096, 4096, 512) and not deep_gemm.takes(4096, 4032, 512)


def test_where_its_kernel_cannot_be_compiled_cublas_multiplies_and_one_warning_says_so(
    monkeypatch, installed, fresh, caplog
):
    def fp8_gemm_nt(*_):
        raise AssertionError("nvcc is not there")

    zeros, ones = torch.zeros, torch.ones
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **more: zeros(*sizes, **more))
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: ones(*sizes))
    monkeypatch.setattr(deep_gemm, "FEWEST_RESULTS", 0)
    a, b = rows_of(1024, 128), weight_of(64, 128)
    assert not any(deep_gemm.multiplies(a, b, BF16) for _ in range(2))
    [record] = caplog.records
    assert record.getMessage() == (
        "cuBLAS multiplies in place of DeepGEMM: deep_gemm cannot be used (nvcc is not there); pip install 'weft[deep-gemm]', "
        "or set WEFT_DEEP_GEMM=0"
    )
    monkeypatch.setenv("WEFT_DEEP_GEMM", "1")
    fresh()
    with pytest.raises(RuntimeError, match=r"WEFT_DEEP_GEMM=1, but deep_gemm cannot be used \(nvcc is not there\)"):
        deep_gemm.multiplies(a, b, BF16)


def test_a_missing_package_is_named_with_the_way_out(monkeypatch, fresh):
    monkeypatch.setenv("WEFT_DEEP_GEMM", "1")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(
        RuntimeError, match=r"WEFT_DEEP_GEMM=1, but deep_gemm cannot be used .*pip install .weft.deep-gemm.., or leave"
    ):
        runtime.package()


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("WEFT_DEEP_GEMM", "yes")
    with pytest.raises(ValueError, match=r"WEFT_DEEP_GEMM='yes' is neither 1 .* nor 0"):
        runtime.is_chosen()


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("M", "N", "K"), [(1024, 576, 384), (1027, 2560, 5120), (4096, 5120, 1280)], ids=str)
def test_the_package_multiplies_as_cublas_does(monkeypatch, fresh, M, N, K):
    """Pieces and whole, eager and in a graph: the same bits. Beside cuBLAS: within the rounding of bf16."""
    pytest.importorskip("deep_gemm")
    monkeypatch.setenv("WEFT_DEEP_GEMM", "1")
    monkeypatch.setattr(deep_gemm, "FEWEST_RESULTS", 0)
    a, b = (Fp8(*(one.cuda() for one in matrix[:2])) for matrix in (rows_of(M, K), weight_of(N, K)))
    a = Fp8(a.data, a.scales.t().contiguous().t())
    assert deep_gemm.multiplies(a, b, BF16)
    whole = cublas.scaled(a, b, BF16)
    expected = a.dequantized(torch.float64) @ b.dequantized(torch.float64).T
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=2**-12 * expected.abs().max().item())
    wide, graph = torch.full((M, N + 64), 7.0, device="cuda", dtype=BF16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cublas.scaled(a, b, BF16, wide[:, :N])
    graph.replay()
    assert_identical(wide[:, :N].contiguous(), whole)
    assert (wide[:, N:] == 7).all()
    monkeypatch.setenv("WEFT_DEEP_GEMM", "0")
    fresh()
    assert not deep_gemm.multiplies(a, b, BF16)
    torch.testing.assert_close(cublas.scaled(a, b, BF16), whole, rtol=2**-7, atol=2**-11 * expected.abs().max().item())

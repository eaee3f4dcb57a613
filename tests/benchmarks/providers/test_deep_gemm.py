"""DeepGEMM's baselines, by a stand-in for its kernel that asks for its layouts, over simulated ranks."""

import sys
import types

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from tests.bench.ops.test_baselines import Library, group_of
from tests.benchmarks.providers.loaded import loaded
from weft.bench.harness.provider import Unavailable
from weft.bench.ops import baselines, fp8_baselines
from weft.bench.ops.shapes import parse_shapes
from weft.bench.ops.workload import OpWorkload
from weft.kernels.fp8 import E4M3, Fp8

OPS = ("ag-gemm", "gemm-rs", "gemm-ar")
NAMES = ["deep_gemm", "deep_gemm+nccl"]


def fp8_gemm_nt(rows, weight, out):
    """out = rows @ weight.T: scales of rows lie one after the other along M, on 16 bytes, so that no kernel copies them."""
    (a, of_rows), (b, of_weight) = rows, weight
    assert a.dtype == b.dtype == E4M3 and of_rows.dtype == of_weight.dtype == torch.float32
    assert a.is_contiguous() and b.is_contiguous() and of_weight.is_contiguous() and out.is_contiguous()
    M, groups = of_rows.shape
    assert of_rows.stride() == (1, -(-M // 4) * 4) and of_weight.shape == (len(b) // 128, groups)
    out.copy_(Fp8(*rows).dequantized(torch.float64) @ Fp8(*weight).dequantized(torch.float64).T)


def prepared(op, shape, name, team):
    team.group = group_of(team, None)
    workload = OpWorkload(name=f"{op}+block_fp8", shapes=())
    problem = workload.problem(parse_shapes(f"{op}+block_fp8", [shape], team.size)[0], team)
    (provider,) = choose(f"{op}+block_fp8", [name])
    return problem, provider.make(problem)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    for module in (baselines, fp8_baselines):
        monkeypatch.setattr(module, "dist", Library)
    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    loaded("deep_gemm")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_deep_gemm_gives_the_answer(op, name):
    def main(team):
        problem, made = prepared(op, f"{team.size * 8},128,512", name, team)
        for _ in range(2):
            result = made.run(0)
            assert problem.judge(result, made.local).wrong == ""
        return bool(problem.judge(result * 1.1, made.local).wrong)

    assert weft.simulate(main, 2) == [True, True]


def test_what_it_does_not_take_is_said(monkeypatch):
    def said(team, shape):
        with pytest.raises(Unavailable) as reason:
            prepared("ag-gemm", shape, "deep_gemm+nccl", team)
        return str(reason.value)

    wrong = "timed where 4 divides M=6 and 128 divides K=512"
    assert weft.simulate(said, 2, args=("6,128,512",)) == [wrong] * 2
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "pip install sgl-deep-gemm==0.1.4.post1" in weft.simulate(said, 2, args=("8,128,512",))[0]

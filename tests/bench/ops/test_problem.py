"""Inputs and answers of ops as benchmarks take them."""

import types

import pytest
import torch

import weft
from weft.bench.harness.workload import Shape
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of, parse_shapes


@pytest.mark.parametrize("size", [(16, 8192, 512), (16, 1024, 1024), (1, 512, 512)])
def test_weights_are_cold_again_when_they_come_round(size):
    shape = types.SimpleNamespace(nodes=1, node_size=4)
    team = types.SimpleNamespace(is_simulated=False, size=4, rank=0, shape=shape, device=torch.device("cpu"))
    problem = OpProblem(op_of("gemm"), Shape(size=size, label=""), "bf16", team)
    (m, n, k), calls = size, len(problem.sets)
    assert (m + n) * k * 2 * (calls - 1) >= 120e6
    assert problem.replicas == len(problem.sets)
    assert not torch.equal(problem.sets[0][1], problem.sets[1][1])


@pytest.mark.parametrize("op", ["all-gather", "all-to-all", "reduce-scatter", "ag-gemm", "gemm-rs", "gemm-ar"])
def test_a_wrong_element_is_seen(op):
    def main(team):
        problem = OpProblem(op_of(op), parse_shapes(op, [], 2, tiny=True)[0], "bf16", team)
        right = problem.answer().to(torch.bfloat16, copy=True)
        assert not problem.judge(right).wrong
        right.view(-1)[5] += 1
        assert problem.judge(right).wrong.startswith("1 of ")
        assert problem.judge(right[1:]).wrong.startswith("shape ")
        return True

    assert all(weft.simulate(main, 2))

"""sigmoid_mul of special values, columns of wider tensors, refused arguments; its cases run with all others."""

import importlib

import pytest
import torch

import weft
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated, random
from weft import ops
from weft.kernels.fp8 import RowFormat
from weft.ops.case import BF16, FP32, Draw

sigmoid = importlib.import_module("weft.ops.elementwise.sigmoid_mul")


@pytest.mark.parametrize("device", DEVICES)
def test_sigmoid_mul_of_the_largest_and_smallest(device):
    def check(device):
        gate = torch.tensor([[-3e38, -200.0, -0.0, 0.0, 200.0, torch.inf, torch.nan, 3.0]], device=device)
        x = torch.tensor([[2.0, -1.0, 5.0, torch.inf, 2.0, 1.0, 1.0, torch.inf]], device=device)
        torch.testing.assert_close(ops.sigmoid_mul(x, gate), x * gate.sigmoid(), equal_nan=True, rtol=1e-6, atol=1e-30)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_both_may_be_columns_of_a_wider_tensor(device):
    def check(device):
        wide = random((5, 100), FP32, device)
        x, gate = wide[:, 60:], wide[:, 7:47]
        torch.testing.assert_close(ops.sigmoid_mul(x, gate), x * gate.sigmoid())

    everywhere(check, device)


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("message", "x", "gate", "fp8"),
    [
        ("x has shape (4,); it must be (M, N)", ONES[0], ONES[0], None),
        ("gate has shape (3, 3); it must be (3, 4)", ONES, ONES[:, 1:], None),
        ("x.dtype=torch.float64 is not one of float16, bfloat16, float32", ONES.double(), ONES.double(), None),
        ("gate.dtype=torch.float16 is not one of float32", ONES, ONES.half(), None),
        ("a result of torch.float32 with fp8", ONES, ONES, RowFormat("group")),
        ("N=40000 > 32768 with a scale for each token", *[torch.ones(1, 40000, dtype=BF16)] * 2, RowFormat("token")),
    ],
)
def test_wrong_arguments_are_refused(message, x, gate, fp8):
    check_refused(lambda: ops.sigmoid_mul(x, gate, fp8=fp8), (), message)


MUTANTS = {
    "no sigmoid": ("tl.sigmoid(gates)", "gates"),
    "gate and x": ("value * tl.sigmoid(gates)", "gates * tl.sigmoid(value)"),
    "the stride of x": ("gate + row * gate_stride", "gate + row * stride"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_find_a_planted_bug(name, tmp_path):
    mutant = mutated(sigmoid, *MUTANTS[name], f"sigmoid_mul_mutant_{len(name)}", tmp_path)
    [case] = [case for case in sigmoid.SIGMOID_MUL.cases() if (case.sizes, case.dtype) == ((3, 300), FP32)]

    def main(team):
        x, gate = inputs = sigmoid.SIGMOID_MUL.inputs(case, 0, Draw(case, 0))
        out = mutant.SigmoidMul().forward(x, torch.cat((gate, x), dim=1)[:, :300])
        return out.double() - sigmoid.SIGMOID_MUL.reference(case, 0, [inputs])

    [error] = weft.simulate(main, 1)
    assert error.abs().mean() > 0.1

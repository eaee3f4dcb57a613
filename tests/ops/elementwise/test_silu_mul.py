"""silu_mul of special values, and refused arguments; its cases run with all others."""

import importlib

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated, random
from weft import ops
from weft.kernels.fp8 import RowFormat
from weft.ops.case import BF16, Draw

silu = importlib.import_module("weft.ops.elementwise.silu_mul")


@pytest.mark.parametrize("device", DEVICES)
def test_silu_mul_of_the_largest_and_smallest(device):
    def check(device):
        gate = torch.tensor([[-3e38, -200.0, -0.0, 0.0, 200.0, torch.inf, torch.nan, 3.0]], device=device)
        up = torch.tensor([[2.0, -1.0, 5.0, torch.inf, 2.0, 1.0, 1.0, torch.inf]], device=device)
        expected = torch.nn.functional.silu(gate) * up
        actual = ops.silu_mul(torch.cat((gate, up), dim=1))
        # silu(-3e38) is -0 or the smallest there is: torch does not say.
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-6, atol=1e-30)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_fp8_have_the_same_bits_by_the_tile_of_many_elements(device, monkeypatch):
    def check(device):
        gate_up = random((130, 2 * 1300), BF16, device)
        few = ops.silu_mul(gate_up, fp8=RowFormat("group"))
        monkeypatch.setattr(silu, "MANY", 130 * 1300)
        assert silu.tile_of(130, 1300, RowFormat("group")) == (4, 512) != silu.tile_of(129, 1300, RowFormat("group"))
        many = ops.silu_mul(gate_up, fp8=RowFormat("group"))
        assert_identical(many.scales, few.scales)
        assert_identical(many.data.view(torch.uint8), few.data.view(torch.uint8))

    everywhere(check, device)


@pytest.mark.parametrize(
    ("message", "gate_up"),
    [
        ("gate_up has shape (3, 5); it must be [M, 2 N]", torch.ones(3, 5)),
        ("gate_up.dtype=torch.float64 is not one of float16, bfloat16, float32", torch.ones(3, 4).double()),
    ],
)
def test_wrong_arguments_are_refused(message, gate_up):
    check_refused(ops.silu_mul, (gate_up,), message)


@pytest.mark.parametrize("name", ["relu", "gelu", "", None, 1])
def test_unknown_activations_are_refused(name):
    message = f"silu_mul: activation={name!r} is not one of 'silu', 'gelu_tanh'"
    check_refused(lambda: ops.silu_mul(torch.ones(3, 4), activation=name), (), message)


@pytest.mark.parametrize("device", DEVICES)
def test_gelu_of_the_largest_and_smallest(device):
    def check(device):
        gate = torch.tensor([[-3e38, -200.0, -9.0, -0.0, 0.0, 9.0, 200.0, torch.nan]], device=device)
        up = torch.tensor([[2.0, -1.0, 5.0, 5.0, 2.0, 1.0, 2.0, 1.0]], device=device)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        actual = ops.silu_mul(torch.cat((gate, up), dim=1), activation="gelu_tanh")
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-6)

    everywhere(check, device)


# What the cases must see: another activation, and one of its constants.
MUTANTS = {
    "silu": ("activated(gate, ACTIVATION)", 'activated(gate, "silu")'),
    "gate and up": ("activated(gate, ACTIVATION) * up", "activated(up, ACTIVATION) * gate"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_find_a_planted_bug(name, tmp_path):
    mutant = mutated(silu, *MUTANTS[name], f"silu_mul_mutant_{len(name)}", tmp_path)
    [case] = [case for case in silu.SILU_MUL.cases() if case.field("activation") and case.sizes == (3, 600)][:1]

    def main(team):
        inputs = silu.SILU_MUL.inputs(case, 0, Draw(case, 0))
        out = mutant.SiluMul().forward(inputs[0], None, 0.0, "gelu_tanh")
        return out.double() - silu.SILU_MUL.reference(case, 0, [inputs])

    [error] = weft.simulate(main, 1)
    assert error.abs().mean() > 0.1

"""silu_mul of special values, and refused arguments; its cases run with all others."""

import pytest
import torch

from tests.ops.layer_cases import DEVICES, check_refused, everywhere
from weft import ops


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


@pytest.mark.parametrize(
    ("message", "gate_up"),
    [
        ("gate_up has shape (3, 5); it must be [M, 2 N]", torch.ones(3, 5)),
        ("gate_up.dtype=torch.float64 is not one of float16, bfloat16, float32", torch.ones(3, 4).double()),
    ],
)
def test_wrong_arguments_are_refused(message, gate_up):
    check_refused(ops.silu_mul, (gate_up,), message)

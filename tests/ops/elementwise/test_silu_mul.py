"""silu_mul against plain PyTorch in double, on a virtual rank and on a GPU."""

import pytest
import torch

from tests.ops.cases import BF16, FP16, FP32
from tests.ops.closeness import assert_close
from tests.ops.layer_cases import DEVICES, EPS, check_refused, deferred, everywhere, random
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_silu_mul(dtype, device):
    def check(device):
        for shape in ((1, 1), (1, 1024), (2, 513), (3, 300), (130, 257), (0, 8), (5, 0)):
            gate_up = 3 * random((shape[0], 2 * shape[1]), dtype, device)
            wide = torch.cat((gate_up, gate_up), dim=1)
            gate, up = gate_up.double()[:, : shape[1]], gate_up.double()[:, shape[1] :]
            expected = gate * torch.sigmoid(gate) * up
            for x in (gate_up, wide[:, : 2 * shape[1]], gate_up.t().contiguous().t()):
                actual = ops.silu_mul(x)
                assert actual.is_contiguous() and actual.dtype == dtype
                assert_close(actual, expected, 4, what=f"silu_mul {shape}")

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_silu_mul_applies_a_deferred_rms_scale(dtype, device):
    def check(device):
        for M, N, parts in ((1, 1, 1), (5, 513, 20), (130, 257, 3), (0, 8, 2)):
            gate_up = 3 * random((M, 2 * N), dtype, device)
            norm, factor = deferred(gate_up, parts)
            gate, up = (gate_up.double() * factor).chunk(2, dim=1)
            expected = gate * torch.sigmoid(gate) * up
            wide = torch.cat((gate_up, gate_up), dim=1)[:, : 2 * N]
            strided = torch.cat((norm.squares, norm.squares), dim=1)[:, :parts]
            for x, squares in ((gate_up, norm.squares), (wide, strided)):
                actual = ops.silu_mul(DeferredNorm(x, squares, EPS))
                assert actual.is_contiguous() and actual.dtype == dtype
                # Factor, product and exponential are rounded one after the other.
                rtol = max(torch.finfo(dtype).eps, 8 * torch.finfo(FP32).eps)
                torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-7)

    everywhere(check, device)


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

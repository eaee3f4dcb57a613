"""add_rms_norm: the rounding of its sum, and refused arguments; its cases run with all others."""

import pytest
import torch

from tests.ops.checking import assert_identical
from tests.ops.layer_cases import DEVICES, EPS, check_refused, everywhere, random
from weft import ops
from weft.ops.case import BF16, FP16, FP32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_hidden_is_rounded_once(dtype, device):
    def check(device):
        for shape in ((7, 1), (3, 5, 640)):
            x, residual = random(shape, dtype, device, 1), random(shape, dtype, device, 2)
            _, hidden = ops.add_rms_norm(x, residual, torch.ones(shape[-1:], dtype=dtype, device=device), EPS)
            assert_identical(hidden, (x.double() + residual.double()).float().to(dtype), what=f"hidden {shape}")

    everywhere(check, device)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("x has no dimension 0", (torch.ones(()), torch.ones(()), torch.ones(1), EPS)),
        ("residual has shape (2, 3); it must be (2, 4)", (torch.ones(2, 4), torch.ones(2, 3), torch.ones(4), EPS)),
        ("weight has shape (3,); it must be (4,)", (torch.ones(2, 4), torch.ones(2, 4), torch.ones(3), EPS)),
        (
            "weight.dtype=torch.float16 is not one of float32",
            (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4).half(), EPS),
        ),
        ("residual is on meta, not on cpu", (torch.ones(2, 4), torch.ones(2, 4, device="meta"), torch.ones(4), EPS)),
        (
            "rows of 20000 elements have 80000 bytes",
            (torch.ones(1, 20000), torch.ones(1, 20000), torch.ones(20000), EPS),
        ),
    ],
)
def test_wrong_arguments_are_refused(message, arguments):
    check_refused(ops.add_rms_norm, arguments, message)

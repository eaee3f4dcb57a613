"""add_rms_norm against plain PyTorch in double, on a virtual rank and on a GPU."""

import pytest
import torch

from tests.ops.cases import BF16, FP16, FP32
from tests.ops.closeness import assert_close, assert_identical
from tests.ops.layer_cases import DEVICES, EPS, check_refused, everywhere, random, rms_norm
from weft import ops


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_add_rms_norm(dtype, device):
    def check(device):
        for shape in ((1,), (7, 1), (1, 96), (3, 5, 640), (130, 33), (2, 5120), (0, 16)):
            x, residual = random(shape, dtype, device, 1), random(shape, dtype, device, 2)
            weight = 1 + random(shape[-1:], dtype, device, 3) / 8
            hidden = x.double() + residual.double()
            for turned in (False, True):
                if turned:
                    x, residual = (y.transpose(0, -1).contiguous().transpose(0, -1) for y in (x, residual))
                normed, actual = ops.add_rms_norm(x, residual, weight, EPS)
                assert normed.is_contiguous() and actual.is_contiguous()
                assert_identical(actual, hidden.float().to(dtype), what=f"hidden {shape}")
                expected = rms_norm(actual.double(), weight.double())
                assert_close(normed, expected, shape[-1], what=f"normed {shape}")

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

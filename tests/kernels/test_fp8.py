"""Rows in fp8: bytes and scales of special values, and the GPUs that convert them."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import check_refused
from tests.ops.test_compile_layer_kernels import caps_of
from weft.kernels.fp8 import check_e4m3, quantize_rows, read_back

inf, nan, most, tiny = torch.inf, torch.nan, torch.finfo(torch.float32).max, 2.0**-126
VALUES = {
    "zeros": ([0.0, -0.0], 1.0, [0x00, 0x80]),
    "the largest is 448": ([7.0, -3.5, 1.75], 1 / 64, [0x7E, 0xF6, 0x6E]),
    "halfway to the even one": ([448.0, 17.0, 19.0, -17.0], 1.0, [0x7E, 0x58, 0x5A, 0xD8]),
    "the largest number": ([most, -most], most / 448, [0x7E, 0xFE]),
    "smallest scale": ([tiny * 448, tiny], tiny, [0x7E, 0x38]),
    "subnormal numbers": ([tiny / 2, -tiny / 4, tiny / 2**10, tiny / 2**11], tiny, [0x30, 0xA8, 0x00, 0x00]),
    "infinities and NaN": ([inf, -inf, nan, 448.0, -1.0], 1.0, [0x7F, 0x7F, 0x7F, 0x7E, 0xB8]),
    "only NaN": ([nan, 0.0], 1.0, [0x7F, 0x00]),
}


@pytest.mark.parametrize("name", VALUES)
def test_special_values_have_these_bytes_and_scales(name):
    values, scale, wanted = VALUES[name]

    def main(team):
        x = torch.zeros(1, 130)
        x[0, 128 - len(values) : 128] = torch.tensor(values)  # the last block, of two columns, has only zeros
        rows, scales = quantize_rows(x, 2, team.caps)
        written = rows[0].view(torch.uint8).tolist()
        assert written[128 - len(values) :] == [*wanted, 0, 0] and not any(written[: 128 - len(values)])
        assert_identical(scales, torch.tensor([[scale, 1.0], [1.0, 1.0]]))
        finite = torch.tensor(values).isfinite()
        back = read_back(rows, scales, torch.float32)[0, 128 - len(values) : 128]
        assert torch.equal(back.isfinite(), finite)
        error = (back - torch.tensor(values))[finite].abs()
        assert (error <= torch.tensor(values)[finite].abs() / 16 + scale / 2**10).all()

    weft.simulate(main, 1)


def test_gpus_without_a_conversion_are_refused():
    check_refused(check_e4m3, ("moe_dispatch", caps_of("sm_80")), "moe_dispatch: dtype=torch.float8_e4m3fn on sm_80")
    for arch in ("sm_90", "sm_100", "gfx942"):
        check_e4m3("moe_dispatch", caps_of(arch))

"""top_p_mass and narrow compiled for every target, and refused arguments; the cases run with all others."""

import pytest
import torch

import weft
from tests.compiling import TARGETS, compiled
from tests.ops.test_compile_layer_kernels import FP32, INTS, LONGS, caps_of, check_compiles, check_machine_code
from tests.ops.vocab.test_sample_argmax import DTYPES
from weft import ops
from weft.ops.vocab.top_p_mass import LOWEST, narrow, narrow_kernel, top_p_mass_kernel
from weft.runtime.capabilities import launch_options


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 8), torch.zeros(2)
    with pytest.raises(ValueError, match="shift=3 is not one of 28, 24"):
        ops.top_p_mass(logits, rows, rows, rows.int(), 3)
    above, strided = torch.zeros(1, 16, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)[:, 0]
    with pytest.raises(ValueError, match=r"narrow: low has strides \(2,\); it is used in place"):
        narrow(above, rows, strided, rows.long(), 28)


def test_low_may_be_strided():
    def main(team):
        logits, rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), torch.ones(3)
        low = torch.tensor([[LOWEST, 0], [-5, 0], [1 << 29, 0]], dtype=torch.int32)[:, 0]
        masses = (ops.top_p_mass(logits, logits.amax(1), rows, x, 28) for x in (low, low.contiguous()))
        return torch.equal(*masses)

    assert weft.simulate(main, 1) == [True]


KERNELS = ("top_p_mass", "top_p_mass count", "top_p_mass floor", "narrow", "narrow first")


def built(name, arch, dtype=torch.bfloat16):
    options = launch_options(caps_of(arch))
    if name.startswith("top_p_mass"):
        arguments = torch.zeros(16, dtype=dtype), 16, FP32, FP32, INTS, INTS, LONGS, 64, 32, 28
        constants = {"COUNT": name.endswith("count"), "FLOORED": name.endswith("floor"), "THRESHOLDS": 16, "BLOCK": 256}
        return compiled(top_p_mass_kernel, *arguments, arch=arch, **constants, **options)
    constants = {"FIRST": name.endswith("first"), "THRESHOLDS": 16, "AT_ONCE": 64}
    return compiled(narrow_kernel, LONGS, FP32, INTS, LONGS, 8, 28, arch=arch, **constants, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch, name):
    for dtype in DTYPES:
        check_compiles(built(name, arch, dtype), arch)


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_on_sm_90(name, tmp_path):
    check_machine_code(built(name, "sm_90"), tmp_path)

"""top_p_mass and narrow against plain torch, over ragged sizes, and compiled for every target."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.layer_cases import DEVICES, everywhere
from tests.ops.test_compile_layer_kernels import FP32, INTS, LONGS, caps_of, check_compiles, check_machine_code
from tests.ops.vocab.test_sample_argmax import DTYPES, inputs
from weft import ops
from weft.ops.vocab.top_p_mass import LOWEST, SHIFTS, narrow, narrow_kernel, top_p_mass_kernel
from weft.runtime.capabilities import launch_options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5000), (3, 300), (17, 70)], ids=str)
def test_narrowing_ends_at_the_least_logit_that_top_p_keeps(shape, dtype, device):
    def check(device):
        logits, _, _, _ = inputs(*shape, dtype, device)
        batch = shape[0]
        temperature = torch.linspace(0.5, 2, batch, device=device)
        top_p = torch.linspace(0.3, 1.0, batch, device=device)
        low = torch.full((batch,), LOWEST, dtype=torch.int32, device=device)
        wanted = torch.zeros(batch, dtype=torch.int64, device=device)
        for shift in SHIFTS:
            above = ops.top_p_mass(logits, logits.float().amax(dim=1), temperature, low, shift)
            narrow(above, top_p, low, wanted, shift)
        for row in range(batch):
            if top_p[row] == 1:
                assert low[row] == LOWEST
                continue
            ordered, tokens = torch.softmax(logits[row].double() / temperature[row], -1).sort(descending=True)
            count = int((ordered.cumsum(-1) - ordered < top_p[row]).sum())
            least = logits[row, tokens[count - 1]].float()
            bits = (least + 0.0).view(torch.int32).item()
            assert low[row].item() == (bits if bits >= 0 else bits ^ 0x7FFFFFFF)

    everywhere(check, device)


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 8), torch.zeros(2)
    with pytest.raises(ValueError, match="shift=3 is not one of 28, 24"):
        ops.top_p_mass(logits, rows, rows, rows.int(), 3)


KERNELS = ("top_p_mass", "narrow", "narrow first")


def built(name, arch, dtype=torch.bfloat16):
    options = launch_options(caps_of(arch))
    if name == "top_p_mass":
        arguments = torch.zeros(16, dtype=dtype), 16, FP32, FP32, INTS, LONGS, 64, 32, 28
        return compiled(top_p_mass_kernel, *arguments, THRESHOLDS=16, BLOCK=256, arch=arch, **options)
    constants = {"FIRST": name.endswith("first"), "THRESHOLDS": 16, "num_warps": 1}
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

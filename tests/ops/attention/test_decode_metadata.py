"""decode_metadata compiled for every target, and refused arguments; its cases run with all others."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.test_compile_layer_kernels import INTS, LONGS, caps_of, check_compiles, check_machine_code
from weft import ops
from weft.ops.attention.decode_metadata import decode_metadata_kernel
from weft.runtime.capabilities import launch_options


def test_wrong_arguments_are_refused():
    longs, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages has shape \(2, 3\); it must be \(3, max_pages\)"):
        ops.decode_metadata(torch.zeros(3, dtype=torch.int64), table, 16, 2)
    with pytest.raises(ValueError, match="positions.dtype=torch.int32 is not one of int64"):
        ops.decode_metadata(longs.int(), table, 16, 2)


def built(arch):
    arguments, constants = (
        (LONGS, INTS, LONGS, LONGS, INTS, INTS, 2, 40, 4, 0),
        {"PAGE": 64, "RANKS": 1, "QUERIES": 1, "BLOCK": 128},
    )
    return compiled(decode_metadata_kernel, *arguments, arch=arch, **constants, **launch_options(caps_of(arch)))


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch):
    check_compiles(built(arch), arch)


def test_machine_code_on_sm_90(tmp_path):
    check_machine_code(built("sm_90"), tmp_path)

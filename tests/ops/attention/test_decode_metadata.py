"""decode_metadata against plain Python, and compiled for every target."""

import pytest
import torch

from tests.compiling import TARGETS, compiled
from tests.ops.layer_cases import DEVICES, everywhere
from tests.ops.test_compile_layer_kernels import INTS, LONGS, caps_of, check_compiles, check_machine_code
from weft import ops
from weft.ops.attention.decode_metadata import decode_metadata_kernel
from weft.runtime.capabilities import launch_options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (5, 2), (200, 1), (3, 100)])
def test_a_token_goes_where_the_page_table_says(batch, kv_heads, page_size, device):
    def check(device):
        generator = torch.Generator().manual_seed(batch)
        pages = torch.randperm(batch * 4, generator=generator).view(batch, 4).to(torch.int32)
        positions = torch.randint(-1, 4 * page_size, (batch,), generator=generator)
        found = ops.decode_metadata(positions.to(device), pages.to(device), page_size, batch * kv_heads)
        at, slots, lengths, arrivals = (one.cpu() for one in found)
        for row, position in enumerate(positions.tolist()):
            real = position >= 0
            expected = int(pages[row, position // page_size]) * page_size + position % page_size if real else -1
            assert (at[row], slots[row], lengths[row]) == (max(position, 0), expected, position + 1)
        assert arrivals.tolist() == [0] * (batch * kv_heads)
        assert (at.dtype, slots.dtype, lengths.dtype, arrivals.dtype) == (torch.int64,) * 2 + (torch.int32,) * 2

    everywhere(check, device)


def test_wrong_arguments_are_refused():
    longs, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages has shape \(2, 3\); it must be \(3, max_pages\)"):
        ops.decode_metadata(torch.zeros(3, dtype=torch.int64), table, 16, 2)
    with pytest.raises(ValueError, match="positions.dtype=torch.int32 is not one of int64"):
        ops.decode_metadata(longs.int(), table, 16, 2)


def built(arch):
    arguments, constants = (LONGS, INTS, LONGS, LONGS, INTS, INTS, 2, 40, 4), {"PAGE": 64, "BLOCK": 128}
    return compiled(decode_metadata_kernel, *arguments, arch=arch, **constants, **launch_options(caps_of(arch)))


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch):
    check_compiles(built(arch), arch)


def test_machine_code_on_sm_90(tmp_path):
    check_machine_code(built("sm_90"), tmp_path)
